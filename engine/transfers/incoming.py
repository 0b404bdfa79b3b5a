"""Transfers of KV blocks to one cache, with the room they take there (pure).

Room for blocks that come belongs to their transfer until its :class:`.TransferEnded`; no clock ends that.
What came is named, and found by any request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request, RequestKey
from engine.transfers.checking import Origins
from engine.transfers.fetching import FILES, Source, TransferEnded, TransferOutcome, Wanted
from engine.transfers.lending import Key
from engine.transfers.messages import Holder
from engine.transfers.sources import MOST_SECONDS, Sources, is_dead, is_here
from engine.transfers.totals import TransferTotals

logger = logging.getLogger(__name__)

FETCHED_PART = 2
"""Divisor of the free blocks: those that one transfer may take."""
FILES_PART = 2
"""Divisor of the cache: blocks that all transfers from files take together, at most."""


@dataclass
class IncomingTransfer:
    """Blocks on their way here, and what they come for."""

    wanted: Wanted
    due_at: float = math.inf
    """When its requests wait no longer; the mover sees to that itself."""
    requests: dict[RequestKey, Request] = field(default_factory=dict)
    """Requests that wait for it."""
    copies: set[Key] = field(default_factory=set)
    """Copies of requests that run elsewhere, by the router and its number."""
    is_cancelled: bool = False
    num_came: int = 0
    """Blocks that came."""
    is_void: bool = False
    """Whether nobody may find what comes: the cache was reset meanwhile."""

    @property
    def is_wanted(self) -> bool:
        """Whether a request or a copy waits for it."""
        return bool(self.requests or self.copies)


class IncomingTransfers:
    """All transfers to one cache, and the blocks that they are written to."""

    def __init__(
        self,
        pool: PiecePool,
        sources: Sources,
        block_size: int,
        totals: TransferTotals,
        *,
        in_flight: Callable[[], set[int]],
        origins: Origins | None,
    ) -> None:
        """``in_flight``: blocks that steps under way use. ``origins``: notes where blocks came from."""
        self._pool = pool
        self._sources = sources
        self._block_size = block_size
        self._totals = totals
        self._in_flight = in_flight
        self._origins = origins
        self._transfers: dict[int, IncomingTransfer] = {}
        self._numbers = 0
        self._by_name: dict[BlockHash, IncomingTransfer] = {}
        self._estates: dict[Source, tuple[int, int, int]] = {}
        """Transfers from each dead instance so far, blocks that came, and those asked for."""

    def __repr__(self) -> str:
        return f"<IncomingTransfers: {len(self._transfers)} on the way>"

    def __len__(self) -> int:
        return len(self._transfers)

    def find(self, name: BlockHash) -> IncomingTransfer | None:
        """The transfer that brings a block."""
        return self._by_name.get(name)

    def find_copy(self, key: Key) -> IncomingTransfer | None:
        """The transfer that a copy waits for."""
        return next((each for each in self._transfers.values() if key in each.copies), None)

    # ---- begin and end

    def begin(
        self, names: Sequence[BlockHash], source: Source, *, at_any_price: bool = False
    ) -> IncomingTransfer | None:
        """Fetch the first of these blocks, as many as fit; None: nothing is fetched."""
        names = self._sources.usable(names[: self._room_for(source)], source)
        tokens = len(names) * self._block_size
        if not names or not self._sources.trusts(source):
            return None
        if not at_any_price and not self._sources.pays(source, tokens):
            return None
        room = self._take(len(names))
        if room is None:
            return None
        blocks, boundary = room
        seconds = MOST_SECONDS if at_any_price else self._sources.seconds_for(source, tokens)
        self._numbers += 1
        transfer = self._start(
            Wanted(
                self._numbers, source, names, blocks, seconds, in_background=at_any_price, boundary=boundary
            )
        )
        for name in names:
            self._by_name.setdefault(name, transfer)
        self._totals.add(queried_tokens=tokens)
        return transfer

    def take_over(
        self, last: BlockHash, room: int, source: Source, holder: Holder
    ) -> IncomingTransfer | None:
        """Have a source hand a request over, with its blocks after the ``last`` one.

        That one is here, or there is none. Returns None if there is no room for so many blocks, or if the
        source is not trusted.
        """
        taken = self._take(room) if self._sources.trusts(source) else None
        if taken is None:
            return None
        blocks, boundary = taken
        self._numbers += 1
        wanted = Wanted(self._numbers, source, [last], blocks, MOST_SECONDS, holder, boundary=boundary)
        return self._start(wanted)

    def ended(self, end: TransferEnded) -> IncomingTransfer:
        """Name the blocks that came, and give up the room of an ended transfer."""
        transfer = self._transfers.pop(end.number)
        wanted = transfer.wanted
        names, slots = self._came(wanted, end)
        num_whole = end.count - end.has_part
        transfer.num_came = sum(slot < self._pool.num_blocks for slot in slots[:num_whole])
        if not transfer.is_void:
            self._name(end, names, slots, num_whole)
        self._release_room(wanted)
        self.set_aside(transfer)
        self._count(end, transfer.num_came * self._block_size)
        if end.outcome in (TransferOutcome.WHOLE, TransferOutcome.SLOW) and wanted.holder is None:
            self._sources.fetched(end.source, end.num_bytes, end.seconds)
        if is_dead(end.source):
            self._inherited(end.source, transfer.num_came, len(wanted.names))
        return transfer

    def cancel_unwanted(self, transfer: IncomingTransfer) -> None:
        """End a transfer soon if nothing waits for it; its room stays taken until then."""
        if not transfer.is_wanted and not transfer.is_cancelled:
            transfer.is_cancelled = True
            self._sources.carrier(transfer.wanted.source).cancel(transfer.wanted.number)

    def set_aside(self, transfer: IncomingTransfer) -> None:
        """Let no further request wait for a transfer."""
        for name in transfer.wanted.names:
            if self._by_name.get(name) is transfer:
                del self._by_name[name]

    def take_overdue(self) -> list[IncomingTransfer]:
        """Transfers that have become overdue: no request waits for them from now on.

        A read may hang, and keeps its room.
        """
        found = [each for each in self._transfers.values() if self._sources.is_past(each.due_at)]
        for transfer in found:
            transfer.due_at = math.inf
            self.set_aside(transfer)
        return found

    def void(self) -> None:
        """Let nobody find what is on its way: the cache is reset."""
        for transfer in self._transfers.values():
            transfer.is_void = True
            self.set_aside(transfer)

    def forget_copies(self, peer: bytes) -> None:
        """Forget the copies of a router that is gone."""
        for transfer in self._transfers.values():
            transfer.copies = {key for key in transfer.copies if key[0] != peer}
            self.cancel_unwanted(transfer)

    def abandon(self) -> list[IncomingTransfer]:
        """Give up the room of all transfers of the mover, which has ended."""
        found = [each for each in self._transfers.values() if not is_here(each.wanted.source)]
        for transfer in found:
            self._release_room(transfer.wanted)
            self.set_aside(transfer)
            del self._transfers[transfer.wanted.number]
        return found

    # ---- helpers

    def _room_for(self, source: Source) -> int:
        room = self._pool.num_free // FETCHED_PART
        if source != FILES:
            return room
        reads = (each.wanted for each in self._transfers.values() if each.wanted.source == FILES)
        taken = sum(len(wanted.blocks) for wanted in reads)
        return max(0, min(room, self._pool.num_blocks // FILES_PART - taken))

    def _take(self, count: int) -> tuple[list[int], list[int]] | None:
        """Free blocks that no step touches, and slots for the boundary pieces behind them.

        None: too few are free.

        Workers may still compute a step for a request that was aborted meanwhile, whose blocks are free.
        Later steps are computed behind it, but what comes from elsewhere is written at once.
        """
        boundary = self._pool.take_boundary()
        blocks = None if boundary is None else self._pool.take(count)
        if boundary is None or blocks is None or not self._in_flight().isdisjoint([*blocks, *boundary]):
            self._pool.release([*(blocks or ()), *(boundary or ())])
            return None
        return blocks, boundary

    def _release_room(self, wanted: Wanted) -> None:
        self._pool.release([*wanted.blocks, *wanted.boundary])

    def _came(self, wanted: Wanted, end: TransferEnded) -> tuple[Sequence[BlockHash], Sequence[int]]:
        """Names and slots of a transfer's pieces, in the order of their arrival."""
        if end.slots or wanted.holder:
            return end.names, end.slots or wanted.blocks
        return self._pool.kinds.placed(wanted.names, wanted.blocks, wanted.boundary)

    def _start(self, wanted: Wanted) -> IncomingTransfer:
        due_at = self._sources.due_at(wanted.source, wanted.seconds)
        self._transfers[wanted.number] = transfer = IncomingTransfer(wanted, due_at)
        self._sources.carrier(wanted.source).fetch(wanted)
        return transfer

    def _name(
        self, end: TransferEnded, names: Sequence[BlockHash], slots: Sequence[int], num_whole: int
    ) -> None:
        for slot, name in zip(slots[:num_whole], names, strict=False):
            self._pool.name(slot, name)
            if self._origins is not None and self._pool.slot_of(name) == slot:
                self._origins.came(name, end.source)
        if end.has_part:
            self._pool.parts.name(slots[num_whole], names[num_whole])

    def _count(self, end: TransferEnded, tokens: int) -> None:
        self._totals.add(
            fetched_tokens=tokens,
            inherited_tokens=tokens if is_dead(end.source) else 0,
            fetched_bytes=end.num_bytes,
            fetch_seconds=end.seconds,
            wrong_blocks=end.outcome is TransferOutcome.WRONG,
        )
        self._totals.ended(end.outcome)

    def _inherited(self, source: Source, count: int, asked: int) -> None:
        """Log what a dead instance left, once all that is wanted of it has come."""
        before = self._estates.pop(source, (0, 0, 0))
        now = before[0] + 1, before[1] + count, before[2] + asked
        if any(each.wanted.source == source for each in self._transfers.values()):
            self._estates[source] = now
        else:
            logger.info("%d requests inherit %d of %d KV blocks of a dead instance", *now)
