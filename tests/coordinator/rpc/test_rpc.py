"""The sockets: limits, garbage, strangers, other versions, messages as they come."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from typing import Any

import pytest
import uvloop
import zmq
import zmq.asyncio

from coordinator.messages import FromCoordinator, ToCoordinator, Watch
from coordinator.rpc import rpc
from coordinator.rpc.arrivals import MOST_AT_ONCE
from coordinator.rpc.codec import PROTOCOL, OtherProtocol, encode
from coordinator.rpc.rpc import AsyncConnection, AsyncListener, Listener, PortInUse, TooLarge
from coordinator.rpc.unfinished import INTERVAL
from engine.messages import Attach, ToInstance
from tests.waiting import until_async


def test_a_listener_outlives_garbage_oversized_frames_and_strangers() -> None:
    context: zmq.Context[Any] = zmq.Context()
    listener: Listener[Any, Any] = Listener(
        context, "tcp://127.0.0.1:0", ToInstance, name="test", max_bytes=10_000
    )
    good = context.socket(zmq.DEALER)
    good.connect(listener.endpoint)
    bad = context.socket(zmq.DEALER)
    bad.connect(listener.endpoint)
    bad.setsockopt(zmq.LINGER, 0)
    for frames in ([b""], [b"x"], [b"a", b"b", b"c"], [bytes([PROTOCOL]) + b"\xc1"], [b"y" * 20_000]):
        bad.send_multipart(frames)
    host, port = listener.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" * 50)
        while listener.bad_messages < 3:
            assert listener.wait(5.0)
            assert listener.receive() is None
        good.send(encode(Attach("router")))
        assert listener.wait(5.0)
        received = listener.receive()
    assert received is not None
    peer, message = received
    assert message == Attach("router")
    assert listener.send(peer, Attach("back"))
    assert good.recv() == encode(Attach("back"))
    assert not listener.send(b"nobody", Attach("x")), "a peer that is gone is told apart"
    for closing in (good, bad, listener):
        closing.close()
    context.term()


def test_ports_in_use_are_named() -> None:
    context: zmq.Context[Any] = zmq.Context()
    listener: Listener[Any, Any] = Listener(context, "tcp://127.0.0.1:0", ToInstance, name="test")
    with pytest.raises(PortInUse, match=r"tcp://127.0.0.1:\d+ is in use: choose another port"):
        Listener(context, listener.endpoint, ToInstance, name="second")
    listener.close()
    context.term()


def test_a_stranger_must_show_what_it_is_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HANDSHAKE_MS", 200)
    context: zmq.Context[Any] = zmq.Context()
    listener: Listener[Any, Any] = Listener(context, "tcp://127.0.0.1:0", ToInstance, name="test")
    host, port = listener.endpoint.removeprefix("tcp://").split(":")
    for greeting in (b"", b"\xff" + bytes(8) + b"\x7f\x03\x00NULL".ljust(55, b"\x00")):
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(greeting)
            while stranger.recv(1000):
                pass
    listener.close()
    context.term()


def test_asyncio_ends_talk() -> None:
    async def talk() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[Any, Any] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="test"
        )
        connection: AsyncConnection[Any, Any] = AsyncConnection(
            context, listener.endpoint, FromCoordinator, name="test"
        )
        while not connection.send(Watch("w")):  # noqa: ASYNC110 (nothing is queued unconnected)
            await asyncio.sleep(0.01)
        _, message = await asyncio.wait_for(listener.receive(), 5)
        assert message == Watch("w")
        assert not listener.send(b"nobody", Watch("x"))
        raw = context.socket(zmq.DEALER)
        raw.connect(listener.endpoint)
        await raw.send(bytes([PROTOCOL + 1]))
        _, other = await asyncio.wait_for(listener.receive(), 5)
        assert isinstance(other, OtherProtocol)
        assert listener.bad_messages == 1
        raw.close(linger=0)
        connection.close(linger_ms=0)
        listener.close()
        context.term()

    asyncio.run(talk())


def test_a_connection_sends_nothing_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its listener would hang up, and what is under way on it would be lost."""

    async def talk() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[Any, Any] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="test", max_bytes=450
        )
        connection: AsyncConnection[Any, Any] = AsyncConnection(
            context, listener.endpoint, FromCoordinator, name="test"
        )
        while not connection.send(Watch("first")):  # noqa: ASYNC110 (nothing is queued unconnected)
            await asyncio.sleep(0.01)
        monkeypatch.setattr(rpc, "MAX_MESSAGE_BYTES", 450)
        with pytest.raises(TooLarge, match="bytes in one message"):
            connection.send(Watch("x" * 450))
        assert connection.send(Watch("second"))
        heard = [(await asyncio.wait_for(listener.receive(), 5))[1] for _ in range(2)]
        assert heard == [Watch("first"), Watch("second")]
        connection.close(linger_ms=0)
        listener.close()
        context.term()

    asyncio.run(talk())


