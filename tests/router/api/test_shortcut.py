"""Tokens that go straight from the mesh to the client's socket, in order.

The client gets the same bytes as by the long way.
"""

from __future__ import annotations

import asyncio
import gc
import random
import socket
import time
import weakref
from typing import Any

import msgspec
import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from engine.messages import Delta, FinishReason
from engine.sampling import SamplingParams
from engine.scheduling.outgoing_tokens import OutgoingTokens
from router.api.streaming import EventStream
from router.dispatch.delivery import Delivery
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.stream import Stream
from router.http.connection import EXTENSION, TimedWriter
from router.mesh import MeshError, Prompt
from router.metrics.metrics import Metrics
from router.text.text_model import TextModel
from router.text.tokens import Tokenizer
from tests.router.api.test_streaming import Client, call_of
from tests.router.conftest import Server
from tests.router.fake_mesh import FakeMesh, Script, saying
from tests.waiting import until

# ---- the hand-over


class Owner:
    """Owner of a stream that forgets nothing."""

    def rank_of(self, entry: Entry) -> int | None:
        return 0

    def forget(self, entry: Entry) -> None: ...


class Collecting:
    """A sink that keeps all tokens."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def take(self, delta: Delta) -> bool:
        self._seen.extend(delta.token_ids)
        return True

    def take_token(self, token_id: int, _now: float) -> bool:
        self._seen.append(token_id)
        return True


class KnowingSink(Collecting):
    """A sink that refers to its stream, as those of answers do."""

    def __init__(self, stream: Stream) -> None:
        super().__init__([])
        self.stream = stream


def a_stream() -> Stream:
    return Stream(Owner(), Entry(Prompt("id", [5], SamplingParams(), 1)))


@pytest.mark.parametrize("seed", range(20))
def test_everything_comes_once_and_in_order(seed: int) -> None:
    """For any order of reader, steps, sinks that refuse tokens, and moves elsewhere."""
    chance = random.Random(seed)

    async def run() -> None:
        entry = Entry(Prompt("id", [5], SamplingParams(), 1))
        stream, ledger, seen, takers = Stream(Owner(), entry), Ledger(), [], []
        delivery = Delivery(ledger, {entry: stream}, lambda *_: None, lambda _: None)
        is_open = False

        class Sink:
            def take(self, delta: Delta) -> bool:
                if is_open and delta.finish_reason is None:
                    seen.extend(delta.token_ids)
                    takers.append("shortcut")
                return is_open and delta.finish_reason is None

            def take_token(self, token_id: int, _now: float) -> bool:
                assert not entry.fruitless, "the first one of a try has more to tell"
                if is_open:
                    seen.append(token_id)
                    takers.append("single")
                return is_open

        async def read() -> None:
            async for delta in stream:
                seen.extend(delta.token_ids)
                takers.append("reader")
                for _ in range(chance.randrange(3)):  # as one that waits for its client
                    await asyncio.sleep(0)

        def bring(*deltas: Delta) -> None:
            outgoing = OutgoingTokens(deltas)
            delivery.singles("a", [9999, 7, *outgoing.singles])  # one that has left
            delivery.deltas("a", outgoing.deltas)

        stream.hand_over(Sink())
        reader = asyncio.create_task(read())
        left, dispatch = list(range(200)), 0
        while left:
            if not dispatch or chance.random() < 0.05:
                dispatch += 1
                ledger.place(entry, "a", dispatch)
                bring(Delta(dispatch, [left.pop(0)], times=(0.1, 0.2)))
            is_open = chance.random() < 0.7
            count = chance.choice((1, 1, 1, 2, 3))
            deltas = [Delta(dispatch, [token_id]) for token_id in left[:count]]
            if deltas and chance.random() < 0.2:
                deltas[:1] = [Delta(dispatch, left[:1], prompt_logprobs=[None])]
            del left[:count]
            bring(*deltas)
            for _ in range(chance.choice((0, 0, 1, 16))):
                await asyncio.sleep(0)
        bring(Delta(dispatch, [200], FinishReason.LENGTH))
        await asyncio.wait_for(reader, 5)
        assert seen == entry.emitted == list(range(201))
        assert {"single", "shortcut", "reader"} == set(takers), "the test has seen all ways"
        assert not len(ledger)

    asyncio.run(run())


@pytest.mark.parametrize("is_single", [True, False])
def test_what_the_shortcut_raises_is_the_readers(is_single: bool) -> None:
    """The message that brought the delta brings those of others, too."""

    async def run() -> None:
        ledger, readers = Ledger(), []
        streams: dict[Entry, Stream] = {}
        seen: list[int] = []

        async def read(stream: Stream) -> None:
            async for _ in stream:
                pass

        class Fails:
            def take(self, _: object) -> bool:
                raise RuntimeError("cannot be written")

            def take_token(self, _: int, __: float) -> bool:
                raise RuntimeError("cannot be written")

        for number, sink in enumerate((Fails(), Collecting(seen)), 1):
            entry = Entry(Prompt("id", [5], SamplingParams(), 1))
            ledger.place(entry, "a", number)
            streams[entry] = stream = Stream(Owner(), entry)
            stream.hand_over(sink)
            readers.append(asyncio.create_task(read(stream)))
        delivery = Delivery(ledger, streams, lambda *_: None, lambda _: None)
        await asyncio.sleep(0)
        if is_single:
            delivery.singles("a", [1, 5, 2, 6])
        else:
            delivery.deltas("a", [Delta(1, [5, 6]), Delta(2, [6, 7])])
        delivery.deltas("a", [Delta(1, [8], FinishReason.LENGTH)])  # before the reader has had its turn
        with pytest.raises(RuntimeError, match="cannot be written"):
            await asyncio.wait_for(readers[0], 5)
        assert seen == ([6] if is_single else [6, 7])
        readers[1].cancel()

    asyncio.run(run())


def test_a_failure_comes_after_what_was_taken() -> None:
    async def run() -> None:
        seen: list[int] = []
        stream = a_stream()

        async def read() -> None:
            async for delta in stream:
                seen.extend(delta.token_ids)

        stream.hand_over(Collecting(seen))
        reader = asyncio.create_task(read())
        await asyncio.sleep(0)
        stream.push(Delta(1, [5]))
        stream.fail(MeshError(503, "ServiceUnavailableError", "gone"))
        with pytest.raises(MeshError, match="gone"):
            await asyncio.wait_for(reader, 5)
        assert seen == [5]

    asyncio.run(run())


def test_a_closed_stream_needs_no_garbage_collector() -> None:
    def used() -> weakref.ref[Stream]:
        stream = a_stream()
        stream.hand_over(KnowingSink(stream))
        stream.close()
        return weakref.ref(stream)

    gc.disable()
    try:
        assert used()() is None
    finally:
        gc.enable()


# ---- the same bytes


class WritingClient(Client):
    """Client whose server has a short way, open at some times only."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)
        self.num_written = 0

    def is_open(self) -> bool:
        return bool(self.messages) and self._chance.random() < 0.7

    def write(self, part: bytes) -> None:
        assert part, "an empty part would end the body"
        self.messages.append({"type": "http.response.body", "body": part, "more_body": True})
        self.num_written += 1

    def part(self, before: bytes, after: bytes) -> Part:
        return Part(self, before, after)


