"""The wire: limits, garbage, other versions; every decoder fuzzed."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.arrivals import MOST_AT_ONCE
from coordinator.messages import FromCoordinator, Register, ToCoordinator, Watch
from coordinator.rpc import (
    PROTOCOL,
    AsyncConnection,
    AsyncListener,
    Decoder,
    Listener,
    Malformed,
    OtherProtocol,
    PortInUse,
    encode,
)
from engine.messages import Abort, Attach, Submit, ToInstance, ToRouter
from engine.sampling import SamplingParams

UNIONS: dict[str, Any] = {
    "to coordinator": ToCoordinator,
    "from coordinator": FromCoordinator,
    "to instance": ToInstance,
    "to router": ToRouter,
}

json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def tags_of(union: Any) -> list[str]:
    return [kind.__struct_config__.tag for kind in union.__args__]


@pytest.mark.parametrize("union", UNIONS.values(), ids=UNIONS.keys())
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_decoders_take_any_bytes_without_harm(union: Any, data: st.DataObject) -> None:
    tagged = st.builds(
        lambda tag, fields: msgspec.msgpack.encode({**fields, "type": tag}),
        st.sampled_from(tags_of(union)),
        st.dictionaries(
            st.sampled_from(["instance", "rank", "deltas", "params", "prompt_ids", "view", "peer"]), json_like
        ),
    )
    body = data.draw(st.binary(max_size=200) | tagged | json_like.map(msgspec.msgpack.encode))
    frame = data.draw(st.sampled_from([b"", bytes([PROTOCOL]), b"\x00", b"\xff"])) + body
    try:
        message = Decoder(union).decode(frame)
    except Malformed:
        return
    assert isinstance(message, union)


@settings(max_examples=200, deadline=None)
@given(cut=st.integers(0, 200), at=st.integers(0, 200), byte=st.integers(0, 255))
def test_damaged_messages_are_malformed_or_well_typed(cut: int, at: int, byte: int) -> None:
    frame = bytearray(
        encode(Submit(request=3, request_id="r", prompt_ids=[1, 2], params=SamplingParams(), seed=5))
    )
    frame[at % len(frame)] = byte
    try:
        message = Decoder[ToInstance](ToInstance).decode(bytes(frame[: cut or None]))
    except Malformed:
        return
    assert isinstance(message, Submit | Attach | Abort)


def test_deep_nesting_is_malformed() -> None:
    with pytest.raises(Malformed):
        Decoder(ToInstance).decode(bytes([PROTOCOL]) + b"\x91" * 100_000)


def test_another_protocol_is_named() -> None:
    with pytest.raises(OtherProtocol, match=f"protocol version {PROTOCOL + 1}, ours is {PROTOCOL}"):
        Decoder(ToInstance).decode(bytes([PROTOCOL + 1]))


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


def test_messages_are_taken_as_they_come() -> None:
    """All of them, in order, also when their taker sends; garbage in between is dropped, others get their
    turn, and what the taker raises ends it."""

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
            await listener._socket.send_multipart((peer, garbage) if number % 2 else (peer, b"a", b"b"))
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


def test_large_numbers_and_unknown_fields_are_refused_where_they_matter() -> None:
    register = {"type": "register", "instance": "i", "rank": "two", "size": None, "settings": None}
    with pytest.raises(Malformed, match="rank"):
        Decoder[Register](ToCoordinator).decode(bytes([PROTOCOL]) + msgspec.msgpack.encode(register))


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
