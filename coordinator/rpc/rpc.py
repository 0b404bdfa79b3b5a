"""Typed messages over ZeroMQ: the sockets, and the only file of Lockstep that sees frames.

What a frame holds is :mod:`coordinator.rpc.codec`. What cannot be decoded is dropped and counted, never
raised through a loop, and ZeroMQ itself drops a peer that sends a frame above the size limit.

Two ends: a *listener* binds (ROUTER) and answers peers by their opaque name; a *connection* (DEALER)
talks to one listener and reconnects by itself. An instance's step loop uses the blocking listener,
asyncio programs the others.

With the mesh's keys (:mod:`coordinator.rpc.keys`) both ends prove who they are and everything is encrypted
(CURVE). Either both ends of a connection have keys or none has.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, Required, TypedDict, TypeVar, Unpack

import zmq
import zmq.asyncio

from coordinator.addresses import is_ipv6
from coordinator.rpc.arrivals import Arrivals, is_readable
from coordinator.rpc.codec import Decoder, Malformed, OtherProtocol, encode
from coordinator.rpc.complaints import Complaints
from coordinator.rpc.guard import Guard
from coordinator.rpc.handshakes import Handshakes, KeyRefused
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.names import FollowedName, host_of
from coordinator.rpc.unfinished import INTERVAL, Unfinished

logger = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024**2
"""Bytes of one message; a larger one is not sent, and its receiver hangs up."""
MAX_QUEUED_MESSAGES = 20_000
"""High-water mark of each socket and peer, both directions."""

LINGER_MS = 500
"""Milliseconds for a closing socket to deliver what was sent last."""

RECONNECT_MS = 50
"""Milliseconds until the first new try to connect."""
RECONNECT_MAX_MS = 250
"""Most milliseconds between two tries to connect; they double from ``RECONNECT_MS``.

A coordinator that is started again should not be waited for much longer than its start takes.
"""

CONNECT_TIMEOUT_MS = 3000
"""Timeout of a connection attempt, in milliseconds.

The kernel's own tries are up to a minute apart by the time a cable is back.
"""

HEARTBEAT_MS = 2000
"""Interval of ZeroMQ's heartbeats, in milliseconds."""
HEARTBEAT_TIMEOUT_MS = 10_000
"""Milliseconds without a heartbeat's answer after which a connection counts as broken.

A path that just drops what it is given breaks no connection for a quarter of an hour. ZeroMQ's own thread
answers, whatever a process computes. One that is stopped does not, but those who have rules for that judge
sooner.
"""

BACKLOG = 4096
"""Backlog of connections not yet accepted, bounded by the kernel (``net.core.somaxconn``).

All instances of a mesh connect at once when its coordinator is started again.
"""

HANDSHAKE_MS = 15_000
"""Timeout of a connection's handshake, in milliseconds.

Before that a listener holds for it what it sends.
"""

_NOBLOCK = int(zmq.NOBLOCK)  # an enum's operators take time
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

Peer = bytes
"""Identity of one connection at its listener; new after every reconnect."""

In = TypeVar("In")
Out = TypeVar("Out")
Context = TypeVar("Context", bound=zmq.Context[Any])


class TooLarge(ValueError):
    """Error: a message exceeds the size at which its receiver hangs up."""


def _bounded(message: Any, growth: int = 0) -> bytes:
    """A message as its receiver takes it.

    Raises:
        TooLarge: it has more than ``MAX_MESSAGE_BYTES``, or will have with ``growth`` bytes more.
    """
    frame = encode(message)
    if len(frame) + growth > MAX_MESSAGE_BYTES:
        later = f", and later up to {growth} more" if growth else ""
        raise TooLarge(f"{len(frame)} bytes in one message{later}")
    return frame


class PortInUse(OSError):
    """An address that cannot be bound; the message says which and what to do."""


def with_room(context: Context) -> Context:
    """Create a ZeroMQ context with as many sockets as ZeroMQ allows.

    By default it has room for 1,023 sockets, and each :class:`AsyncConnection` takes three.
    """
    context.set(zmq.MAX_SOCKETS, int(context.get(zmq.SOCKET_LIMIT)))
    return context


def _set_options(socket: zmq.Socket[Any], endpoint: str, max_bytes: int) -> None:
    socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
    socket.setsockopt(zmq.SNDHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.RCVHWM, MAX_QUEUED_MESSAGES)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.IPV6, _is_ipv6(endpoint))


