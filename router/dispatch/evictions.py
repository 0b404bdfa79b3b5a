"""Estimate of how many evicted blocks are computed again (pure).

A block that is computed in a full cache takes the place of another one. What that costs depends on whether
the other one is wanted again: nothing where old answers are dropped, its tokens once more where caches are
too small for what is asked for. So the part of dropped blocks that come back is measured, as memory managers
measure refaults (the ghost lists of ARC: Megiddo and Modha, 2003; Linux's workingset detection).
"""

from __future__ import annotations

WINDOW = 1024.0
"""Dropped blocks after which older ones weigh a third."""
DOUBT = 64.0
"""Dropped blocks that count as unwanted before any was seen."""
MAX_SHARE = 0.8
"""Upper bound of the share of dropped blocks that are computed again.

At 1 the cost of dropping would be infinite; a measured share nearer to 1 cannot be distinguished from it.
"""


class Evictions:
    """Memory of the blocks that no instance holds any more, the oldest forgotten first.

    It remembers at most as many as are held now: caches of twice the size would still have them.
    """

    def __init__(self) -> None:
        self._gone: dict[int, None] = {}
        self._dropped = DOUBT
        self._wanted = 0.0

    def __repr__(self) -> str:
        return f"<Evictions {len(self._gone)} remembered, {self.share:.2f} of the dropped came back>"

    def __len__(self) -> int:
        return len(self._gone)

    @property
    def share(self) -> float:
        """Share of the lately dropped blocks that were computed again."""
        return min(MAX_SHARE, self._wanted / self._dropped)

    def dropped(self, block: int, num_held: int) -> None:
        """Record that the last holder of a block dropped it, with ``num_held`` others held."""
        left = 1 - 1 / WINDOW
        self._dropped = self._dropped * left + 1
        self._wanted *= left
        self._gone[block] = None
        while len(self._gone) > num_held:
            del self._gone[next(iter(self._gone))]

    def computed(self, block: int) -> None:
        """Record that an instance computed a block that no instance had."""
        if block in self._gone:
            del self._gone[block]
            self._wanted += 1

    def found(self, block: int) -> None:
        """Record that an instance had a block all the time."""
        self._gone.pop(block, None)
