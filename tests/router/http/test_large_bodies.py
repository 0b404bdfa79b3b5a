"""Long texts: tokenised beside the event loop, a few at once, refused beyond, and booked."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.own_memory import private_memory
from router.config import HttpConfig
from router.errors import ApiError
from router.http.large_bodies import LARGE_BODY, BoundedThreads, elsewhere, run_sized
from router.mesh import ServedModel
from router.text.tokens import Tokenizer
from tests.router.conftest import Server, serving
from tests.router.fake_mesh import FakeMesh, saying
from tests.waiting import until

LONG = "Hello world, one two three four. " * 31_000
"""Text of 1 MB."""
CHAT: dict[str, Any] = {"model": "tiny", "max_tokens": 4}


def test_a_lane_takes_a_few_at_once_and_refuses_what_would_wait_too_long() -> None:
    lane, go = BoundedThreads("test", at_once=1, most_waiting=1), threading.Event()
    ran: list[int] = []

    async def fill() -> None:
        def work(index: int) -> int:
            go.wait(10)
            ran.append(index)
            return index

        first, second = (asyncio.create_task(lane.run(lambda i=i: work(i))) for i in (1, 2))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="Too many long requests") as refused:
            await lane.run(lambda: work(3))
        assert refused.value.status == 503
        second.cancel()  # its client has gone, and it has not begun
        await asyncio.sleep(0)
        third = asyncio.create_task(lane.run(lambda: work(4)))
        await asyncio.sleep(0)
        go.set()
        assert [await first, await third] == [1, 4]

    asyncio.run(fill())
    assert ran == [1, 4]


def test_who_waits_for_something_else_leaves_the_place_to_others() -> None:
    lane, go = BoundedThreads("test", at_once=1, most_waiting=1, most_elsewhere=2), threading.Event()

    ran: list[str] = []

    def wait(name: str) -> None:
        with elsewhere():
            go.wait(10)
        ran.append(name)

    async def fill() -> None:
        waiting = [asyncio.create_task(lane.run(lambda name=name: wait(name))) for name in "ab"]
        await asyncio.to_thread(until, lambda: not lane._elsewhere._value)
        assert await lane.run(lambda: "worked") == "worked"
        third = asyncio.create_task(lane.run(lambda: wait("c")))  # keeps its place: the next waits for it
        await asyncio.to_thread(until, lambda: not lane._at_work._value)
        fourth = asyncio.create_task(lane.run(lambda: ran.append("d")))
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*waiting, third, fourth)
        assert ran.index("c") < ran.index("d")
        assert (lane._taken._value, lane._at_work._value, lane._elsewhere._value) == (2, 1, 2)

    with elsewhere():  # in no such thread
        asyncio.run(fill())


def test_who_is_given_up_before_a_place_is_free_does_no_work() -> None:
    """Each has a thread by then."""
    lane, go = BoundedThreads("test", at_once=1, most_waiting=3, most_elsewhere=3), threading.Event()
    ran: list[str] = []

    async def fill() -> None:
        first = asyncio.create_task(lane.run(lambda: go.wait(10)))
        await asyncio.to_thread(until, lambda: not lane._at_work._value)
        gone = [asyncio.create_task(lane.run(lambda: ran.append("gone"))) for _ in range(2)]
        await asyncio.sleep(0)
        await asyncio.to_thread(until, lane._threads._work_queue.empty)
        for each in gone:
            each.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        last = asyncio.create_task(lane.run(lambda: ran.append("last")))
        go.set()
        await asyncio.gather(first, last)
        await asyncio.to_thread(until, lambda: lane._taken._value == 4)

    asyncio.run(fill())
    assert ran == ["last"]


def test_light_work_is_done_at_once_and_heavy_work_in_a_thread() -> None:
    async def where(size: int) -> threading.Thread:
        return await run_sized(threading.current_thread, size)

    assert asyncio.run(where(LARGE_BODY)) is threading.current_thread()
    assert asyncio.run(where(LARGE_BODY + 1)) is not threading.current_thread()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses/input_tokens", {"input": LONG}),
        ("/v1/completions", {"prompt": LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ],
)
def test_a_text_far_beyond_the_context_is_not_tokenised(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def watched(self: Tokenizer, texts: list[str], **options: bool) -> list[list[int]]:
        assert not texts, "it was tokenised"
        return []

    monkeypatch.setattr(Tokenizer, "encode_all", watched)
    answer = server.post(path, body)
    assert answer.status_code == 400, answer.text
    assert "maximum context length is 256 tokens" in answer.text


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_truncation_tokenises_the_end_that_matters(
    server: Server, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer, path: str, side: str
) -> None:
    lengths: list[int] = []
    encode_all = Tokenizer.encode_all

    def watched(self: Tokenizer, texts: list[str], **options: bool) -> list[list[int]]:
        lengths.extend(map(len, texts))
        return encode_all(self, texts, **options)

    whole = tokenizer.encode(LONG[:330_000], add_special_tokens=path == "/v1/completions")
    monkeypatch.setattr(Tokenizer, "encode_all", watched)
    text = {"prompt": LONG} if "chat" not in path else {"messages": [{"role": "user", "content": LONG}]}
    body = {**text, "truncate_prompt_tokens": 100, "truncation_side": side, "max_tokens": 4}
    assert server.post(path, body).status_code == 200
    prompt = server.mesh.prompts[-1].prompt_ids
    assert len(prompt) == 100
    if path == "/v1/completions":
        assert prompt == (whole[:100] if side == "right" else whole[-100:])
    assert sum(lengths) < 20_000


def test_counting_and_converting_tokens_is_booked(served: ServedModel, tmp_path: Path) -> None:
    file = tmp_path / "limits.yaml"
    file.write_text("words: {tokens_per_minute: 4}\nones: {requests_per_minute: 1}\n")
    messages = [{"role": "user", "content": "Hello world"}]
    asked: dict[str, dict[str, Any]] = {
        "/tokenize": {"prompt": "Hello world, hello"},
        "/detokenize": {"tokens": [70, 71, 72, 73, 74]},
        "/v1/messages/count_tokens": {"model": "tiny", "messages": messages},
        "/v1/responses/input_tokens": {"input": "Hello world"},
    }
    for path, body in asked.items():
        with serving(FakeMesh(served, saying([70])), HttpConfig(api_key_limits=str(file))) as server:
            for key in ("words", "ones"):
                headers = {"authorization": f"Bearer {key}"}
                statuses = [
                    server.client.post(path, json=given, headers=headers).status_code
                    for given in ({**body, "model": "other"}, body, body)
                ]
                assert statuses == [404, 200, 429], (path, key)


@pytest.mark.mesh
def test_others_are_answered_while_long_texts_are_tokenised(served: ServedModel) -> None:
    """The model's context holds the long texts."""
    mesh = FakeMesh(msgspec.structs.replace(served, max_model_len=50_000_000), saying([70]))
    with serving(mesh, HttpConfig()) as server, ThreadPoolExecutor(6) as threads:
        server.client.timeout = 120
        before = most = private_memory()
        body = msgspec.json.encode({"prompt": 2 * LONG, "return_token_strs": True})
        headers = {"content-type": "application/json"}
        asked = [
            threads.submit(server.client.post, "/tokenize", content=body, headers=headers) for _ in range(6)
        ]
        slowest = 0.0
        while not all(each.done() for each in asked):
            began = time.monotonic()
            assert server.client.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            most = max(most, private_memory())
            time.sleep(0.02)
        assert [each.result().status_code for each in asked] == [200] * 6
        until(lambda: server.metrics.in_flight == 0)
    assert slowest < 1.0
    assert most - before < 1 << 30
