"""Messages between members over links.

A message is a header of 16 bytes (the call that it belongs to, and how many bytes of data), then the data.

This module loads no torch.

A call that exchanges messages queues all that it sends, then takes what it needs in whatever order it comes,
and ends when its own are sent. So no member waits for another's room: all of them receive while they send.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import NoReturn, Protocol

from parallel.links.errors import Evidence
from parallel.rounds.notes import call_of
from parallel.rounds.waiting import CHECK_SECONDS, SpinWait

HEADER_BYTES = 16
_Header = ctypes.c_int64 * 2


class MessageLinks(Protocol):
    """A member's links, as messages use them: see ``native/links.hpp``."""

    def post(self, peer: int, parts: list[tuple[int, int]]) -> int: ...
    def take(self, peer: int, address: int, num_bytes: int) -> int: ...
    def flush(self, peer: int = -1) -> int: ...
    def sleep(self, seconds: float) -> int: ...
    def add_wait(self, peer: int, seconds: float) -> None: ...
    @property
    def broken(self) -> tuple[int | None, int] | None: ...


class LinkHealth(Protocol):
    """Health of a group over links, as a call that waits uses it."""

    def check(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        """Check a wait for member ``rank``; called every few milliseconds.

        Raises:
            CollectiveError: the wait makes no sense any more.
        """
        ...

    def fail(self, reason: str, rank: int | None, evidence: Evidence) -> NoReturn:
        """The call has failed, because of member ``rank``, if it is known."""
        ...

    def fail_on_bytes(self, rank: int, sent: int, expected: int) -> NoReturn:
        """Member ``rank`` sends another number of bytes than is expected here."""
        ...

    def fail_on_links(self, peer: int | None, error: int) -> NoReturn:
        """A link is broken, or all were aborted: see :class:`parallel.links.native_links.BrokenLink`."""
        ...


class Incoming:
    """A message that must come from a peer, and where its data goes."""

    def __init__(self, peer: int, address: int, num_bytes: int) -> None:
        self.peer, self.address, self.num_bytes = peer, address, num_bytes
        self.header = _Header()
        self.has_header = self.is_there = False


Outgoing = tuple[int, int, int]
"""A message for a peer: its rank, an address, and how many bytes are there."""


class Messages:
    """One member's messages to and from the others. Calls come from one thread."""

    def __init__(self, links: MessageLinks, health: LinkHealth, *, crowded: bool) -> None:
        """``crowded``: there are more members than cores."""
        self._links, self._health = links, health
        self._spin = SpinWait(crowded)
        self._posted: list[tuple[int, ctypes.Array[ctypes.c_int64]]] = []
        """Peers that something is queued for, with headers, which stay until they are sent."""

    def exchange(self, note: int, outgoing: Iterable[Outgoing], incoming: Iterable[Outgoing]) -> None:
        """Send and receive all of these at once.

        Data that is sent may be written again when this returns.

        Raises:
            CollectiveError: a member is lost, makes another call or sends another number of bytes.
        """
        for peer, address, num_bytes in outgoing:
            self.post(note, peer, address, num_bytes)
        self.take(note, [Incoming(*each) for each in incoming])
        self.finish()

    def post(self, note: int, peer: int, address: int, num_bytes: int) -> None:
        """Queue a message behind those before; its memory stays as it is until :meth:`finish`."""
        header = _Header(note, num_bytes)
        self._posted.append((peer, header))
        parts = [(ctypes.addressof(header), HEADER_BYTES), (address, num_bytes)]
        if self._links.post(peer, parts if num_bytes else parts[:1]) < 0:
            self._fail()

    def take(self, note: int, incoming: list[Incoming]) -> None:
        """Receive these messages, and send meanwhile what is queued."""
        self._wait([(each.peer, partial(self._advance, note, each)) for each in incoming])

    def finish(self) -> None:
        """Send all that is queued."""
        if self._posted:
            peers = dict.fromkeys(peer for peer, _ in self._posted)
            self._wait([(peer, partial(self._is_sent, peer)) for peer in peers])
            self._posted.clear()

    def _is_sent(self, peer: int) -> bool:
        outcome = self._links.flush(peer)
        if outcome < 0:
            self._fail()
        return outcome > 0

    def _advance(self, note: int, each: Incoming) -> bool:
        """Receive what is there of a message; True when it is all there."""
        if each.is_there:
            return True
        if not each.has_header:
            if not self._take(each.peer, ctypes.addressof(each.header), HEADER_BYTES):
                return False
            each.has_header = True
            found, num_bytes = each.header
            if found != note:
                self._health.fail(f"rank {each.peer} calls {call_of(found)}", each.peer, "closed")
            if num_bytes != each.num_bytes:
                self._health.fail_on_bytes(each.peer, num_bytes, each.num_bytes)
        each.is_there = not each.num_bytes or self._take(each.peer, each.address, each.num_bytes)
        return each.is_there

    def _take(self, peer: int, address: int, num_bytes: int) -> bool:
        outcome = self._links.take(peer, address, num_bytes)
        if outcome < 0:
            self._fail()
        return outcome > 0

    def _fail(self) -> NoReturn:
        """Raise the error of the broken links."""
        broken = self._links.broken
        assert broken is not None
        self._health.fail_on_links(*broken)

    def _wait(self, awaited: list[tuple[int, Callable[[], bool]]]) -> None:
        """Wait until each of these conditions, each of a peer, has been true once.

        Looks for a time that is learned from the last waits, offers the core meanwhile, then sleeps until
        something comes; see :mod:`parallel.rounds.waiting`.
        """
        awaited = [each for each in awaited if not each[1]()]
        if not awaited:
            return
        began, next_check = time.perf_counter(), CHECK_SECONDS
        links, spin = self._links, self._spin
        while True:
            if links.flush() < 0:
                self._fail()
            waited = time.perf_counter() - began
            if waited >= next_check:
                for peer, is_done in awaited:
                    self._health.check(peer, is_done)
                next_check = waited + CHECK_SECONDS
            missing = [each for each in awaited if not each[1]()]
            if len(missing) < len(awaited):
                for peer, is_done in awaited:
                    if (peer, is_done) not in missing:
                        links.add_wait(peer, waited)
                awaited = missing
                if not awaited:
                    break
            elif waited >= spin.budget:
                if links.sleep(max(0.0, next_check - waited)) < 0:
                    self._fail()
            elif waited >= spin.alone:
                os.sched_yield()
        spin.learn(waited)
