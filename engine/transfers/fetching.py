"""The taker's side of transfers (pure: no sockets; time is an argument).

Events in, actions out. Blocks arrive in order. Each is checked by its digest before it is written; what is
late, torn or wrong is dropped, and ends the transfer: the blocks before it are right, the rest is computed.
A transfer also ends when its source refuses, breaks its connection or sends nothing for a while. Its room in
the cache belongs to it until :class:`TransferEnded`, and to nobody here after that.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from engine.pieces.kinds import BLOCKS_ONLY, PieceKinds
from engine.pieces.pool import BlockHash
from engine.transfers.messages import (
    DIGEST_BYTES,
    BlockPiece,
    Enough,
    Held,
    Holder,
    Lent,
    LoanRefused,
    LoanRequest,
    ToTaker,
    WindowGrant,
    digest_of,
    digest_of_part,
    joined,
    split,
)

WINDOW = 8
"""Pieces on the way at once."""
COPY_WINDOW = 1
"""Those of a copy, for which nobody waits.

A request that is handed over comes over the same connection, behind what is on the way.
"""
MOST_ASKED = 4
"""Transfers from one source at once; the others wait for their turn."""
STALL = 1.0
"""Seconds without anything new from a source after which its transfer ends."""

Source = str
"""Address of a source."""
FILES: Source = "files"
"""The files of the tier as a source; no address is like this."""
DEAD = "memory:"
"""What the address of a dead instance's memory begins with (:mod:`engine.inheritance`)."""


class TransferOutcome(enum.StrEnum):
    """How a transfer ended: the label of the metric."""

    WHOLE = "whole"
    """All that the source lent has come."""
    ABSENT = "absent"
    """The source has none of the blocks."""
    REFUSED = "refused"
    LOST = "lost"
    """The connection broke, or there was none in time."""
    SLOW = "slow"
    """The source sent nothing for a while, or would take longer than computing."""
    WRONG = "wrong"
    """A digest was not that of the bytes."""
    CANCELLED = "cancelled"
    """Nobody waits for it any more."""


@dataclass(frozen=True)
class Wanted:
    """Order for a transfer: which blocks come, where from, and where they go."""

    number: int
    source: Source
    names: Sequence[BlockHash]
    blocks: Sequence[int]
    """Where each of them goes."""
    seconds: float
    """Most that it may take."""
    holder: Holder | None = None
    """A request that its source is to hand over.

    ``names`` is then the last of its blocks that are here.
    """
    in_background: bool = False
    """Whether nobody waits for it: it leaves the way free for others."""
    boundary: Sequence[int] = ()
    """Where the boundary pieces go that stand behind the last block, whichever that is."""


@dataclass(frozen=True)
class SendToSource:
    """Send a message to a source; where there is no connection, nothing."""

    source: Source
    message: LoanRequest | WindowGrant | Enough


@dataclass(frozen=True)
class Write:
    """Put checked bytes into a block."""

    block: int
    data: memoryview


@dataclass(frozen=True)
class TransferEnded:
    """A transfer is over; its first ``count`` blocks are right."""

    number: int
    count: int
    outcome: TransferOutcome
    source: Source
    num_bytes: int
    seconds: float
    """From the question to the end."""
    for_good: bool = False
    """Whether the source would refuse, or be wrong, again."""
    names: Sequence[BlockHash] = ()
    """Names of the blocks that came, where the source had to tell them."""
    has_part: bool = False
    """Whether the last of these is partly filled."""
    slots: Sequence[int] = ()
    """Slots of the ``names``, where the transfer has room for boundary pieces.

    Else they are in its blocks, in order.
    """
    was_lent: bool = False
    """Whether the source answered that it lends.

    A request to hand over goes no further there.
    """


Action = SendToSource | Write | TransferEnded


@dataclass
class _Fetch:
    wanted: Wanted
    began_at: float
    """When its turn came, or it was begun."""
    heard_at: float
    is_asked: bool = False
    has_turn: bool = False
    lent: int | None = None
    """Blocks that come; None while the source has not answered."""
    count: int = 0
    """Blocks that have come."""
    num_bytes: int = 0
    names: Sequence[BlockHash] = ()
    """Names of the pieces that come."""
    slots: Sequence[int] = ()
    """Where they go."""
    has_part: bool = False
    parts: bytearray = field(default_factory=bytearray)
    """Bytes that have come of the next piece, where it comes in parts."""


