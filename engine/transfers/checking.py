"""Self-check: some fetched blocks are computed as well, and compared (pure).

A digest shows what a transfer did to a block, not what its source had computed. So a request of every so many
transfers takes one block less from the cache than it could, and computes that one. A block has one right
content: where the two differ, the source is wrong. Files may be of anybody, so the first blocks that are read
from them are checked as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request
from engine.transfers.fetching import FILES, Source

CHECK_INTERVAL = 32
"""Transfers of which one has a block checked."""


@dataclass(frozen=True)
class BlockCheck:
    """A fetched block, and the same one as it is computed here."""

    request: Request
    source: Source
    names: Sequence[BlockHash]
    """Blocks of the transfer."""
    fetched: int
    own: int


class Origins:
    """Source of each fetched block: an :class:`engine.pieces.pool.Observer` of a cache.

    Blocks that were computed here have no origin.
    """

    def __init__(self) -> None:
        self._source_of: dict[BlockHash, Source] = {}

    def __repr__(self) -> str:
        return f"<Origins of {len(self._source_of)} blocks>"

    def __len__(self) -> int:
        return len(self._source_of)

    def came(self, name: BlockHash, source: Source) -> None:
        """Record that a block, which the cache has by now, came from a source."""
        self._source_of[name] = source

    def stored(self, block_hash: BlockHash) -> None:
        """Ignore a new block: it has no source before :meth:`came`."""

    def dropped(self, block_hash: BlockHash) -> None:
        """Forget the source of a block that the cache has dropped."""
        self._source_of.pop(block_hash, None)

    def names(self, sources: Iterable[Source]) -> set[BlockHash]:
        """Names of the cache's blocks that came from some sources."""
        wanted = set(sources)
        return {name for name, source in self._source_of.items() if source in wanted}


class BlockChecks:
    """Checks of one cache; both blocks of each are held until they are compared."""

    def __init__(self, pool: PiecePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self.origins = Origins()
        """Where fetched blocks came from."""
        pool.observe(self.origins)
        self._num_transfers = 0
        self._files_are_new = True
        """Whether no block of a file was checked yet."""
        self._pending: list[BlockCheck] = []

    def __repr__(self) -> str:
        return f"<BlockChecks: {len(self._pending)} pending>"

    def __len__(self) -> int:
        return len(self._pending)

    def fetched(self, request: Request, source: Source, names: Sequence[BlockHash]) -> None:
        """Note a transfer for a request, which is about to be queued."""
        self._num_transfers += 1
        is_due = self._num_transfers % CHECK_INTERVAL == 0 or (source == FILES and self._files_are_new)
        if not is_due or names[-1] not in request.hashes:
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
        there = self._pool.slot_of(names[-1])
        if there is None or request.num_computed < (most + 1) * self._block_size:
            return
        check = BlockCheck(request, source, names, there, request.blocks[most])
        if check.fetched != check.own:
            self._pool.hold([check.fetched, check.own])
            self._pending.append(check)
            self._files_are_new &= source != FILES

    def compare(self, same: Callable[[int, int], bool]) -> tuple[int, list[BlockCheck]]:
        """Compare blocks computed by the step that just ended; returns how many, and wrong ones."""
        pending, self._pending = self._pending, []
        wrong = [check for check in pending if not same(check.fetched, check.own)]
        for check in pending:
            self._pool.release([check.fetched, check.own])
        return len(pending), wrong
