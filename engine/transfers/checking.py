"""Fetched blocks that are computed as well, and compared (pure).

A digest shows what a transfer did to a block, not what its source had computed. So a request of every so many
transfers takes one block less from the cache than it could, and computes that one. A block has one right
content: where the two differ, the source is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.scheduling.blocks import BlockHash, BlockPool
from engine.scheduling.request import Request

CHECK_INTERVAL = 32
"""Transfers of which one has a block checked."""


@dataclass(frozen=True)
class Check:
    """A block that was fetched, and the same one as it is computed here."""

    request: Request
    source: str
    names: Sequence[BlockHash]
    """Blocks of the transfer."""
    fetched: int
    own: int


class BlockChecks:
    """Checks of one cache; both blocks of each are held until they are compared."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._num_transfers = 0
        self._pending: list[Check] = []

    def __repr__(self) -> str:
        return f"<BlockChecks: {len(self._pending)} pending>"

    def __len__(self) -> int:
        return len(self._pending)

    def fetched(self, request: Request, source: str, names: Sequence[BlockHash]) -> None:
        """Take note of a transfer for a request, which is about to be queued."""
        self._num_transfers += 1
        if self._num_transfers % CHECK_INTERVAL or names[-1] not in request.hashes:
            return
        request.most_cached = request.hashes.index(names[-1])
        request.checked = source, names

    def admitted(self, request: Request) -> None:
        """Begin the check of a request that is in a step by now.

        Where that step does not compute all of its block, nothing is checked.
        """
        most, checked = request.most_cached, request.checked
        request.most_cached = request.checked = None
        if most is None or checked is None:
            return
        source, names = checked
        there = self._pool.find_prefix(names[-1:])
        if not there or request.num_computed < (most + 1) * self._block_size:
            return
        check = Check(request, source, names, there[0], request.blocks[most])
        if check.fetched != check.own:
            self._pool.hold([check.fetched, check.own])
            self._pending.append(check)

    def compare(self, same: Callable[[int, int], bool]) -> tuple[int, list[Check]]:
        """Compare blocks computed by the step that just ended; returns how many, and wrong ones.

        What may be wrong is forgotten: blocks of the transfer, and those computed on top of them.
        """
        pending, self._pending = self._pending, []
        wrong = [check for check in pending if not same(check.fetched, check.own)]
        for check in wrong:
            self._pool.unname([*check.names, *check.request.hashes])
        for check in pending:
            self._pool.release([check.fetched, check.own])
        return len(pending), wrong