def test_a_connection_outlives_what_is_too_large() -> None:
    """ZeroMQ gives a connection up for good that brought such a message."""

    async def talk() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[Any, Any] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="test"
        )
        connection: AsyncConnection[Any, Any] = AsyncConnection(
            context, listener.endpoint, ToCoordinator, name="test", max_bytes=10_000
        )
        breaks = 0

        async def count_breaks() -> None:
            nonlocal breaks
            while True:
                await connection.broken()
                assert await connection.refusal() is None
                breaks += 1

        counting = asyncio.create_task(count_breaks())
        while not connection.send(Watch("first")):  # noqa: ASYNC110 (nothing is queued unconnected)
            await asyncio.sleep(0.01)
        peer, _ = await asyncio.wait_for(listener.receive(), 5)
        assert listener.send(peer, Watch("x" * 20_000))

        async def speak() -> None:
            while True:  # what is sent to a connection that is about to break is lost
                connection.send(Watch("again"))
                await asyncio.sleep(0.05)

        speaking = asyncio.create_task(speak())
        successor = peer
        async with asyncio.timeout(10):
            while successor == peer:
                successor, message = await listener.receive()
        assert (message, breaks) == (Watch("again"), 1)
        assert listener.send(successor, Watch("welcome"))
        assert await asyncio.wait_for(connection.receive(), 5) == Watch("welcome")
        counting.cancel()
        speaking.cancel()
        connection.close(linger_ms=0)
        listener.close()
        context.term()

    asyncio.run(talk())


class Path:
    """What lies between two ends: it carries everything, until it loses all or is stuck."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self._there = host, int(port)
        self.loses = False
        self.moves = asyncio.Event()
        self.moves.set()
        self._carrying: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> str:
        """Where to connect instead."""
        self._server = await asyncio.start_server(self._meet, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed a turn later

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._there)
        for each in (self._carry(reader, far_writer), self._carry(far_reader, writer)):
            self._carrying.append(asyncio.create_task(each))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with contextlib.suppress(OSError):
                while await self.moves.wait() and (data := await reader.read(65536)):
                    if not self.loses:
                        writer.write(data)
        finally:
            writer.transport.abort()


@pytest.mark.parametrize("is_stuck", [False, True])
def test_a_path_that_loses_everything_is_a_broken_connection(
    is_stuck: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP itself would wait a quarter of an hour; heartbeats behind stuck data never leave."""
    monkeypatch.setattr(rpc, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(rpc, "HEARTBEAT_TIMEOUT_MS", 500)

    async def talk() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[Any, Any] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="test"
        )
        path = Path(listener.endpoint)
        async with path as endpoint:
            connection: AsyncConnection[Any, Any] = AsyncConnection(
                context, endpoint, FromCoordinator, name="test"
            )
            while not connection.send(Watch("first")):  # noqa: ASYNC110 (nothing is queued unconnected)
                await asyncio.sleep(0.01)
            assert (await asyncio.wait_for(listener.receive(), 5))[1] == Watch("first")
            breaking = asyncio.create_task(connection.broken())
            await asyncio.sleep(1.0)
            assert not breaking.done(), "though nobody says anything"
            if is_stuck:
                path.moves.clear()
                connection.send(Watch("x" * 16_000_000))
            else:
                path.loses = True
            await asyncio.wait_for(breaking, 5)
            path.loses = False
            path.moves.set()
            heard: Any = None
            async with asyncio.timeout(20):
                while heard != Watch("again"):  # on a busy machine the new connection may break, too
                    connection.send(Watch("again"))
                    with contextlib.suppress(TimeoutError):
                        _, heard = await asyncio.wait_for(listener.receive(), 0.2)
            connection.close(linger_ms=0)
        listener.close()
        context.term()

    asyncio.run(talk())