class Part:
    """A :class:`router.http.connection.BodyPart` of a :class:`WritingClient`."""

    def __init__(self, client: WritingClient, before: bytes, after: bytes) -> None:
        self._client, self._before, self._after = client, before, after

    def write(self, between: bytes) -> bool:
        is_open = self._client.is_open()
        if is_open:
            self._client.write(self._before + between + self._after)
        return is_open


@pytest.mark.parametrize(
    ("fields", "goes_straight"),
    [
        ({}, True),
        ({"logprobs": 2}, True),
        ({"echo": True, "return_token_ids": True}, True),
        ({"stream_options": {"include_usage": True}}, True),
        ({"stream_options": {"continuous_usage_stats": True}}, True),
        ({"prompt_logprobs": 1}, True),
        ({"stop": ["o w"]}, False),
        ({"n": 2}, False),
    ],
)
def test_a_stream_is_the_same_either_way(
    text_model: TextModel, tokenizer: Tokenizer, fields: dict[str, Any], goes_straight: bool
) -> None:
    words = saying(tokenizer.encode(" Hello 🙂 world! Hello you", add_special_tokens=False))

    async def bodies(seed: int) -> int:
        outcomes = []
        client = WritingClient(seed)
        for each, scope in ((Client(), {}), (client, {"extensions": {EXTENSION: lambda: client}})):
            mesh = FakeMesh(None, words)
            metrics = Metrics(mesh)
            call = call_of(mesh, text_model, metrics, stream=True, **fields)
            await EventStream(*call)(scope, each.receive, each.send)
            counts = [
                sum(metrics.requests.itl.of("0").counts),
                sum(metrics.requests.generation_tokens.of("0").counts),
            ]
            outcomes.append((each.text, each.is_complete, metrics.success, counts, mesh.num_open))
        assert outcomes[0] == outcomes[1]
        return client.num_written

    written = [asyncio.run(bodies(seed)) for seed in range(5)]
    assert (sum(written) > 5) == goes_straight


