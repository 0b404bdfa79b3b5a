"""The thread that answers the clients of a meeting place.

Those who connect prove the mesh's key first (:mod:`parallel.links.accepting`). Each client has at most one
question under way: nothing more is read from it before its answer has been taken by the kernel. So what is
kept for a client is bounded, however fast it asks or slowly it reads.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from parallel.links.accepting import Accepted, LinkAcceptor
from parallel.links.frames import Frames, FrameTooLarge, framed
from parallel.links.handshake import HandshakeVerdict, Offer
from parallel.links.keys import LinkKey
from parallel.links.meeting_values import LONGEST_KEY, MOST_KEYS_AT_ONCE, NoRoom, Values

logger = logging.getLogger(__name__)

MOST_CLIENTS = 1024
"""Maximum number of simultaneous clients of a meeting place."""
LONGEST_WAIT = 1.0
"""Maximum seconds for which a query waits for missing values."""
PURPOSE = "meeting"
"""Handshake purpose of links to a meeting place."""
_READ_BYTES = 64 << 10
_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""TCP keepalive options: a client on a dead host is dropped after a minute."""


# ---- client -> host


class Set(msgspec.Struct, frozen=True, tag="set", array_like=True):
    """Request to store a value under a name."""

    key: Annotated[str, Meta(max_length=LONGEST_KEY)]
    value: bytes


class Find(msgspec.Struct, frozen=True, tag="find", array_like=True):
    """Query for values by name; answered when all are set, or after a timeout."""

    keys: Annotated[list[str], Meta(max_length=MOST_KEYS_AT_ONCE)]
    seconds: Annotated[float, Meta(ge=0, le=LONGEST_WAIT)]


Question = Set | Find

# ---- host -> client


class Kept(msgspec.Struct, frozen=True, tag="kept", array_like=True):
    """Answer: the value is stored."""


class Found(msgspec.Struct, frozen=True, tag="found", array_like=True):
    """Answer to a query: the values, or None if some are missing."""

    values: list[bytes] | None


class NotKept(msgspec.Struct, frozen=True, tag="not_kept", array_like=True):
    """Answer: the request was refused, with the reason."""

    reason: str


Answer = Kept | Found | NotKept

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)


class _Client:
    """State of one client: unread requests, the pending query, and unsent output."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.frames = Frames()
        self.questions: deque[bytes] = deque()
        self.outgoing = memoryview(b"")
        self.waits_for: Find | None = None
        self.missing = ""
        """Name of a missing value that the client's query waits for."""
        self.until = 0.0
        """Deadline of the client's pending query."""


