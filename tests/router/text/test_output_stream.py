"""Counts of cached tokens in answers that several instances computed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from engine.messages import Delta, FinishReason
from engine.sampling import SamplingParams
from router.config import HttpConfig
from router.mesh import Prompt, ServedModel
from router.text.output_stream import OutputStream, join
from router.text.tokens import Tokenizer
from tests.router.conftest import Server, serving
from tests.router.fake_mesh import FakeMesh, Script, saying

CACHED = 2
"""Tokens that the instance of the first token had in its cache."""
IDS = [70, 71, 72, 73]
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
    ("/v1/chat/completions", {**CHAT, "max_tokens": 4}),
    ("/v1/responses", {"input": "Hello", "max_output_tokens": 4}),
    ("/v1/messages", {**CHAT, "model": "tiny", "max_tokens": 4}),
    ("/inference/v1/generate", {"token_ids": [65, 66, 67, 68, 69], "sampling_params": {"max_tokens": 4}}),
]
"""Endpoints that generate, and a body for each."""


def moving(first: int) -> Script:
    """Two tokens of an instance with ``first`` tokens cached, and two of another one.

    The second one has all of the prompt but a token.
    """

    def script(prompt: Prompt) -> Sequence[Delta]:
        more = len(prompt.prompt_ids) - 1
        return [
            Delta(1, IDS[:1], num_cached_tokens=first, times=(0.0, 0.1)),
            Delta(1, IDS[1:2]),
            Delta(1, IDS[2:3], num_cached_tokens=more, times=(0.0, 0.0)),
            Delta(1, IDS[3:], FinishReason.LENGTH, num_cached_tokens=more),
        ]

    return script


@pytest.fixture(scope="module")
def telling(served: ServedModel) -> Iterator[Server]:
    config = HttpConfig(enable_prompt_tokens_details=True)
    with serving(FakeMesh(served, saying(IDS)), config) as server:
        yield server


def usages(found: Any) -> Iterator[dict[str, Any]]:
    """All objects in an answer that have usage with details of the prompt."""
    if isinstance(found, list):
        for each in found:
            yield from usages(each)
    elif isinstance(found, dict):
        usage = found.get("usage")
        if isinstance(usage, dict) and ("prompt_tokens_details" in usage or "input_tokens" in usage):
            yield usage
        for each in found.values():
            yield from usages(each)


def cached(usage: dict[str, Any]) -> int:
    """Prompt tokens that were cached, under the name that its endpoint has for them."""
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    return int((usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"])


@pytest.mark.parametrize("first", [0, CACHED])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "body"), ASKED, ids=[path for path, _ in ASKED])
def test_the_first_instance_alone_decides_what_was_cached(
    telling: Server, path: str, body: dict[str, Any], stream: bool, first: int
) -> None:
    telling.mesh.reset(moving(first))
    options = {} if path in ("/v1/responses", "/v1/messages") else {"stream_options": {"include_usage": True}}
    response = telling.post(path, {**body, "stream": stream, **(options if stream else {})})
    assert response.status_code == 200, response.text
    if stream:
        data = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        found = list(usages([json.loads(each) for each in data]))
    else:
        found = list(usages(response.json()))
    assert found
    assert {cached(usage) for usage in found} == {first}
    if path == "/v1/messages":
        prompt = len(telling.mesh.prompts[-1].prompt_ids)
        assert {usage["input_tokens"] for usage in found} == {prompt - first}
    telling.wait_until_idle()


def test_the_histogram_has_what_the_first_instance_computed(served: ServedModel) -> None:
    with serving(FakeMesh(served, moving(CACHED)), HttpConfig()) as server:
        server.post("/v1/completions", {"prompt": "Hello", "max_tokens": 4})
        prompt = len(server.mesh.prompts[-1].prompt_ids)
        page = server.client.get("/metrics").text
        name = 'vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="tiny"}'
        assert f"{name} {float(prompt - CACHED)}" in page.splitlines()
        server.wait_until_idle()


@pytest.mark.parametrize("logprobs", [None, 0])
def test_a_later_try_changes_no_count(tokenizer: Tokenizer, logprobs: int | None) -> None:
    params = SamplingParams(max_tokens=9, logprobs=logprobs)
    stream = OutputStream(0, Prompt("id", [5, 6, 7], params, 1), params, tokenizer)
    for delta, expected in (
        (Delta(1, [70], num_cached_tokens=0), 0),
        (Delta(1, [71], num_cached_tokens=2), 0),
        (Delta(1, [72, 73], FinishReason.LENGTH, num_cached_tokens=2), 0),
    ):
        stream.take(delta)
        assert stream.num_cached_tokens == expected


@pytest.mark.parametrize("end", [Delta(1, [72], FinishReason.LENGTH), Delta(1, [], FinishReason.ABORT)])
def test_kept_tokens_come_with_the_next_delta(tokenizer: Tokenizer, end: Delta) -> None:
    params = SamplingParams(max_tokens=9)
    prompt = Prompt("id", [5, 6, 7], params, 1)
    kept, taken = (OutputStream(0, prompt, params, tokenizer) for _ in range(2))
    ids = tokenizer.encode("so much of it: \u00e4\u20ac\U0001f600 and \u00e4", add_special_tokens=False)
    pieces = []
    for number, token_id in enumerate(ids):
        pieces.append(taken.take(Delta(1, [token_id], num_cached_tokens=0)))
        if number:
            kept.keep(token_id)
        else:
            first = kept.take(Delta(1, [token_id], num_cached_tokens=0))
        assert kept.num_tokens == taken.num_tokens == number + 1
    pieces.append(taken.take(end))
    whole = join([first, kept.take(end)])
    assert whole.text == "".join(piece.text for piece in pieces)
    assert whole.token_ids == [*ids, *end.token_ids]
    assert kept.num_tokens == taken.num_tokens
    assert whole.finish_reason == end.finish_reason