def test_no_comment_goes_into_a_stream_that_is_not_silent(
    text_model: TextModel, tokenizer: Tokenizer
) -> None:
    """Also where its tokens go straight to the socket."""
    words = saying(tokenizer.encode(" Hello world! Hello you" * 4, add_special_tokens=False))

    async def run() -> None:
        client, mesh = WritingClient(0), FakeMesh(None, words)
        mesh.delay = 0.02
        call = call_of(mesh, text_model, stream=True)
        scope = {"extensions": {EXTENSION: lambda: client}}
        await EventStream(*call, keep_alive=0.3)(scope, client.receive, client.send)
        assert client.num_written > 5
        assert ": keep-alive" not in client.text

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began > 0.4, "longer than a comment would have waited"


def test_a_timed_writer_notes_only_what_it_wrote() -> None:
    client = WritingClient(0)
    writer = TimedWriter(client)
    part = writer.part(b"<", b">")
    assert not part.write(b"nothing has begun")
    assert writer.wrote_at == 0.0
    client.messages.append({"type": "http.response.start", "status": 200, "headers": []})
    while not part.write(b"text"):
        assert writer.wrote_at == 0.0
    assert writer.wrote_at > 0.0


# ---- the real server


def request_of(server: Server, **fields: Any) -> bytes:
    body = msgspec.json.encode({"prompt": "Hello", "stream": True} | fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_tokens_go_straight_to_the_socket(server: Server) -> None:
    for path, asked in (
        ("/v1/completions", {"prompt": "Hello"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 99}),
    ):
        for stream in (True, False):
            answer = server.post(path, asked | {"stream": stream})
            assert answer.status_code == 200
            generation = server.mesh.generations[-1]
            assert generation.taken >= len(server.mesh.script(generation.prompt)) - 2, (path, stream)


@pytest.fixture
def much(tokenizer: Tokenizer) -> Script:
    """Script of megabytes, more than sockets hold."""
    ids = tokenizer.encode("a" * 2000, add_special_tokens=False)
    return lambda _: [*[Delta(1, ids)] * 4000, Delta(1, ids, FinishReason.LENGTH)]


@pytest.mark.each_push
def test_a_client_that_does_not_keep_up_is_waited_for(server: Server, much: Script) -> None:
    """Unread parts are not buffered in memory; once it reads, it gets all."""
    server.mesh.reset(much)
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.connect(("127.0.0.1", server.port))
        client.settimeout(10)
        client.sendall(request_of(server))
        until(lambda: bool(server.mesh.generations))
        (generation,) = server.mesh.generations
        until(lambda: generation.taken > 0)
        before, since = 0, time.monotonic()
        while time.monotonic() < since + 0.2:  # until nothing more is written
            if generation.taken != before:
                before, since = generation.taken, time.monotonic()
            time.sleep(0.01)
        assert before < 4000
        received = bytearray()
        while not received.endswith(b"0\r\n\r\n"):
            received += client.recv(1 << 20)
    assert received.count(b"a" * 2000) == 4001
    assert generation.taken < 4000, "some went the long way"


def test_a_client_that_leaves_in_the_middle(server: Server, much: Script) -> None:
    server.mesh.reset(much)
    with server.connect() as client:
        client.sendall(request_of(server))
        client.recv(1000)
    server.wait_until_idle()
    (generation,) = server.mesh.generations
    assert generation.is_closed
    assert not generation.has_ended


def test_requests_leave_nothing_to_the_garbage_collector(server: Server) -> None:
    """Else each would cost a part of a collection, and its memory until then."""

    def cycles() -> int:
        return sum(type(each) is RequestResponseCycle for each in gc.get_objects())

    server.post("/v1/completions", {"prompt": "Hello", "stream": True})
    gc.collect()
    before = cycles()
    gc.disable()
    try:
        for stream in (True, False) * 5:
            server.post("/v1/completions", {"prompt": "Hello", "stream": stream})
        server.wait_until_idle()
        assert cycles() <= before + 1
    finally:
        gc.enable()
