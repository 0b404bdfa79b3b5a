"""Pages of a KV cache, made ready before a step writes to them.

A cache takes no memory until it is used. The first write to a huge page waits until the system has found and
cleared it; each tensor has pages of its own, so a step that comes to the next ones waits for all of them: 50
to 120 ms were seen. Here a thread asks for them while steps are far away. It is no nicer than steps: what it
does not do, they have to.
"""

from __future__ import annotations

import threading

from engine.transfers.block_memory import CacheMemory

HUGE = 2 << 20
"""Bytes of a huge page: what a tensor grows by at once."""
LEAST_AHEAD = 2
"""Huge pages of each tensor that are ready at least; at most one more is.

Blocks that are fetched use them up faster than those that are computed.
"""


class PagesAhead:
    """Keeps pages ready for the blocks that come next, until it is closed.

    A new cache is used in the order of its blocks' numbers (:class:`engine.scheduling.blocks.BlockPool`).
    """

    def __init__(self, memory: CacheMemory) -> None:
        self._memory = memory
        self._ahead = max(1, HUGE // max(memory.layout))
        """Blocks that have their pages at once."""
        self._num_ready = 0
        self._num_wanted = 0
        self._changed = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kv-pages", daemon=True)
        self._thread.start()
        self.used(0)

    def __repr__(self) -> str:
        return f"<PagesAhead: {self._num_ready} of {self._memory.num_blocks} blocks>"

    @property
    def num_ready(self) -> int:
        """Blocks that have their pages, counted from the first one."""
        return self._num_ready

    def used(self, num_blocks: int) -> None:
        """Have pages for more than the first ``num_blocks``, which were given out by now."""
        wanted = wanted_blocks(num_blocks, self._ahead, self._memory.num_blocks)
        if wanted > self._num_wanted:
            self._num_wanted = wanted
            self._changed.set()

    def close(self) -> None:
        """End the thread; its memory may go after that."""
        self._closing = True
        self._changed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            while self._num_ready < self._num_wanted and not self._closing:
                end = min(self._num_wanted, self._num_ready + self._ahead)
                if not self._memory.prepare(end - self._num_ready, self._num_ready):
                    return  # this system cannot
                self._num_ready = end
            if self._closing or self._num_ready == self._memory.num_blocks:
                return


def wanted_blocks(num_used: int, ahead: int, num_blocks: int) -> int:
    """Blocks that should have pages where ``num_used`` were given out.

    ``ahead``: how many have the same huge pages.
    """
    return min(num_blocks, (num_used // ahead + LEAST_AHEAD + 1) * ahead)
