"""Events of a running stream, numbered from 0, for any number of readers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

END = b"\n\n"


class EventLog:
    """Events of one stream: a writer, and readers that each begin where they like."""

    def __init__(self, name: str | None = None) -> None:
        """``name``: beginning of the events' ids; None for streams that number theirs."""
        self._name = name
        self.events: list[bytes] = []
        self.error: Exception | None = None
        """Error that came before any event."""
        self.has_ended = False
        self._rest = b""
        self._given = 0
        """Events that were written since the stream was expected from its beginning."""
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<EventLog of {len(self.events)} events{', ended' * self.has_ended}>"

    def write(self, body: bytes) -> None:
        """Add a part of the stream's body; comments in it are no events."""
        *events, self._rest = (self._rest + body).split(END)
        events = [each + END for each in events if not each.startswith(b":")]
        if self._name is not None:
            first = self._given
            events = [
                f"id: {self._name}-{number}\n".encode() + each for number, each in enumerate(events, first)
            ]
        self._given += len(events)
        new = events[max(0, len(self.events) - self._given + len(events)) :]
        if new:
            self.events += new
            self._wake()

    def rewind(self) -> None:
        """Expect the whole stream again, from its first event."""
        self._given, self._rest = 0, b""

    def replace(self, events: list[bytes]) -> None:
        """End the stream with all its events, of which the first are known."""
        self.events = events
        self.end()

    def end(self, error: Exception | None = None) -> None:
        """End the stream; an ``error`` is one that came before any event."""
        self.error, self.has_ended = error, True
        self._wake()

    async def after(self, count: int, patience: float | None = None) -> AsyncIterator[bytes]:
        """Events behind the first ``count``, as they come, several at a time as one body.

        An empty body comes after ``patience`` seconds without an event.

        Raises:
            Exception: the stream failed before it had any event.
        """
        while True:
            if count < len(self.events):
                found, count = self.events[count:], len(self.events)
                yield b"".join(found)
            elif self.has_ended:
                if self.error is not None:
                    raise self.error
                return
            else:
                try:
                    await asyncio.wait_for(self._changed.wait(), patience)
                except TimeoutError:
                    yield b""

    async def ended(self) -> None:
        """Wait for the end of the stream."""
        while not self.has_ended:
            await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