class MeetingServer:
    """Serves one listening socket in a thread of its own."""

    def __init__(self, listener: socket.socket, key: LinkKey | None) -> None:
        """``key``: what clients prove; None: a mesh without a key."""
        self._listener = listener
        self._acceptor = LinkAcceptor(listener, _admit, key)
        self._values = Values()
        self._changed = threading.Condition()
        self._waker, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._clients: dict[socket.socket, _Client] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._acceptor, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing = False
        self._cut_off = 0
        """Number of clients disconnected for wrong messages or beyond the limit."""
        self._thread = threading.Thread(target=self._run, name="meeting", daemon=True)
        self._thread.start()

    # ---- any thread of the process that serves

    @property
    def num_clients(self) -> int:
        return len(self._clients)

    @property
    def refused(self) -> int:
        """Connections that were not let in, and clients that were cut off."""
        return self._acceptor.refused + self._cut_off

    def set(self, key: str, value: bytes) -> None:
        """See :meth:`Values.set`."""
        with self._changed:
            self._values.set(key, value)
            self._changed.notify_all()
        self._wake()

    def find(self, keys: Sequence[str], seconds: float) -> list[bytes] | None:
        """See :meth:`parallel.links.meeting_contract.Meeting.find`."""
        with self._changed:
            self._changed.wait_for(lambda: self._values.find(keys) is not None or self._closing, seconds)
            return self._values.find(keys)

    def close(self) -> None:
        """Cut all clients off; returns when the thread has ended."""
        self._closing = True
        with self._changed:
            self._changed.notify_all()
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it wakes anyway; closed: it has ended
            self._waker.send(b"!", socket.MSG_DONTWAIT)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._closing:
                for key, _ in self._selector.select(self._patience()):
                    if key.fileobj is self._woken:
                        with contextlib.suppress(BlockingIOError):
                            self._woken.recv(_READ_BYTES)
                    elif key.data is not None:
                        self._serve(key.data)
                for accepted in self._acceptor.accepted():
                    self._let_in(accepted)
                self._answer_waiting()
        finally:
            self._end()

    def _patience(self) -> float | None:
        """Seconds until the next deadline of a query or handshake."""
        now = time.monotonic()
        seconds = [client.until - now for client in self._clients.values() if client.waits_for is not None]
        if (handshakes := self._acceptor.patience) is not None:
            seconds.append(handshakes)
        return max(0.0, min(seconds)) if seconds else None

    def _let_in(self, accepted: Accepted) -> None:
        connection = accepted.connection
        if len(self._clients) >= MOST_CLIENTS:
            self._cut_off += 1
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        client = self._clients[connection] = _Client(connection)
        self._selector.register(connection, selectors.EVENT_READ, client)

    def _serve(self, client: _Client) -> None:
        """Read a client's requests, or send more of its answer."""
        try:
            if client.outgoing:
                self._send(client)
            else:
                content = client.connection.recv(_READ_BYTES)
                if not content or client.waits_for is not None:  # a question before the last is answered
                    self._drop(client)
                    return
                client.questions += client.frames.take_in(content)
            self._answer(client)
        except (FrameTooLarge, msgspec.MsgspecError, UnicodeDecodeError) as error:
            self._cut_off += 1
            logger.warning("a client of the meeting place is cut off: %s", error)
            self._drop(client)
        except BlockingIOError:
            return
        except OSError:
            self._drop(client)

    def _answer(self, client: _Client) -> None:
        """Answer a client's requests until one must wait or output blocks."""
        while client.questions and client.waits_for is None and not client.outgoing:
            question = _decoder.decode(client.questions.popleft())
            match question:
                case Set(key, value):
                    self._reply(client, self._keep(key, value))
                case Find(keys, seconds):
                    with self._changed:
                        values = self._values.find(keys)
                        missing = self._values.first_missing(keys)
                    if missing is not None and seconds:
                        client.waits_for, client.missing = question, missing
                        client.until = time.monotonic() + seconds
                    else:
                        self._reply(client, Found(values))
        self._watch(client)

    def _keep(self, key: str, value: bytes) -> Answer:
        try:
            with self._changed:
                self._values.set(key, value)
                self._changed.notify_all()
        except NoRoom as error:
            return NotKept(str(error))
        return Kept()

    def _answer_waiting(self) -> None:
        now = time.monotonic()
        for client in list(self._clients.values()):
            if client.waits_for is None:
                continue
            with self._changed:
                if client.missing not in self._values and now < client.until:
                    continue
                values = self._values.find(client.waits_for.keys)
                missing = self._values.first_missing(client.waits_for.keys)
            if missing is not None and now < client.until:
                client.missing = missing
                continue
            client.waits_for = None
            try:
                self._reply(client, Found(values))
                self._answer(client)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
                self._drop(client)

    def _reply(self, client: _Client, answer: Answer) -> None:
        try:
            frame = framed(_encoder.encode(answer))
        except FrameTooLarge as error:
            frame = framed(_encoder.encode(NotKept(str(error))))
        client.outgoing = memoryview(frame)
        self._send(client)

    def _send(self, client: _Client) -> None:
        with contextlib.suppress(BlockingIOError):
            client.outgoing = client.outgoing[client.connection.send(client.outgoing) :]

    def _watch(self, client: _Client) -> None:
        """Register for the client's next event: writable with unsent output, else readable.

        One whose question waits is read, too, so that its end is seen; it has nothing to say then.
        """
        events = selectors.EVENT_WRITE if client.outgoing else selectors.EVENT_READ
        self._selector.modify(client.connection, events, client)

    def _drop(self, client: _Client) -> None:
        if self._clients.pop(client.connection, None) is not None:
            self._selector.unregister(client.connection)
            client.connection.close()

    def _end(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.close()
        self._acceptor.close()
        for each in (self._listener, self._woken, self._waker):
            each.close()


def _admit(offer: Offer) -> HandshakeVerdict:
    return HandshakeVerdict.ACCEPTED if offer.purpose == PURPOSE else HandshakeVerdict.OTHER_PURPOSE
