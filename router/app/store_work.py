"""Work of a router that no connection ends: stored answers and batches."""

from __future__ import annotations

import asyncio

from router.batches.batch_runs import BatchRuns
from router.stored.runs import Runs


class StoreWork:
    """Runs of stored answers and of batches, with one life."""

    def __init__(self, runs: Runs, batches: BatchRuns) -> None:
        self._runs = runs
        self._batches = batches

    def __repr__(self) -> str:
        return f"<StoreWork of {self._runs!r}, {self._batches!r}>"

    async def keep(self) -> None:
        """Take over what dead routers have left, until cancelled."""
        await asyncio.gather(self._runs.keep(), self._batches.keep(self._runs.counts.store))

    async def drain(self) -> None:
        """Take over no more, and leave batches to the next owner."""
        self._runs.drain()
        await self._batches.close()

    async def drained(self) -> None:
        """Wait until every answer that this router makes has ended."""
        await self._runs.drained()

    def give_up(self) -> None:
        """Leave the answers that run to another router, or to the next start."""
        self._runs.close()
