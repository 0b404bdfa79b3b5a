"""Bodies of very many small values are refused before objects are made of them."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from router.config import HttpConfig
from router.http.json_values import MOST_CONTAINERS, MOST_STRINGS, MOST_VALUES, too_many
from router.mesh import ServedModel
from tests.router.conftest import JSON, Server, serving
from tests.router.fake_mesh import FakeMesh, saying

USER = [{"role": "user", "content": "Hi"}]
STRINGS = f"{MOST_STRINGS} strings"
CONTAINERS = f"{MOST_CONTAINERS} objects and lists"
VALUES = f"{MOST_VALUES} values"
CODE = 'def f(a, b):\n    return {"a": [a], \'b\': "\\\\"}  # [[{{,\n'


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("value", "many"),
    [
        (["a"] * MOST_STRINGS, ""),
        (["a"] * (MOST_STRINGS + 1), STRINGS),
        ({str(number): number for number in range(MOST_STRINGS + 1)}, STRINGS),
        (["\\"] * (2 * MOST_STRINGS + 1), STRINGS),  # which look as if their ends were escaped
        (['"'] * (MOST_STRINGS + 1), STRINGS),
        ([[]] * (MOST_CONTAINERS - 1), ""),
        ([[]] * MOST_CONTAINERS, CONTAINERS),
        ([{}] * MOST_CONTAINERS, CONTAINERS),
        (["[{" * MOST_CONTAINERS, '"' * 10 * MOST_STRINGS], ""),
        (CODE * 50_000, ""),
        (json.dumps([{"a": [1, "x"]}] * 100_000), ""),
        ([CODE, [], "\\"] * (MOST_CONTAINERS // 2), ""),
        ([CODE, [], "\\", [], {}] * (MOST_CONTAINERS // 3 + 1), CONTAINERS),
        ([1] * MOST_VALUES, ""),
        ([1] * (MOST_VALUES + 2), VALUES),
        ("a,b," * MOST_VALUES, ""),
    ],
    ids=range(16),
)
def test_what_a_text_holds_too_much_of(value: Any, many: str) -> None:
    assert too_many(compact(value)) == many


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_string_that_never_ends_is_looked_through_once(end: bytes) -> None:
    """Another string could begin at each escaped quote: minutes for a megabyte, if searched."""
    brackets = b"[" * MOST_CONTAINERS
    assert too_many(brackets + b'"' + b'\\"[' * 200_000 + end) == ""
    assert too_many(b"[" + brackets + b'"' + b'\\"[' * 200_000 + end) == CONTAINERS


def bombs() -> dict[str, tuple[str, dict[str, Any]]]:
    """What a client can put into 8 MB, by its target, with its path."""
    chat, many = "/v1/chat/completions", MOST_STRINGS // 2 - 100
    schema = {"enum": [str(number) for number in range(800_000)]}
    fewer = {"enum": [str(number) for number in range(many)]}
    return {
        "a schema": (chat, {"messages": USER, "guided_json": schema}),
        "a schema below the limit": (chat, {"messages": USER, "guided_json": fewer}),
        "a schema of numbers": (chat, {"messages": USER, "guided_json": {"enum": [1] * 1_990_000}}),
        "a schema as text": (chat, {"messages": USER, "guided_json": json.dumps(schema["enum"][:500_000])}),
        "biases": (chat, {"messages": USER, "logit_bias": {str(n): 1 for n in range(500_000)}}),
        "biases below the limit": (chat, {"messages": USER, "logit_bias": {str(n): 1 for n in range(many)}}),
        "biases with a point": (
            chat,
            {"messages": USER, "n": 1.0, "logit_bias": {str(n): 1 for n in range(many)}},
        ),
        "stop strings": (chat, {"messages": USER, "stop": ["a"] * many}),
        "lists": (chat, {"messages": [{"role": "user", "content": [[]] * 2_500_000}]}),
        "unknown fields": (chat, {"messages": USER, "mine": [[]] * 2_500_000}),
        "messages": (chat, {"messages": USER * (MOST_CONTAINERS - 10)}),
        "tools": (chat, {"messages": USER, "tools": [{}] * (MOST_CONTAINERS - 10)}),
        "items": ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}] * (many // 2)}),
        "blocks": (
            "/v1/messages",
            {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 90_000}]},
        ),
        "arguments of a call": (
            chat,
            {
                "messages": [
                    *USER,
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {"function": {"name": "f", "arguments": json.dumps({"a": [[]] * 2_000_000})}}
                        ],
                    },
                ]
            },
        ),
        "stop tokens": (chat, {"messages": USER, "stop_token_ids": [1] * 1_990_000}),
        "tokens to convert": ("/detokenize", {"tokens": [1] * 1_990_000}),
    }


@pytest.mark.mesh
def test_no_body_holds_the_interpreter_for_long(served: ServedModel) -> None:
    """A thread that only wants the interpreter waits less than a second for it."""
    with serving(FakeMesh(served, saying([70])), HttpConfig()) as server:
        server.client.timeout = 60
        stalls = {name: stall_of(server, path, compact(body)) for name, (path, body) in bombs().items()}
    assert max(stalls.values()) < 1.0, sorted(stalls.items(), key=lambda x: -x[1])


def stall_of(server: Server, path: str, body: bytes) -> float:
    """Seconds for which others waited while a body was answered: of three tries the shortest."""
    return min(_stall_of(server, path, body) for _ in range(3))


def _stall_of(server: Server, path: str, body: bytes) -> float:
    done, longest = threading.Event(), 0.0

    def watch() -> None:
        nonlocal longest
        while not done.is_set():
            began = time.monotonic()
            assert server.client.get("/health").status_code == 200
            longest = max(longest, time.monotonic() - began)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        answer = server.client.post(path, content=body, headers=JSON)
        assert answer.status_code in (200, 400, 413), answer.text
    finally:
        done.set()
        watcher.join()
    return longest
