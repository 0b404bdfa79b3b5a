"""What caches dropped, and how much of it was computed again (pure).

A block that is computed in a full cache takes the place of another one. What that costs depends on whether
the other one is wanted again: nothing where old answers are dropped, its tokens once more where caches are
too small for what is asked for. So the part of dropped blocks that come back is measured, as memory managers
measure refaults (the ghost lists of ARC: Megiddo and Modha, 2003; Linux's workingset detection).
"""

from __future__ import annotations

WINDOW = 1024.0
"""Dropped blocks after which what was before counts a third."""
DOUBT = 64.0
"""Dropped blocks that are taken to be unwanted before any was seen."""
MAX_SHARE = 0.8
"""A share nearer to 1 is not told from 1, where dropping would have no end."""


class Evictions:
    """Remembers the blocks that nobody holds any more, at most as many as somebody holds: caches of twice the
    size would still have them. The oldest are forgotten first."""

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
        """Of the blocks dropped lately, those that were computed again."""
        return min(MAX_SHARE, self._wanted / self._dropped)

    def dropped(self, block: int, num_held: int) -> None:
        """The last holder of a block has dropped it; so many others are held."""
        left = 1 - 1 / WINDOW
        self._dropped = self._dropped * left + 1
        self._wanted *= left
        self._gone[block] = None
        while len(self._gone) > num_held:
            del self._gone[next(iter(self._gone))]

    def computed(self, block: int) -> None:
        """Somebody has a block that nobody had."""
        if block in self._gone:
            del self._gone[block]
            self._wanted += 1

    def found(self, block: int) -> None:
        """Somebody turned out to have had a block all the time."""
        self._gone.pop(block, None)
