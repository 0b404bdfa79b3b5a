"""HTTP connections: uvicorn's protocol with deadlines for clients and fast streamed bodies.

The application gets the fast path as an extension of its ASGI scope: an event goes to the socket without a
message, a coroutine and a list of frames around it. What opens and ends an answer goes the usual way, and so
does everything while the client does not keep up. Another extension cuts off a client that does not read.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from router.http.request_heads import BoundedProtocol

EXTENSION = "lockstep.body_writer"
CUT_OFF = "lockstep.cut_off"

MOST_KEPT = 64
"""Bytes of a token's text up to which chunk heads are cached, by length."""


class BodyPart(Protocol):
    """Writer of parts of a body that differ only in their middle."""

    def write(self, between: bytes) -> bool:
        """Write a part with this middle; False, with nothing written, while no body is open."""
        ...


class BodyWriter(Protocol):
    """Writes parts of a body that has begun.

    Nothing between the application and the server may want to see them (no middleware of ours does).
    """

    def is_open(self) -> bool:
        """Whether a part can be written now.

        If not, the usual way says why: it waits for a client that does not keep up, or drops what nobody
        takes any more.
        """
        ...

    def write(self, part: bytes) -> None:
        """Write a non-empty part while open; an empty one would end the body."""
        ...

    def part(self, before: bytes, after: bytes) -> BodyPart:
        """A writer of body parts that differ only between ``before`` and ``after``.

        The body must have begun.
        """
        ...


def writer_of(scope: Mapping[str, Any]) -> BodyWriter | None:
    """Direct body writer of a request; None where the server offers none."""
    found: Callable[[], BodyWriter | None] | None = scope.get("extensions", {}).get(EXTENSION)
    return None if found is None else found()


def cut_off(scope: Mapping[str, Any]) -> None:
    """Close the connection of an abandoned request at once.

    Otherwise it would stay open until its client has taken all that was written. Does nothing where the
    server lacks the extension.
    """
    found: Callable[[], None] | None = scope.get("extensions", {}).get(CUT_OFF)
    if found is not None:
        found()


class ChunkWriter:
    """A :class:`BodyWriter`: chunks of HTTP/1.1 straight to the transport."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def __repr__(self) -> str:
        return f"<ChunkWriter {'open' if self.is_open() else 'closed'}>"

    def is_open(self) -> bool:
        cycle = self._cycle
        return (
            not self._flow.write_paused
            and not cycle.disconnected
            and cycle.chunked_encoding is True  # decided when an answer begins
            and not cycle.response_complete
        )

    def write(self, part: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(part), part))

    def part(self, before: bytes, after: bytes) -> BodyPart:
        """See :class:`BodyWriter`."""
        return ChunkPart(self._cycle, before, after)


class ChunkPart:
    """A :class:`BodyPart`: one chunk of HTTP/1.1, straight to the transport."""

    __slots__ = ("_before", "_cycle", "_end", "_flow", "_heads", "_is_chunked", "_length", "_write")

    def __init__(self, cycle: RequestResponseCycle, before: bytes, after: bytes) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write
        self._is_chunked = cycle.chunked_encoding is True
        self._before = before
        self._end = after + b"\r\n"
        self._length = len(before) + len(after)
        self._heads: dict[int, bytes] = {}
        """Head of a chunk and what stands before the middle, by the middle's length."""

    def write(self, between: bytes) -> bool:
        """See :class:`BodyPart`."""
        cycle = self._cycle
        if self._flow.write_paused or cycle.disconnected or cycle.response_complete or not self._is_chunked:
            return False
        size = len(between)
        head = self._heads.get(size)
        if head is None:
            head = b"%x\r\n%b" % (self._length + size, self._before)
            if size < MOST_KEPT:
                self._heads[size] = head
        self._write(head + between + self._end)
        return True


