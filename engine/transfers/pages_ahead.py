"""Pages of a KV cache, made ready before a step writes to them.

A cache takes no memory until it is used. The first write to a huge page waits until the system has found and
cleared it; each tensor has pages of its own, so a step that comes to the next ones waits for all of them: 50
to 240 ms were seen. Here threads ask for them while steps are far away. One of them does it in the time that
steps leave. The other one is no nicer than steps, and has work where the first one falls behind: what it
does not do, they have to.
"""

from __future__ import annotations

import threading

from engine.host.background import NICENESS, be_nicer
from engine.transfers.block_memory import CacheMemory

HUGE = 2 << 20
"""Bytes of a huge page: what a tensor grows by at once."""
LEAST_AHEAD = 1
"""Huge pages of each tensor that are ready at least."""
MOST_AHEAD = 4
"""Huge pages of each tensor that are made ready in the time that steps leave.

At most one more is. Blocks that are fetched use them up faster than those that are computed: those of a
prompt at once.
"""


class PagesAhead:
    """Keeps pages ready for the blocks that come next, until it is closed.

    A new cache is used in the order of its blocks' numbers (:class:`engine.pieces.pool.PiecePool`).
    """

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._group = blocks_at_once(memory)
        self._num_ready = 0
        self._num_used = 0
        self._closing = False
        self._keepers = [_Keeper(self, LEAST_AHEAD, 0), _Keeper(self, MOST_AHEAD, NICENESS)]
        self.used(0)

    def __repr__(self) -> str:
        return f"<PagesAhead: {self._num_ready} of {self._memory.num_blocks} blocks>"

    @property
    def num_ready(self) -> int:
        """Blocks that have their pages, counted from the first one."""
        return self._num_ready

    def used(self, num_blocks: int) -> None:
        """Make pages ready behind the first ``num_blocks``, which were given out by now."""
        self._num_used = max(self._num_used, num_blocks)
        for keeper in self._keepers:
            if self.wanted(keeper.ahead) > self._num_ready:
                keeper.changed.set()

    def close(self) -> None:
        """End the threads; the memory may go after that."""
        self._closing = True
        for keeper in self._keepers:
            keeper.changed.set()
        for keeper in self._keepers:
            keeper.thread.join()

    def wanted(self, ahead: int) -> int:
        """Blocks that should have pages now."""
        return wanted_blocks(self._num_used, self._group, self._memory.num_blocks, ahead)

    def keep(self, ahead: int) -> bool:
        """Have pages for what is wanted; returns whether there may be more to do later."""
        while self._num_ready < (wanted := self.wanted(ahead)) and not self._closing:
            first = self._num_ready
            end = min(wanted, first + self._group)
            if not self._memory.prepare(end - first, first):
                return False  # this system cannot
            self._num_ready = max(self._num_ready, end)  # the other thread may have come further
        return not self._closing and self._num_ready < self._memory.num_blocks


class _Keeper:
    """A thread that keeps so many pages ready, with a niceness of its own."""

    def __init__(self, pages: PagesAhead, ahead: int, niceness: int) -> None:
        self.ahead = ahead
        self.changed = threading.Event()
        self._pages = pages
        self._niceness = niceness
        self.thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        be_nicer(self._niceness)
        while True:
            self.changed.wait()
            self.changed.clear()
            if not self._pages.keep(self.ahead):
                return


def blocks_at_once(memory: CacheMemory) -> int:
    """Blocks that have the same huge pages."""
    return max(1, HUGE // max(memory.block_layout, default=HUGE))


def wanted_blocks(num_used: int, group: int, num_blocks: int, ahead: int) -> int:
    """Blocks that should have pages where ``num_used`` were given out.

    ``group``: how many have the same huge pages. ``ahead``: groups that are ready at least.
    """
    return min(num_blocks, (num_used // group + ahead + 1) * group)