def _is_ipv6(endpoint: str) -> bool:
    """Whether ZeroMQ shall resolve this endpoint to IPv6 addresses.

    Without that it takes every name for IPv4; with it, it prefers IPv6 for names that mean both.
    """
    host = host_of(endpoint)
    return host is not None and is_ipv6(host)


def _identify(socket: zmq.Socket[Any], keys: MeshKeys | None) -> None:
    """Give a connecting socket the mesh's client key, and the listener's public key."""
    if keys is not None:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey = keys.client_public
        socket.curve_secretkey = keys.client_secret


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


class ListenerOptions(TypedDict, total=False):
    """Options of a bound end."""

    name: Required[str]
    """Name of the listener in log lines."""
    max_bytes: int
    """Size of the largest message that it takes."""
    keys: MeshKeys | None
    """Keys that its peers must have; None: any peer is welcome."""
    listen_fd: int | None
    """A socket of the process that started this one, which listens at the endpoint already."""


class _Bound(Generic[In]):
    """Base of both listeners: a bound ROUTER socket with limits, guard and decoding.

    With ``keys``, a context can have one listener.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        receives: Any,
        *,
        name: str,
        max_bytes: int = MAX_MESSAGE_BYTES,
        keys: MeshKeys | None = None,
        listen_fd: int | None = None,
    ) -> None:
        """Bind ``endpoint``, or take over a socket that is bound to it: see :class:`ListenerOptions`."""
        self._socket = context.socket(zmq.ROUTER)
        _set_options(self._socket, endpoint, max_bytes)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        self._socket.setsockopt(zmq.BACKLOG, BACKLOG)
        self._guard = Guard(context, self._socket, keys, name) if keys is not None else None
        if listen_fd is not None:
            self._socket.setsockopt(zmq.USE_FD, listen_fd)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._decoder: Decoder[In] = Decoder(receives)
        self._complaints = Complaints(logger, f"{name}: dropped a bad message")
        self.endpoint = _bind(self._socket, endpoint)
        self._unfinished = Unfinished(self.endpoint, max_bytes)
        self._floods = Complaints(logger, f"{name}: cut off a peer that sent a message without an end")

    @property
    def bad_messages(self) -> int:
        return self._complaints.count + self._floods.count

    @property
    def refused_peers(self) -> int:
        """Connections refused because they did not have the mesh's key."""
        return self._guard.refused_peers if self._guard is not None else 0

    def close(self) -> None:
        self._socket.close()

    def _read(self, frames: list[zmq.Frame]) -> tuple[Peer, In]:
        self._unfinished.note_whole(int(frames[-1].get(zmq.SRCFD)))
        if len(frames) != 2:
            raise Malformed(f"{len(frames)} frames instead of 2")
        return frames[0].bytes, self._decoder.decode(frames[1].buffer)

    def _send_frame(self, peer: Peer, frame: bytes) -> bool:
        try:
            self._socket.send(peer, _MORE)  # what send_multipart does beside takes twice as long as both
            self._socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as error:
            if not _is_unreachable(error):
                raise
            return False
        return True

    def _cut_floods(self) -> None:
        """Disconnect peers that flood with unfinished messages; call it when nothing waits."""
        for size in self._unfinished.cut_floods():
            self._floods.add(f"{size >> 20} MiB so far")


def _is_unreachable(error: zmq.ZMQError) -> bool:
    """Whether a send failed because the peer is gone or does not keep up."""
    return error.errno in (errno.EAGAIN, errno.EHOSTUNREACH)


class Listener(_Bound[In], Generic[In, Out]):
    """The bound end for a loop that must not wait: ``receive`` returns at once.

    Other threads may only :meth:`interrupt`.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        receives: Any,
        **options: Unpack[ListenerOptions],
    ) -> None:
        super().__init__(context, endpoint, receives, **options)
        self._interrupts = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._interrupts, zmq.POLLIN)

    def receive(self) -> tuple[Peer, In] | None:
        """The next well-formed message, or None if none is there."""
        while is_readable(self._socket):  # to try and fail takes three times as long
            try:
                return self._read(self._socket.recv_multipart(_NOBLOCK, copy=False))
            except Malformed as error:
                self._complaints.add(error)
        self._cut_floods()
        return None

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for something to receive, or an interruption."""
        deadline = time.monotonic() + timeout
        while not (events := self._poller.poll(int(min(timeout, INTERVAL) * 1000))):
            self._cut_floods()
            timeout = deadline - time.monotonic()
            if timeout <= 0:
                break
        if any(socket == self._interrupts for socket, _ in events):
            os.eventfd_read(self._interrupts)
        return bool(events)

    def interrupt(self) -> None:
        """End the wait of the loop's thread, now or at its next one.

        From any thread, also after the end.
        """
        with self._lock:
            if not self._socket.closed:
                os.eventfd_write(self._interrupts, 1)

    def close(self) -> None:
        with self._lock:
            if not self._socket.closed:
                super().close()
                os.close(self._interrupts)

    def send(self, peer: Peer, message: Out) -> bool:
        """Queue a message; False if the peer is gone or does not keep up.

        Raises:
            TooLarge: it has more than ``MAX_MESSAGE_BYTES``.
        """
        return self._send_frame(peer, _bounded(message))


