"""A peer that never ends the message whose parts it sends is cut off.

Others go on.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
import zmq
import zmq.asyncio

from coordinator.own_memory import private_memory
from coordinator.rpc import keys, unfinished
from coordinator.rpc.codec import encode
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncListener, Listener
from engine.messages import Attach, ToInstance
from tests.waiting import until, until_async

MAX_BYTES = 1 << 20
MOST_GROWTH = 500 << 20
FLOOD = 3 << 30
"""Bytes that an attacker has to send."""
PART = b"\x03" + (1 << 19).to_bytes(8, "big") + bytes(1 << 19)
"""One part of a message that has more parts."""


class Attacker:
    """A peer that speaks ZMTP by hand: ZeroMQ itself sends only whole messages."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=20)
        self.sent = 0
        self.was_cut = False
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        self.socket.sendall(greeting)
        self._read(64)
        self.socket.sendall(b"\x04" + bytes([len(ready)]) + ready)
        self._read(self._read(2)[1])
        self.thread = threading.Thread(target=self._flood)

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            found += self.socket.recv(count - len(found))
        return found

    def send_whole(self, message: bytes) -> None:
        self.socket.sendall(b"\x00" + bytes([len(message)]) + message)

    def _flood(self) -> None:
        try:
            while self.sent < FLOOD:
                self.socket.sendall(PART)
                self.sent += len(PART)
        except OSError:
            self.was_cut = True

    def close(self) -> None:
        self.socket.close()
        if self.thread.ident is not None:
            self.thread.join()


def good_peer(
    context: zmq.Context[Any], endpoint: str, mesh_keys: MeshKeys | None = None
) -> zmq.Socket[bytes]:
    peer: zmq.Socket[bytes] = zmq.Context.shadow(context.underlying).socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    if mesh_keys is not None:
        peer.curve_serverkey = mesh_keys.server_public
        peer.curve_publickey = mesh_keys.client_public
        peer.curve_secretkey = mesh_keys.client_secret
    peer.connect(endpoint)
    return peer


@pytest.mark.parametrize("is_known", [False, True], ids=["at once", "after a message"])
def test_a_loop_that_waits_cuts_a_flood_off(is_known: bool, caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[Any] = zmq.Context()
    listener: Listener[Any, Any] = Listener(
        context, "tcp://127.0.0.1:0", ToInstance, name="test", max_bytes=MAX_BYTES
    )
    good, attacker = good_peer(context, listener.endpoint), Attacker(listener.endpoint)
    got: list[Any] = []

    def turn() -> None:
        listener.wait(0.05)
        while (received := listener.receive()) is not None:
            got.append(received[1])

    def turn_until(condition: Callable[[], object]) -> None:
        until(lambda: turn() or condition())

    if is_known:
        attacker.send_whole(encode(Attach("attacker")))
        turn_until(lambda: got == [Attach("attacker")])
        got.clear()
    before = most = private_memory()
    attacker.thread.start()
    while attacker.thread.is_alive():
        turn()
        most = max(most, private_memory())
    assert attacker.was_cut
    assert attacker.sent < FLOOD / 2
    assert most - before < MOST_GROWTH
    good.send(encode(Attach("router")))
    turn_until(lambda: got == [Attach("router")])
    assert listener.bad_messages == 1
    assert "cut off a peer that sent a message without an end (1 so far): " in caplog.text
    attacker.close()
    good.close()
    listener.close()
    context.term()


def test_an_event_loop_cuts_a_flood_off_and_serves_others() -> None:
    async def run() -> None:
        context = zmq.asyncio.Context()
        listener: AsyncListener[Any, Any] = AsyncListener(
            context, "tcp://127.0.0.1:0", ToInstance, name="test", max_bytes=MAX_BYTES
        )
        good, attacker = good_peer(context, listener.endpoint), Attacker(listener.endpoint)
        got: list[Any] = []

        async def receive() -> None:
            while True:
                got.append((await listener.receive())[1])

        receiving = asyncio.create_task(receive())
        before = most = private_memory()
        attacker.thread.start()
        while attacker.thread.is_alive():
            good.send(encode(Attach("router")))
            await asyncio.sleep(0.02)
            most = max(most, private_memory())
        assert attacker.was_cut
        assert most - before < MOST_GROWTH
        await until_async(lambda: len(got) > 1)
        receiving.cancel()
        attacker.close()
        good.close()
        listener.close()
        context.term()

    asyncio.run(run())


@pytest.mark.parametrize("mesh_keys", [None, keys.generate()], ids=["open", "keys"])
def test_large_whole_messages_are_no_flood(mesh_keys: MeshKeys | None) -> None:
    """Whole messages of many times the limit, also while nothing receives them."""
    context: zmq.Context[Any] = zmq.Context()
    listener: Listener[Any, Any] = Listener(
        context, "tcp://127.0.0.1:0", ToInstance, name="test", max_bytes=MAX_BYTES, keys=mesh_keys
    )
    good = good_peer(context, listener.endpoint, mesh_keys)
    name = "x" * (MAX_BYTES - 100)
    num_received = 0
    for _ in range(4):
        for _ in range(100):
            good.send(encode(Attach(name)))
        until(lambda: listener.wait(0.05))
        for _ in range(100):
            until(lambda: listener.wait(1.0))
            received = listener.receive()
            assert received is not None
            num_received += 1
        assert listener.receive() is None
    assert (num_received, listener.bad_messages) == (400, 0)
    (seen,) = listener._unfinished._seen.values()
    assert seen.received > 400 * len(name), "the connection of each message is known"
    good.close()
    listener.close()
    context.term()


def test_many_small_floods_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is below the largest message."""
    monkeypatch.setattr(unfinished, "MOST_TOGETHER", 64 << 20)
    context: zmq.Context[Any] = zmq.Context()
    listener: Listener[Any, Any] = Listener(
        context, "tcp://127.0.0.1:0", ToInstance, name="test", max_bytes=MAX_BYTES
    )
    attackers = [Attacker(listener.endpoint) for _ in range(40)]
    listener.wait(0.2)
    listener.receive()
    for attacker in attackers:
        for _ in range(6):
            try:
                attacker.socket.sendall(PART)
            except OSError:
                break
        listener.wait(0.0)
        listener.receive()
    until(lambda: listener.wait(0.1) or listener.receive() or listener.bad_messages > 5)
    for attacker in attackers:
        attacker.close()
    listener.close()
    context.term()
