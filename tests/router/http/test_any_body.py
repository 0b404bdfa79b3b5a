"""Any body at all, made by hypothesis: an answer or a 400, never a 5xx."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.api.anthropic_messages.wire import CountTokensRequest, MessagesRequest
from router.api.responses.request import KEPT
from router.api.responses.wire import ResponsesRequest
from router.openai_api import ChatRequest, CompletionRequest, TokenizeRequest
from tests.nightly import examples
from tests.router.conftest import JSON, VOCAB_SIZE, Server

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)

message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
    optional={"content": st.text(max_size=20) | json_values, "tool_calls": json_values, "name": st.text()},
)

response_item = json_values | st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "x"])},
    optional={
        "role": st.sampled_from(["developer", "user", "assistant"]),
        "content": st.text(max_size=20)
        | json_values
        | st.lists(st.just({"type": "input_text", "text": "a"})),
        "call_id": st.text(max_size=3) | json_values,
        "name": st.text(max_size=3) | json_values,
        "arguments": st.just("{}") | st.just('"\\ud800"') | json_values,
        "output": st.text(max_size=3) | json_values,
    },
)

anthropic_block = json_values | st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "redacted_thinking", "tool_use", "tool_result", "x"])},
    optional={
        name: st.text(max_size=3) | json_values
        for name in ("text", "thinking", "id", "name", "input", "tool_use_id", "content")
    },
)

anthropic_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant"])},
    optional={"content": st.text(max_size=20) | st.lists(anthropic_block, max_size=3) | json_values},
)

sensible: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=20)
    | st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=5)
    | st.lists(st.text(), max_size=3),
    "messages": st.lists(message, max_size=3),
    "n": st.integers(1, 3),
    "max_tokens": st.integers(0, 9),
    "stop": st.lists(st.text(max_size=2), max_size=2),
    "logprobs": st.integers(0, 5) | st.booleans(),
    "temperature": st.floats(0, 2),
    "stream": st.booleans(),
    "input": st.text(max_size=20) | st.lists(response_item, max_size=3),
    "system": st.lists(anthropic_block, max_size=3),
    "tools": st.lists(st.fixed_dictionaries({"name": st.just("f")}, optional={"type": json_values})),
}


def bodies(kind: type[msgspec.Struct]) -> st.SearchStrategy[dict[str, Any]]:
    """A body that makes sense but for a few fields, any that the endpoint knows."""
    names = [field.name for field in msgspec.structs.fields(kind) if field.name != "model"]
    usual = {name: sensible[name] for name in ("prompt", "messages", "input") if name in names}
    if kind is TokenizeRequest:
        usual.popitem()
    if issubclass(kind, CountTokensRequest):
        usual["messages"] = st.lists(anthropic_message, min_size=1, max_size=3)
    if kind is MessagesRequest:
        usual["max_tokens"] = st.integers(1, 9)
    if kind is ResponsesRequest:
        names = [name for name in names if name not in KEPT]

    def with_some(chosen: list[str]) -> st.SearchStrategy[dict[str, Any]]:
        some = {name: st.none() | sensible.get(name, st.nothing()) | json_values for name in chosen}
        return st.fixed_dictionaries(usual | some)

    return st.lists(st.sampled_from(names), max_size=4, unique=True).flatmap(with_some)


@pytest.mark.parametrize(
    ("path", "kind", "end"),
    [
        ("/v1/completions", CompletionRequest, "data: [DONE]\n\n"),
        ("/v1/chat/completions", ChatRequest, "data: [DONE]\n\n"),
        ("/v1/responses", ResponsesRequest, "}}\n\n"),
        ("/v1/responses/input_tokens", ResponsesRequest, ""),
        ("/v1/messages", MessagesRequest, '{"type":"message_stop"}\n\n'),
        ("/v1/messages/count_tokens", CountTokensRequest, ""),
        ("/tokenize", TokenizeRequest, ""),
    ],
)
def test_no_body_makes_a_server_error(
    server: Server, path: str, kind: type[msgspec.Struct], end: str
) -> None:
    @settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck))
    @given(body=bodies(kind))
    def check(body: dict[str, Any]) -> None:
        answer = server.post(path, body)
        assert answer.status_code in (200, 400), answer.text
        if answer.status_code == 200 and body.get("stream"):
            assert answer.text.endswith(end)
            assert '"error":{' not in answer.text
        elif answer.status_code == 400:
            assert answer.json()["error"]["message"]

    check()


@settings(max_examples=examples(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=60))
def test_no_bytes_make_a_server_error(server: Server, body: bytes) -> None:
    answer = server.client.post("/v1/chat/completions", content=body, headers=JSON)
    assert answer.status_code == 400
