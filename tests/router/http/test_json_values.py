"""Bodies of very many small values are refused before objects are made of them."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from asyncio import events
from typing import Any

import pytest
from starlette.types import ASGIApp, Message

from router.app.app import make_app
from router.config import HttpConfig
from router.http.json_values import MOST_CONTAINERS, MOST_STRINGS, MOST_VALUES, num_values, too_many
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


@pytest.mark.parametrize(
    ("value", "least", "most"),
    [
        (1, 1, 1),
        ([1, 2, 3], 4, 4),
        ({"a": [1, {}], "b": "[,{"}, 6, 7),
        ([CODE] * 9, 10, 10),
        (["\\", '"', '\\"', ","], 5, 5),
    ],
)
def test_how_many_values_a_text_has(value: Any, least: int, most: int) -> None:
    assert least <= num_values(compact(value)) <= most


def bombs() -> dict[str, tuple[str, dict[str, Any]]]:
    """What a client can put into 8 MB, by its target, with its path."""
    chat, many = "/v1/chat/completions", MOST_STRINGS // 2 - 100
    schema = {"enum": [str(number) for number in range(800_000)]}
    fewer = {"enum": [str(number) for number in range(many)]}
    return {
        "a schema": (chat, {"messages": USER, "guided_json": schema}),
        "a schema below the limit": (chat, {"messages": USER, "guided_json": fewer}),
        "a schema of numbers": (chat, {"messages": USER, "guided_json": {"enum": [1] * (MOST_VALUES - 10)}}),
        "arguments of a forced call": (
            chat,
            {"messages": USER, "tools": [tool({"enum": [1] * 1_000_000})], "tool_choice": "required"},
        ),
        "many tools of a forced call": (
            chat,
            {"messages": USER, "tools": [tool({})] * 4_000, "tool_choice": "required"},
        ),
        "many tools": (
            "/v1/responses",
            {"input": "Hi", "tools": [{"type": "function", "name": f"f{n}"} for n in range(10_000)]},
        ),
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
            {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": [{}] * 59_000}]},
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
        "stop tokens": (chat, {"messages": USER, "stop_token_ids": [1] * (MOST_VALUES - 10)}),
        "stop tokens with a point": (chat, {"messages": USER, "stop_token_ids": [1.0] * (MOST_VALUES - 10)}),
        "a prompt": ("/v1/completions", {"prompt": [1] * (MOST_VALUES - 10)}),
        "a prompt with a point": ("/v1/completions", {"prompt": [1.0] * (MOST_VALUES - 10)}),
        "tokens to convert": ("/detokenize", {"tokens": [1] * (MOST_VALUES - 10)}),
    }


LONG_BEFORE = (
    "a schema of numbers", "arguments of a forced call", "many tools of a forced call", "many tools",
    "stop tokens with a point", "a prompt with a point", "a prompt", "biases below the limit",
)  # fmt: skip
"""Bodies that were read and checked on the event loop, for up to 8 s."""


def tool(parameters: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_whole_numbers_with_a_point_are_read_where_there_are_few(served: ServedModel) -> None:
    app = make_app(FakeMesh(served, saying([70])), HttpConfig())
    commas = [{"role": "user", "content": "," * 100_000}]
    for body, status in (
        ({"messages": commas, "max_tokens": 4.0}, b"context length"),
        ({"messages": USER, "max_tokens": 4.0, "mine": [1] * 100_000}, b"got `float`"),
    ):
        assert status in asyncio.run(answered(app, "/v1/chat/completions", compact(body)))


def test_no_body_keeps_the_event_loop_from_others(
    served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No turn of it takes 0.05 s of processor time; long work is in threads."""
    longest, run = 0.0, events.Handle._run

    def timed(handle: events.Handle) -> None:
        nonlocal longest
        began = time.thread_time()
        run(handle)
        longest = max(longest, time.thread_time() - began)

    monkeypatch.setattr(events.Handle, "_run", timed)
    app = make_app(
        FakeMesh(served, saying([70])), HttpConfig(enable_auto_tool_choice=True, tool_call_parser="hermes")
    )
    turns: dict[str, float] = {}
    for name, (path, body) in bombs().items():
        if name not in LONG_BEFORE:
            continue
        text = compact(body)
        gc.collect()
        gc.disable()  # a collection goes through all that other tests of this process have left
        longest = 0.0
        try:
            asyncio.run(answered(app, path, text))
        finally:
            gc.enable()
        turns[name] = longest
    assert max(turns.values()) < 0.05, sorted(turns.items(), key=lambda x: -x[1])


async def answered(app: ASGIApp, path: str, body: bytes) -> bytes:
    """The answer to a body, without a server around the application."""
    given: list[Message] = [{"type": "http.request", "body": body}]
    found: list[Message] = []
    is_gone = asyncio.Event()

    async def receive() -> Message:
        if not given:
            await is_gone.wait()
        return given.pop() if given else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        found.append(message)

    head = {"type": "http", "http_version": "1.1", "method": "POST", "path": path, "raw_path": path.encode()}
    more = {"query_string": b"", "root_path": "", "scheme": "http", "client": ("127.0.0.1", 1), "state": {}}
    headers = [(name.encode(), value.encode()) for name, value in JSON.items()]
    await app({**head, **more, "headers": headers}, receive, send)
    return b"".join(message.get("body", b"") for message in found)


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
