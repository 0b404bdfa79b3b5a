"""One HTTP connection: uvicorn's protocol with a deadline for the head, and a short way for streamed bodies.

The application sees the short way as an extension of its ASGI scope: an event goes to the socket without a
message, a coroutine and a list of frames around it. What opens and ends an answer goes the usual way, and so
does everything while the client does not keep up.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

EXTENSION = "lockstep.body_writer"

MOST_KEPT = 64
"""Bytes of a token's text up to which the heads of chunks are kept, by their length."""


Fill = Callable[[bytes], bool]
"""Writes a part, given what stands in its middle; False, and nothing is written, while there is no way."""


class BodyWriter(Protocol):
    """Writes parts of a body that has begun. Nothing between the application and the server may want to see
    them (no middleware of ours does)."""

    def is_open(self) -> bool:
        """Whether a part can be written now. If not, the usual way says why: it waits for a client that does
        not keep up, or drops what nobody takes any more."""
        ...

    def write(self, part: bytes) -> None:
        """Only while open, and not for nothing: an empty part would end the body."""
        ...

    def filling(self, before: bytes, after: bytes) -> Fill:
        """For parts of a body that has begun which differ only in what stands between these two."""
        ...


def writer_of(scope: Mapping[str, Any]) -> BodyWriter | None:
    """None where the server has no short way."""
    found: Callable[[], BodyWriter | None] | None = scope.get("extensions", {}).get(EXTENSION)
    return None if found is None else found()


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

    def filling(self, before: bytes, after: bytes) -> Fill:
        """See :class:`BodyWriter`."""
        write, length, end = self._write, len(before) + len(after), after + b"\r\n"
        heads: dict[int, bytes] = {}  # by the length between: it is in the head of a chunk
        flow, cycle, is_chunked = self._flow, self._cycle, self._cycle.chunked_encoding is True

        def fill(between: bytes) -> bool:
            if flow.write_paused or cycle.disconnected or cycle.response_complete or not is_chunked:
                return False
            size = len(between)
            head = heads.get(size)
            if head is None:
                head = b"%x\r\n%b" % (length + size, before)
                if size < MOST_KEPT:
                    heads[size] = head
            write(head + between + end)
            return True

        return fill


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

    def filling(self, before: bytes, after: bytes) -> Fill:
        """See :class:`BodyWriter`."""
        fill = self._writer.filling(before, after)

        def timed(between: bytes) -> bool:
            self.wrote_at = time.perf_counter()
            return fill(between)

        return timed


class PatientProtocol(HttpToolsProtocol):
    """Closes a connection on which no whole request head arrives in time; uvicorn would wait for ever."""

    head_timeout = 60.0
    _head_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._have_head()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_head()

    def on_headers_complete(self) -> None:
        self._have_head()
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:  # no websocket
            scope: dict[str, Any] = self.scope  # type: ignore[assignment]
            # The cycle refers to its scope. Without a way back, it is freed as soon as it is over.
            cycle = weakref.ref(self.cycle)
            scope.setdefault("extensions", {})[EXTENSION] = lambda: (
                None if (found := cycle()) is None else ChunkWriter(found)
            )

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
