"""Checks of one cache, and what follows where a piece is wrong (pure).

Both kinds compute pieces again in steps: those of transfers (:mod:`engine.transfers.checking`), and those of
whatever requests find (:mod:`engine.transfers.spot_checks`). Where one differs, the cache forgets all names,
its source is not asked any more, and running requests are computed anew. The log lists these, and the ones
that had found it before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Set

from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request
from engine.transfers.checking import BlockChecks, Filled, nothing
from engine.transfers.recent_finds import RecentFinds, listed
from engine.transfers.sources import Sources, kind_of
from engine.transfers.spot_checks import NOBODY, SpotChecks, Verdict
from engine.transfers.totals import TransferTotals

logger = logging.getLogger(__name__)


class CacheChecks:
    """Checks of transfers and of what is found, and how an instance acts on them."""

    def __init__(
        self,
        pool: PiecePool,
        block_size: int,
        interval: int,
        sources: Sources,
        totals: TransferTotals,
        reset: Callable[[], None],
    ) -> None:
        """``interval``: pieces of which a spot check is one; 0: none. ``reset`` forgets all names."""
        self._pool = pool
        self._sources = sources
        self._totals = totals
        self._reset = reset
        self.of_transfers = BlockChecks(pool, block_size)
        self.origins = self.of_transfers.origins
        """Where fetched pieces came from."""
        self.spot_checks = SpotChecks(interval, pool, block_size, self.origins) if interval else None

    def __repr__(self) -> str:
        return f"<CacheChecks {self.of_transfers!r} {self.spot_checks!r}>"

    @property
    def is_busy(self) -> bool:
        """Whether a request is in steps whose results are compared."""
        spot_checks = self.spot_checks
        return len(self.of_transfers) > 0 or (spot_checks is not None and spot_checks.request is not None)

    def admitted(self, request: Request) -> None:
        """Begin the check of what was fetched for a request that begins to be computed."""
        self.of_transfers.admitted(request)

    def wrong_requests(self, running: Iterable[Request] = (), filled: Filled = nothing) -> list[Request]:
        """Requests to compute anew, by the checks of the step that just ended.

        They are those that were checked, and those of the ``running`` ones that hold blocks of the same
        source. ``filled``: finds the boundary pieces that the step has filled.
        """
        return [*self._wrong_fetched(running, filled), *self._wrong_found(running, filled)]

    def _wrong_fetched(self, running: Iterable[Request], filled: Filled) -> list[Request]:
        count, wrong = self.of_transfers.compare(self._sources.mover.same, filled)
        self._totals.add(checked_blocks=count, wrong_blocks=len(wrong))
        if not wrong:
            return []
        found = {check.request.key: check.request for check in wrong}
        sources = {check.source for check in wrong}
        of_source = self.origins.names(sources)
        found |= {each.key: each for each in running if not of_source.isdisjoint(each.hashes)}
        for source in sources:
            self._sources.distrust(source, "a block of it is not what was computed here", is_wrong=True)
        if self.spot_checks is not None:
            log_finds(self.spot_checks.finds, of_source)
        self._reset()  # others may have been computed on top of it, and nobody knows which
        self._sources.drop_files(wrong)
        return list(found.values())

    def _wrong_found(self, running: Iterable[Request], filled: Filled) -> list[Request]:
        """Act on a spot check; returns requests to compute anew, since they have found something."""
        verdict = self.spot_checks and self.spot_checks.compare(self._sources.mover.same, filled)
        if not verdict:
            return []
        if not verdict.is_looking:
            self._conclude(verdict)
            return []
        slots = {self._pool.slot_of(name) for name in verdict.names}
        found = [
            each
            for each in running
            if each.key[0] != NOBODY and (each.num_found or not slots.isdisjoint(each.blocks))
        ]
        logger.error(
            "a piece of the cache is not what is computed here: all is forgotten, and %d requests that found "
            "something are computed again: %s",
            len(found),
            listed(each.request_id for each in found),
        )
        self._reset()
        return found

    def forget(self) -> None:
        """End all checks without a result: what they would compare is of other weights."""
        self.of_transfers.forget()
        if self.spot_checks is not None:
            self.spot_checks.forget(searches=True)

    def drop_ended_spot_check(self, *, nothing_runs: bool) -> None:
        """End a spot check that gave way, or finds no room.

        ``nothing_runs``: no request holds a slot.
        """
        verdict = self.spot_checks and self.spot_checks.drop_ended(nothing_runs=nothing_runs)
        if verdict:
            self._conclude(verdict)

    def _conclude(self, verdict: Verdict) -> None:
        """Count a spot check; where the piece was wrong, act on its source."""
        self._totals.checked(kind_of(verdict.source), is_right=verdict.is_right)
        if not verdict.is_right:
            self._sources.blame(verdict.source, verdict.names)
            if self.spot_checks is not None:
                log_finds(self.spot_checks.finds_before, verdict.suspects)


def log_finds(finds: RecentFinds, wrong: Set[BlockHash]) -> None:
    """Log which requests have found any of these blocks, also those that have ended."""
    if found := finds.of(wrong):
        logger.error("%d requests had found it, or what stands behind it: %s", len(found), listed(found))