class Fetcher:
    """State of all transfers to one cache: turns, windows, digests, time limits."""

    def __init__(
        self, identity: str, bytes_of: Callable[[int], int], kinds: PieceKinds = BLOCKS_ONLY
    ) -> None:
        """``bytes_of``: bytes of the piece in a slot."""
        self._identity = identity
        self._bytes_of = bytes_of
        self._kinds = kinds
        self._fetches: dict[int, _Fetch] = {}

    def __repr__(self) -> str:
        return f"<Fetcher of {len(self._fetches)} transfers>"

    def __len__(self) -> int:
        return len(self._fetches)

    def due(self, now: float) -> list[tuple[int, Source]]:
        """Transfers whose turn it is, and whose source was not asked yet."""
        found = []
        turns = Counter(each.wanted.source for each in self._fetches.values() if each.has_turn)
        for number, fetch in self._fetches.items():
            source = fetch.wanted.source
            if not fetch.has_turn and turns[source] < MOST_ASKED:
                turns[source] += 1
                fetch.has_turn, fetch.began_at, fetch.heard_at = True, now, now
            if fetch.has_turn and not fetch.is_asked:
                found.append((number, source))
        return found

    def begin(self, wanted: Wanted, now: float) -> None:
        """Take up a transfer, which waits for its turn and a connection: see :meth:`due`."""
        assert wanted.number not in self._fetches
        names = () if wanted.holder else wanted.names
        self._fetches[wanted.number] = _Fetch(wanted, now, now, names=names)

    def ask(self, number: int) -> LoanRequest:
        """Request for a loan, as it is sent to a source."""
        wanted = self._fetches[number].wanted
        room = len(wanted.blocks) + len(wanted.boundary) if wanted.holder else 0
        window = COPY_WINDOW if wanted.in_background else WINDOW
        return LoanRequest(number, self._identity, joined(wanted.names), window, wanted.holder, room)

    def asked(self, number: int) -> None:
        """Record that the request for a loan was sent."""
        self._fetches[number].is_asked = True

    def cancel(self, number: int, now: float) -> list[Action]:
        """Cancel a transfer that nothing waits for; harmless if it has ended."""
        fetch = self._fetches.get(number)
        return [] if fetch is None else self._end(fetch, TransferOutcome.CANCELLED, now)

    def received(self, source: Source, message: ToTaker, now: float) -> list[Action]:
        """Act on a message; one for a transfer that is over is dropped.

        A source that still waits for such a one is answered: its connection broke and was made again before
        that was noticed here, so it was never sent :class:`.Enough`.
        """
        fetch = self._fetches.get(message.number)
        if fetch is None and isinstance(message, Held):
            return [SendToSource(source, Enough(message.number))]
        if fetch is None or fetch.wanted.source != source or not fetch.is_asked:
            return []
        match message:
            case Lent():
                return self._lent(fetch, message, now)
            case BlockPiece():
                return self._piece(fetch, message, now)
            case LoanRefused():
                return self._end(fetch, TransferOutcome.REFUSED, now, for_good=message.for_good)
            case Held():
                return []  # a sign of life, but nothing new: it is waited for no longer

    def broke(self, source: Source, now: float) -> list[Action]:
        """End the transfers that were asked for over a connection that broke."""
        return [
            action
            for fetch in list(self._fetches.values())
            if fetch.wanted.source == source and fetch.is_asked
            for action in self._end(fetch, TransferOutcome.LOST, now)
        ]

    def look(self, now: float) -> list[Action]:
        """End transfers that take too long, or bring nothing for a while."""
        return [
            action
            for fetch in list(self._fetches.values())
            if fetch.has_turn and now > min(fetch.heard_at + STALL, fetch.began_at + fetch.wanted.seconds)
            for action in self._end(
                fetch, TransferOutcome.SLOW if fetch.is_asked else TransferOutcome.LOST, now
            )
        ]

    # ---- helpers

    def _lent(self, fetch: _Fetch, lent: Lent, now: float) -> list[Action]:
        count, wanted = lent.count, fetch.wanted
        names = split(lent.names) if wanted.holder else self._kinds.names_of(wanted.names, count)
        num_blocks = max(0, count - len(wanted.boundary))
        if fetch.lent is not None or count > len(names) or num_blocks > len(wanted.blocks):
            return self._end(fetch, TransferOutcome.WRONG, now, for_good=True)
        fetch.slots = [*wanted.blocks[:num_blocks], *wanted.boundary]
        fetch.lent, fetch.heard_at, fetch.names, fetch.has_part = count, now, names, lent.has_part
        return [] if count else self._end(fetch, TransferOutcome.ABSENT, now)

    def _piece(self, fetch: _Fetch, piece: BlockPiece, now: float) -> list[Action]:
        digests = split(piece.digests, DIGEST_BYTES)
        end = piece.first + len(digests)
        is_next = fetch.lent is not None and piece.first == fetch.count and end <= fetch.lent
        sizes = [self._bytes_of(slot) for slot in fetch.slots[piece.first : end]]
        if is_next and len(sizes) == 1 and len(piece.data) < sizes[0]:
            return self._part(fetch, piece, sizes[0], now)
        if not is_next or len(piece.data) != sum(sizes) or fetch.parts:
            return self._end(fetch, TransferOutcome.WRONG, now, for_good=True)
        actions: list[Action] = []
        data = memoryview(piece.data)
        for digest, size in zip(digests, sizes, strict=True):
            block, data = data[:size], data[size:]
            if digest_of(self._identity, fetch.names[fetch.count], block) != digest:
                return [*actions, *self._end(fetch, TransferOutcome.WRONG, now, for_good=True)]
            actions.append(Write(fetch.slots[fetch.count], block))
            fetch.count += 1
        return self._go_on(fetch, len(piece.data), actions, now)

    def _part(self, fetch: _Fetch, piece: BlockPiece, size: int, now: float) -> list[Action]:
        """Take in a part of a piece, which is written once it is whole."""
        name, end = fetch.names[fetch.count], piece.offset + len(piece.data)
        digest = digest_of_part(self._identity, name, piece.offset, piece.data)
        if piece.offset != len(fetch.parts) or not piece.data or end > size or digest != piece.digests:
            return self._end(fetch, TransferOutcome.WRONG, now, for_good=True)
        fetch.parts += piece.data
        actions: list[Action] = []
        if end == size:
            actions.append(Write(fetch.slots[fetch.count], memoryview(fetch.parts)))
            fetch.parts = bytearray()
            fetch.count += 1
        return self._go_on(fetch, len(piece.data), actions, now)

    def _go_on(self, fetch: _Fetch, num_bytes: int, actions: list[Action], now: float) -> list[Action]:
        """Have the next piece sent behind one that was right, or end the transfer."""
        wanted = fetch.wanted
        fetch.heard_at = now
        fetch.num_bytes += num_bytes
        if fetch.count == fetch.lent:
            return [*actions, *self._end(fetch, TransferOutcome.WHOLE, now)]
        return [*actions, SendToSource(wanted.source, WindowGrant(wanted.number, 1))]

    def _end(
        self, fetch: _Fetch, outcome: TransferOutcome, now: float, *, for_good: bool = False
    ) -> list[Action]:
        wanted = fetch.wanted
        del self._fetches[wanted.number]
        seconds = now - fetch.began_at
        ended = TransferEnded(
            wanted.number, fetch.count, outcome, wanted.source, fetch.num_bytes, seconds, for_good
        )
        if wanted.holder:
            whole = fetch.has_part and fetch.count == fetch.lent
            names = fetch.names[: fetch.count]
            ended = replace(ended, names=names, has_part=whole, was_lent=fetch.lent is not None)
        if wanted.boundary:
            ended = replace(ended, names=fetch.names[: fetch.count], slots=fetch.slots[: fetch.count])
        ended_there = (TransferOutcome.WHOLE, TransferOutcome.LOST, TransferOutcome.REFUSED)
        is_open = fetch.is_asked and outcome not in ended_there
        return [SendToSource(wanted.source, Enough(wanted.number)), ended] if is_open else [ended]