def test_messages_are_taken_as_they_come() -> None:
    """Garbage is dropped, other tasks get turns, and an exception of the taker ends it."""

    async def talk() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[Any, Any] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="test"
        )
        connection: AsyncConnection[Any, Any] = AsyncConnection(
            context, listener.endpoint, ToCoordinator, name="test"
        )
        names, garbage = list[str](), bytes([PROTOCOL]) + b"\xc1"
        turns = 0

        def take(message: Watch) -> None:
            names.append(message.watcher)
            assert connection.send(Watch(message.watcher))
            if message.watcher == "last":
                raise RuntimeError("enough")

        async def count_turns() -> None:
            nonlocal turns
            while True:
                await asyncio.sleep(0)
                turns += bool(names)

        taking = asyncio.create_task(connection.receive_all(take))
        while not connection.send(Watch("first")):  # noqa: ASYNC110 (nothing is queued unconnected)
            await asyncio.sleep(0.01)
        peer, _ = await asyncio.wait_for(listener.receive(), 5)
        counting = asyncio.create_task(count_turns())
        for number in range(100):
            assert listener.send(peer, Watch(str(number)))
            listener._socket.send_multipart((peer, garbage) if number % 2 else (peer, b"a", b"b"))
        assert listener.send(peer, Watch("last"))
        assert listener.send(peer, Watch("later"))
        with pytest.raises(RuntimeError, match="enough"):
            await asyncio.wait_for(taking, 5)
        assert names == [*map(str, range(100)), "last"]
        assert connection.bad_messages == 100
        assert turns >= 200 // MOST_AT_ONCE // 2
        echoed = [(await asyncio.wait_for(listener.receive(), 5))[1] for _ in names]
        assert [message.watcher for message in echoed if isinstance(message, Watch)] == names
        counting.cancel()
        connection.close(linger_ms=0)
        listener.close()
        context.term()

    asyncio.run(talk())


def test_a_message_that_comes_while_the_loop_is_busy_is_received() -> None:
    """The listener looks whether peers flood it before the loop hears of the message."""

    async def talk() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[Any, Any] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToCoordinator, name="test"
        )
        sender: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.DEALER)
        sender.connect(listener.endpoint)
        taken: list[Any] = []
        receives = asyncio.create_task(listener.receive_all(lambda _, message: taken.append(message)))

        def arrives(number: int) -> None:
            sender.send(encode(Watch(str(number))))
            time.sleep(0.05)  # it is there before the loop looks at sockets again

        for number in range(3):
            asyncio.get_running_loop().call_later(0.001, arrives, number)
            time.sleep(1.5 * INTERVAL)  # noqa: ASYNC251 (a look at floods is to be due at the same time)
            await until_async(lambda: bool(taken), 5.0)
            taken.clear()
        receives.cancel()
        await asyncio.gather(receives, return_exceptions=True)
        sender.close(linger=0)
        listener.close()
        context.term()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(talk())


def test_another_thread_ends_a_wait() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener: Listener[Any, Any] = Listener(context, "tcp://127.0.0.1:0", ToInstance, name="test")
    assert not listener.wait(0.01)
    listener.interrupt()  # also before the wait begins
    assert listener.wait(5.0)
    assert not listener.wait(0.01)
    threading.Timer(0.05, listener.interrupt).start()
    began = time.monotonic()
    assert listener.wait(5.0)
    assert time.monotonic() - began < 2.0
    assert listener.receive() is None
    listener.close()
    listener.interrupt()
    listener.close()
    context.term()
