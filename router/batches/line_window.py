"""Bound of what batch lines have in flight, for each instance that is ready."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time

from router.mesh import MeshFacts

LOOK_SECONDS = 0.5
"""Interval at which ready instances are counted, which takes long in a large mesh."""


class LineWindow:
    """Places for lines of all batches, or for their requests on the mesh."""

    def __init__(self, mesh: MeshFacts, per_instance: int) -> None:
        self._mesh = mesh
        self._per_instance = per_instance
        self.count = 0
        """Places that are taken."""
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        """Heap of futures by their turn, then by arrival."""
        self._arrivals = itertools.count()
        self._instances = 1
        self._look_at = 0.0
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<LineWindow {self.count} of {self.most}, {len(self._waiting)} waiting>"

    @property
    def most(self) -> int:
        """Places that there are now."""
        if (now := time.monotonic()) >= self._look_at:
            self._instances = max(1, self._mesh.instances_by_state().get("ready", 1))
            self._look_at = now + LOOK_SECONDS
        return self._per_instance * self._instances

    async def enter(self, turn: int = 0) -> None:
        """Wait for a place, which is taken then; the lowest turn gets the next one."""
        if not self._waiting and self.count < self.most:
            self.count += 1
            return
        place = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (turn, next(self._arrivals), place))
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():
                self.leave()
            raise

    async def spread(self) -> None:
        """Wait for a turn; between two turns the event loop looks after others.

        Many lines end in the same step. Making their answers at once would stop every stream meanwhile.
        """
        async with self._turn:
            await asyncio.sleep(0)

    def leave(self) -> None:
        """Give a place back; those that wait get what is free."""
        self.count -= 1
        while self._waiting and self.count < self.most:
            _, _, place = heapq.heappop(self._waiting)
            if not place.done():  # else its waiter was cancelled
                self.count += 1
                place.set_result(None)
