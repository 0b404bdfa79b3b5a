"""Loans of KV blocks to other instances, as the step loop holds them (pure).

Blocks that are lent are held until the mover's :class:`.Return`; no clock ends a loan. So are the last blocks
of requests that are handed over, which go no further here.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request, RequestKey
from engine.transfers.handing_over import Find, HandOvers, Tail
from engine.transfers.lending import Key, Lookup
from engine.transfers.sources import Mover
from engine.transfers.totals import TransferTotals

LENT_PART = 4
"""Divisor of the cache: blocks that loans keep from requests, at most."""


class Loans:
    """Blocks of one cache that are lent, and requests that are handed over."""

    def __init__(self, pool: PiecePool, mover: Mover, block_size: int, totals: TransferTotals) -> None:
        self._pool = pool
        self._mover = mover
        self._totals = totals
        self._lent: dict[Key, list[int]] = {}
        self._kept: dict[Key, int] = {}
        """Number of blocks that were free before they were lent."""
        self._num_kept = 0
        self._hand_overs = HandOvers(pool, block_size)
        self._handed_over: list[RequestKey] = []

    def __repr__(self) -> str:
        return f"<Loans {len(self._lent)} lent, {self._hand_overs!r}>"

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lent, nor asked for."""
        return not self._lent and not self._hand_overs

    def lend(self, loan: Key, names: Sequence[BlockHash], being_filled: set[int]) -> None:
        """Hold the first of these blocks that are here and computed.

        Those that requests hold cost nothing. Of the others, which requests may need, loans keep a part.
        """
        blocks = self._pool.find_prefix(names)
        room = self._pool.num_blocks // LENT_PART - self._num_kept
        whole = next((index for index, block in enumerate(blocks) if block in being_filled), len(blocks))
        blocks = blocks[:whole]
        while self._pool.num_free - self._pool.num_free_beside(blocks) > max(0, room):
            blocks.pop()

        def is_computed(name: BlockHash) -> bool:
            slot = self._pool.slot_of(name)
            return slot is not None and slot not in being_filled

        blocks = blocks[: self._pool.kinds.usable_of(names, len(blocks), is_computed)]
        kept = self._pool.num_free - self._pool.num_free_beside(blocks)
        blocks += self._pool.find_boundary(names[: len(blocks)])
        self._pool.hold(blocks)
        self._num_kept += kept
        self._kept[loan] = kept
        self._lent[loan] = blocks
        self._totals.add(lent_blocks=len(blocks))
        self._mover.found(loan, blocks)

    def returned(self, loan: Key) -> None:
        """Let go of the blocks of a loan that has ended."""
        self._pool.release(self._lent.pop(loan))
        self._num_kept -= self._kept.pop(loan)

    def release_all(self) -> None:
        """Let go of all blocks: nothing is read any more."""
        for blocks in self._lent.values():
            self._pool.release(blocks)
        self._num_kept = 0
        self._kept.clear()
        self._lent.clear()
        self._hand_overs.clear()

    # ---- requests that are handed over

    def add_hand_over(self, lookup: Lookup) -> None:
        """Note that another instance asks for a request, until that is in no step."""
        self._hand_overs.add(lookup)

    def hand_over_due(self, find: Find) -> None:
        """Hand over requests that were asked for and are in no step; ``find`` finds them."""
        for loan, request, answer in self._hand_overs.due(find) if self._hand_overs else ():
            self._hand_over(loan, request, answer)

    def take_handed_over(self) -> list[RequestKey]:
        """Requests that go no further here, and are to be forgotten before the next step."""
        found, self._handed_over = self._handed_over, []
        return found

    def _hand_over(self, loan: Key, request: Request | None, answer: Tail | str) -> None:
        """Lend the last blocks of a request, which then lets go of them; or refuse."""
        if isinstance(answer, str) or request is None:
            self._mover.refuse(loan, str(answer))
            return
        if answer.has_part:
            self._pool.parts.name(answer.blocks[-1], answer.names[-1])
        self._pool.hold(answer.blocks)
        self._lent[loan], self._kept[loan] = list(answer.blocks), 0
        self._handed_over.append(request.key)
        self._totals.add(lent_blocks=len(answer.blocks))
        self._mover.handed_over(loan, answer.names, answer.blocks, has_part=answer.has_part)