class TimedWriter:
    """A :class:`BodyWriter` that knows when it wrote last, on the clock of ``time.perf_counter``."""

    def __init__(self, writer: BodyWriter) -> None:
        self._writer = writer
        self.is_open = writer.is_open
        self.wrote_at = 0.0

    def __repr__(self) -> str:
        return f"<TimedWriter to {self._writer!r}>"

    def write(self, part: bytes) -> None:
        """See :class:`BodyWriter`."""
        self.wrote_at = time.perf_counter()
        self._writer.write(part)

    def part(self, before: bytes, after: bytes) -> BodyPart:
        """See :class:`BodyWriter`."""
        return _TimedPart(self, self._writer.part(before, after))


class _TimedPart:
    """A :class:`BodyPart` of a :class:`TimedWriter`."""

    def __init__(self, writer: TimedWriter, part: BodyPart) -> None:
        self._writer = writer
        self._part = part

    def write(self, between: bytes) -> bool:
        """See :class:`BodyPart`."""
        is_written = self._part.write(between)
        if is_written:
            self._writer.wrote_at = time.perf_counter()
        return is_written


class _Transport:
    """A connection's transport, which says when it is closed: uvicorn does that in many places."""

    def __init__(self, transport: asyncio.Transport, on_close: Callable[[], None]) -> None:
        self._transport = transport
        self._on_close = weakref.WeakMethod(on_close)
        self.write = transport.write  # for every token, so without a detour

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transport!r}>"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        self._transport.close()
        if (on_close := self._on_close()) is not None:
            on_close()


class PatientProtocol(BoundedProtocol):
    """Closes connections without a whole request head in time, and those that stop reading.

    uvicorn would wait for ever, also for a client that takes nothing of what waits to be written to it.
    """

    head_timeout = 60.0
    take_timeout = 60.0
    _head_due: asyncio.TimerHandle | None = None
    _taking_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        self._earlier: deque[RequestResponseCycle] = deque()
        """Unfinished requests that a later one has already followed, in order.

        uvicorn reports the connection's end to the latest request only.
        """
        watched: Any = _Transport(transport, self._expect_taking)
        super().connection_made(watched)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        for cycle in self._earlier:
            cycle.disconnected = not cycle.response_complete
            cycle.message_event.set()
        super().connection_lost(exc)
        self._need_no_taking()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_taking()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._need_no_taking()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answered = self.cycle is not None and self.cycle.response_complete
        if is_answered and self.timeout_keep_alive_task is None and self._head_due is None:
            self._expect_head()  # what came of a body that nobody wants any more has ended the wait for one

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._have_head()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # else it comes again
            while self._earlier and self._earlier[0].response_complete:
                self._earlier.popleft()
            if before is not None and not before.response_complete:
                self._earlier.append(before)
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            # The cycle refers to its scope. Without a way back, it is freed as soon as it is over.
            cycle = weakref.ref(self.cycle)
            extensions = scope.setdefault("extensions", {})
            extensions[EXTENSION] = lambda: None if (found := cycle()) is None else ChunkWriter(found)
            extensions[CUT_OFF] = partial(_cut_off, cycle)

    def _expect_head(self) -> None:
        self._have_head()
        self._head_due = self.loop.call_later(self.head_timeout, self._close_if_silent)

    def _have_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _close_if_silent(self) -> None:
        cycle = getattr(self, "cycle", None)
        if cycle is not None and not cycle.response_complete:
            self._expect_head()  # half a head was sent while an answer is on its way: that comes first
        elif not self.transport.is_closing():
            self.transport.close()

    def _expect_taking(self) -> None:
        """Deadline for a client that does not read what is written to it."""
        self._need_no_taking()
        left = self.transport.get_write_buffer_size()
        self._taking_due = self.loop.call_later(self.take_timeout, self._abort_unless_taken, left)

    def _need_no_taking(self) -> None:
        if self._taking_due is not None:
            self._taking_due.cancel()
            self._taking_due = None

    def _abort_unless_taken(self, left: int) -> None:
        if self.transport.get_write_buffer_size() < left:
            self._expect_taking()
        else:
            self.transport.abort()


def _cut_off(cycle: weakref.ref[RequestResponseCycle]) -> None:
    found = cycle()
    if found is not None and not found.response_complete:
        found.disconnected = True  # as it is in a moment: uvicorn is not to miss the rest of the answer
        found.transport.abort()
