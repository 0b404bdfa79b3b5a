"""Fields that ask for nothing are taken by all endpoints, and change nothing."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.conftest import Server

USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 4},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 4},
    "/v1/messages": {"model": "tiny", "messages": USER, "max_tokens": 4},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": USER},
    "/tokenize": {"messages": USER},
}
EMPTY: list[dict[str, Any]] = [
    {"tools": []}, {"tools": None}, {"tools": [], "parallel_tool_calls": True}, {"functions": []},
    {"functions": None}, {"function_call": "none"}, {"stop": []}, {"stop": None}, {"logit_bias": {}},
    {"stop_token_ids": []}, {"bad_words": []}, {"response_format": None}, {"response_format": {"type": "text"}},
    {"modalities": ["text"]}, {"modalities": []}, {"modalities": None}, {"metadata": {}}, {"metadata": None},
    {"stream_options": {}}, {"stream_options": None}, {"documents": []}, {"chat_template_kwargs": {}},
    {"prediction": None}, {"audio": None}, {"web_search_options": None}, {"structured_outputs": None},
    {"user": ""}, {"store": False}, {"service_tier": None}, {"reasoning_effort": None}, {"kv_transfer_params": {}},
]  # fmt: skip


def size_of(answer: Any) -> int:
    """Tokens of the prompt."""
    usage = answer.get("usage", answer)
    names = ("prompt_tokens", "input_tokens", "count")
    return int(next(usage[name] for name in names if name in usage))


@pytest.mark.parametrize("path", list(BODIES))
def test_nothing_is_taken_for_nothing(server: Server, path: str) -> None:
    plain = server.post(path, BODIES[path])
    assert plain.status_code == 200, plain.text
    for fields in EMPTY:
        answer = server.post(path, BODIES[path] | fields)
        assert answer.status_code == 200, (fields, answer.text)
        assert size_of(answer.json()) == size_of(plain.json()), fields


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": None}])
def test_a_choice_of_no_tools_is_free_or_wrong(server: Server, tools: dict[str, Any]) -> None:
    """``auto`` and ``none`` need no tools; who requires a call must name some."""
    for path, free, must in (
        ("/v1/chat/completions", ["auto", "none"], ["required", {"type": "function", "function": {"name": "f"}}]),
        ("/v1/responses", ["auto", "none"], ["required", {"type": "function", "name": "f"}]),
        ("/v1/messages", [{"type": "auto"}, {"type": "none"}], [{"type": "any"}, {"type": "tool", "name": "f"}]),
    ):  # fmt: skip
        for choice in (*free, *must):
            answer = server.post(path, BODIES[path] | tools | {"tool_choice": choice})
            assert answer.status_code == (200 if choice in free else 400), (path, choice, answer.text)