class Sender(Generic[Out]):
    """A connecting end that only sends, for threads without an event loop."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, keys: MeshKeys | None = None) -> None:
        self._socket = context.socket(zmq.DEALER)
        _set_options(self._socket, endpoint, MAX_MESSAGE_BYTES)
        _identify(self._socket, keys)
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

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        receives: Any,
        **options: Unpack[ListenerOptions],
    ) -> None:
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        super().__init__(plain, endpoint, receives, **options)
        self._context = context  # a context that nothing refers to ends, and waits for its sockets
        self._arrivals = Arrivals(self._socket)

    async def receive(self) -> tuple[Peer, In | OtherProtocol]:
        """The next message.

        One of another protocol version is handed out as such, to be answered.
        """
        while True:
            if not self._arrivals.are_there():
                self._cut_floods()
            try:
                async with asyncio.timeout(INTERVAL):
                    await self._arrivals.wait()
            except TimeoutError:
                continue
            if (found := self._next()) is not None:
                return found

    async def receive_all(self, take: Callable[[Peer, In | OtherProtocol], None]) -> None:
        """Give each message to ``take`` at once, until cancelled; in place of :meth:`receive`.

        Raises:
            Exception: what ``take`` raises.
        """
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def receive() -> bool:
            if ended.done() or not self._arrivals.are_there():
                return False
            try:
                if (found := self._next()) is not None:
                    take(*found)
            except Exception as error:  # noqa: BLE001 (is raised below)
                if not ended.done():
                    ended.set_exception(error)
            return True

        self._arrivals.watch(receive)
        try:
            while not ended.done():
                await asyncio.wait([ended], timeout=INTERVAL)
                if self._arrivals.are_there():
                    self._arrivals.check()  # that look has taken the news in
                else:
                    self._cut_floods()
            ended.result()
        finally:
            self._arrivals.close()

    def _next(self) -> tuple[Peer, In | OtherProtocol] | None:
        """Receive the message that has arrived; None if it is malformed."""
        frames = self._socket.recv_multipart(_NOBLOCK, copy=False)
        try:
            return self._read(frames)
        except OtherProtocol as error:
            self._complaints.add(error)
            return frames[0].bytes, error
        except Malformed as error:
            self._complaints.add(error)
            return None

    def send(self, peer: Peer, message: Out) -> bool:
        """Queue a message; False if the peer is gone or does not keep up."""
        sent = self._send_frame(peer, encode(message))
        self._arrivals.check()
        return sent

    def send_all(self, peers: Iterable[Peer], message: Out) -> None:
        """Queue a message for some peers, encoded once.

        Peers that are gone or do not keep up miss it."""
        frame = encode(message)
        for peer in peers:
            self._send_frame(peer, frame)
        self._arrivals.check()

    def close(self) -> None:
        self._arrivals.close()
        super().close()


class AsyncConnection(Generic[In, Out]):
    """The connecting end for asyncio.

    Reconnects by itself; nothing is queued while it is not connected, so that no message of an earlier
    connection turns up in a later one.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        receives: Any,
        *,
        name: str,
        max_bytes: int = MAX_MESSAGE_BYTES,
        keys: MeshKeys | None = None,
        peer_timeout_ms: int = 0,
    ) -> None:
        """Connect, now and whenever the connection is lost.

        ``peer_timeout_ms``: without a sign of this end for so long, the connection counts as broken at the
        listener's, too; 0: as long as its host does not find out.

        Raises:
            zmq.ZMQError: the endpoint is none, or this process can have no more sockets.
        """
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        self._socket = plain.socket(zmq.DEALER)
        _set_options(self._socket, endpoint, max_bytes)
        _identify(self._socket, keys)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self._socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TTL, peer_timeout_ms)
        self._socket.setsockopt(zmq.TCP_MAXRT, HEARTBEAT_TIMEOUT_MS)  # nothing is asked behind what is stuck
        self._decoder: Decoder[In] = Decoder(receives)
        self._complaints = Complaints(logger, f"{name}: dropped a bad message")
        self.endpoint = endpoint
        self._arrivals = Arrivals(self._socket)
        with contextlib.ExitStack() as made:
            made.callback(self._socket.close, linger=0)
            self._handshakes = Handshakes(
                context,
                self._socket,
                endpoint,
                has_keys=keys is not None,
                connect_again=self._connect_again,
            )
            made.callback(self._handshakes.close)
            self._socket.connect(endpoint)
            made.pop_all()
        self._name = FollowedName(endpoint, self._is_connected, self._take_kind)

    @property
    def bad_messages(self) -> int:
        return self._complaints.count

    async def receive(self) -> In:
        """The next well-formed message.

        Raises:
            OtherProtocol: the listener speaks another version; nothing it says can be understood.
        """
        self._name.begin()
        while True:
            await self._arrivals.wait()
            if (message := self._read(self._socket.recv(_NOBLOCK, copy=False))) is not None:
                return message

    async def receive_all(self, take: Callable[[In], None]) -> None:
        """Give each well-formed message to ``take`` at once, until cancelled; in place of :meth:`receive`.

        Raises:
            OtherProtocol: as there.
            Exception: whatever ``take`` raises.
        """
        self._name.begin()
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        some_are_there = self._arrivals.are_there

        def receive() -> bool:
            if ended.done() or not some_are_there():  # to try and fail takes several times as long
                return False
            try:
                if (message := self._read(self._socket.recv(_NOBLOCK, copy=False))) is not None:
                    take(message)
            except Exception as error:  # noqa: BLE001 (is raised below)
                if not ended.done():  # what takes it may also have ended this
                    ended.set_exception(error)
            return True

        self._arrivals.watch(receive)
        try:
            await ended
        finally:
            self._arrivals.close()

    def take_waiting(self) -> None:
        """Let :meth:`receive_all` take what has arrived, before something is made of the news that the
        connection broke: that comes another way, and may come first."""
        if not self._socket.closed:
            self._arrivals.take_all()

    def _read(self, frame: zmq.Frame) -> In | None:
        """Decode the message that begins with a frame; None if it is malformed.

        Raises:
            OtherProtocol: it is one of another version.
        """
        try:
            if frame.more:
                count = 1 + len(self._socket.recv_multipart(_NOBLOCK, copy=False))
                raise Malformed(f"{count} frames instead of 1")
            return self._decoder.decode(frame.buffer)
        except OtherProtocol:
            raise
        except Malformed as error:
            self._complaints.add(error)
            return None

    async def broken(self) -> None:
        """Wait until a connection breaks; it is retried in any case."""
        await self._handshakes.broken()

    async def refusal(self) -> KeyRefused | None:
        """The error if keys caused the last break; may take a second."""
        return await self._handshakes.refusal()

    def _take_kind(self, ipv6: bool) -> None:
        """Switch connecting to IPv6 or IPv4, which the listener's name now means."""
        if not self._socket.closed and ipv6 != bool(self._socket.getsockopt(zmq.IPV6)):
            self._socket.setsockopt(zmq.IPV6, ipv6)  # counts from the next connect on
            self._connect_again()

    def _is_connected(self) -> bool:
        if self._socket.closed:
            return False
        can_send = bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)  # with IMMEDIATE: to somebody
        self._arrivals.check()
        return can_send

    def _connect_again(self) -> None:
        if self._socket.closed or self._is_connected():
            return
        with contextlib.suppress(zmq.ZMQError):
            self._socket.disconnect(self.endpoint)
        self._socket.connect(self.endpoint)
        self._arrivals.check()

    def send(self, message: Out, growth: int = 0) -> bool:
        """Queue a message; False if there is no connection now, or its queue is full.

        ``growth``: bytes more that the message may have when it is sent again.

        Raises:
            TooLarge: it has more than ``MAX_MESSAGE_BYTES``, or may have later.
        """
        try:
            self._socket.send(_bounded(message, growth), zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            self._arrivals.check()
        return True

    def close(self, linger_ms: int = LINGER_MS) -> None:
        self._name.close()
        self._arrivals.close()
        self._handshakes.close()
        self._socket.close(linger=linger_ms)
