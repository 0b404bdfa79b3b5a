"""Typed messages over ZeroMQ: the only file of Lockstep that sees frames.

A message is one msgspec struct of a tagged union, encoded as msgpack behind one byte of protocol
version. Nothing else is ever decoded: no pickle, no dynamic method names. What cannot be decoded is
dropped and counted, never raised through a loop, and ZeroMQ itself drops a peer that sends a frame
above the size limit.

Two ends: a *listener* binds (ROUTER) and answers peers by their opaque name; a *connection* (DEALER)
talks to one listener and reconnects by itself. An instance's step loop uses the blocking listener,
asyncio programs the others.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Awaitable
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

logger = logging.getLogger(__name__)

PROTOCOL = 1
"""Raised with every change of a message that an older peer would misread."""

MAX_MESSAGE_BYTES = 64 * 1024**2
MAX_QUEUED_MESSAGES = 20_000
"""High-water mark of each socket and peer, both directions."""

LINGER_MS = 500
"""How long a closing socket may try to deliver what was sent last."""

COMPLAINT_INTERVAL = 10.0
"""Seconds between two log lines about messages that could not be decoded."""

Peer = bytes
"""A listener's name for one connection; new after every reconnect."""

In = TypeVar("In")
Out = TypeVar("Out")


class Malformed(ValueError):
    """Bytes that are no message of ours; says why."""


class OtherProtocol(Malformed):
    """A message of another protocol version than ours."""

    def __init__(self, version: int) -> None:
        super().__init__(f"protocol version {version}, ours is {PROTOCOL}")
        self.version = version


class PortInUse(OSError):
    """An address that cannot be bound; the message says which and what to do."""


_encoder = msgspec.msgpack.Encoder()


def encode(message: Any) -> bytes:
    """A struct as one frame."""
    buffer = bytearray(1)
    buffer[0] = PROTOCOL
    _encoder.encode_into(message, buffer, 1)
    return bytes(buffer)


class Decoder(Generic[In]):
    """Turns frames into the structs of one union, strictly."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes) -> In:
        """The message in a frame.

        Raises:
            Malformed: it is none.
        """
        if not frame:
            raise Malformed("empty frame")
        if frame[0] != PROTOCOL:
            raise OtherProtocol(frame[0])
        try:
            return self._decoder.decode(memoryview(frame)[1:])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise Malformed(str(error)) from error


class _Complaints:
    """Counts dropped messages, and logs some of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._logged_at = float("-inf")
        self.count = 0

    def add(self, error: Malformed) -> None:
        self.count += 1
        now = time.monotonic()
        if now - self._logged_at >= COMPLAINT_INTERVAL:
            self._logged_at = now
            logger.warning("%s: dropped a bad message (%d so far): %s", self._name, self.count, error)


def _set_options(socket: zmq.Socket[Any], endpoint: str, max_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.IPV6, "[" in endpoint)


def _bind(socket: zmq.Socket[Any], endpoint: str) -> str:
    """Bind, then learn the real port: the address is advertised only once it is held."""
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            reason = "is in use" if error.errno == errno.EADDRINUSE else "may not be bound by this user"
            raise PortInUse(f"{endpoint} {reason}: choose another port") from error
        raise PortInUse(f"{endpoint} cannot be bound: {error}") from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def _at_once(sent: Awaitable[Any]) -> None:
    """The outcome of a non-blocking send, whose future is done when it is returned."""
    assert isinstance(sent, asyncio.Future)
    sent.result()


class _Bound(Generic[In]):
    """What both kinds of listener have: a bound ROUTER socket with its limits, and how frames are read."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        receives: Any,
        *,
        name: str,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._socket = context.socket(zmq.ROUTER)
        _set_options(self._socket, endpoint, max_bytes)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._decoder: Decoder[In] = Decoder(receives)
        self._complaints = _Complaints(name)
        self.endpoint = _bind(self._socket, endpoint)

    @property
    def bad_messages(self) -> int:
        return self._complaints.count

    def close(self) -> None:
        self._socket.close()

    def _read(self, frames: list[bytes]) -> tuple[Peer, In]:
        if len(frames) != 2:
            raise Malformed(f"{len(frames)} frames instead of 2")
        return frames[0], self._decoder.decode(frames[1])


def _is_unreachable(error: zmq.ZMQError) -> bool:
    """Whether a send failed because the peer is gone or does not keep up."""
    return error.errno in (errno.EAGAIN, errno.EHOSTUNREACH)


class Listener(_Bound[In], Generic[In, Out]):
    """The bound end for a loop that must not wait: ``receive`` returns at once."""

    def receive(self) -> tuple[Peer, In] | None:
        """The next well-formed message, or None if none is there."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                return self._read(frames)
            except Malformed as error:
                self._complaints.add(error)

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for something to receive."""
        return bool(self._socket.poll(int(timeout * 1000), zmq.POLLIN))

    def send(self, peer: Peer, message: Out) -> bool:
        """Queue a message; False if the peer is gone or does not keep up."""
        try:
            self._socket.send_multipart((peer, encode(message)), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if not _is_unreachable(error):
                raise
            return False
        return True


class Sender(Generic[Out]):
    """A connecting end that only sends, for threads without an event loop."""

    def __init__(self, context: zmq.Context[Any], endpoint: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        _set_options(self._socket, endpoint, MAX_MESSAGE_BYTES)
        self._socket.connect(endpoint)

    def send(self, message: Out) -> bool:
        """Queue a message; False if the queue is full."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncListener(_Bound[In], Generic[In, Out]):
    """The bound end for asyncio; its context is a :class:`zmq.asyncio.Context`."""

    async def receive(self) -> tuple[Peer, In | OtherProtocol]:
        """The next message; one of another protocol version is handed out as such, to be answered."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                return self._read(frames)
            except OtherProtocol as error:
                self._complaints.add(error)
                return frames[0], error
            except Malformed as error:
                self._complaints.add(error)

    def send(self, peer: Peer, message: Out) -> bool:
        """Queue a message; False if the peer is gone or does not keep up."""
        try:
            _at_once(self._socket.send_multipart((peer, encode(message)), zmq.NOBLOCK))
        except zmq.ZMQError as error:
            if not _is_unreachable(error):
                raise
            return False
        return True


class AsyncConnection(Generic[In, Out]):
    """The connecting end for asyncio. Reconnects by itself; nothing is queued while it is not connected, so
    that no message of an earlier connection turns up in a later one."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        receives: Any,
        *,
        name: str,
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        _set_options(self._socket, endpoint, max_bytes)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._decoder: Decoder[In] = Decoder(receives)
        self._complaints = _Complaints(name)
        self.endpoint = endpoint
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(endpoint)

    @property
    def bad_messages(self) -> int:
        return self._complaints.count

    async def receive(self) -> In:
        """The next well-formed message.

        Raises:
            OtherProtocol: the listener speaks another version; nothing it says can be understood.
        """
        while True:
            frames = await self._socket.recv_multipart()
            try:
                if len(frames) != 1:
                    raise Malformed(f"{len(frames)} frames instead of 1")
                return self._decoder.decode(frames[0])
            except OtherProtocol:
                raise
            except Malformed as error:
                self._complaints.add(error)

    async def broken(self) -> None:
        """Wait until the established connection breaks: the listener's process ended, or the network did."""
        await recv_monitor_message(self._monitor)

    def send(self, message: Out) -> bool:
        """Queue a message; False if there is no connection now, or its queue is full."""
        try:
            _at_once(self._socket.send(encode(message), zmq.NOBLOCK))
        except zmq.Again:
            return False
        return True

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)
