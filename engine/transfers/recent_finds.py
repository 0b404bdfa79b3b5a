"""Requests that found pieces in the cache of late, for the log (pure)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Set

from engine.pieces.pool import BlockHash

MOST_REMEMBERED = 1 << 16
"""Blocks, of all requests that are remembered for having found them."""
MOST_LISTED = 100
"""Requests that a line of the log names."""


class RecentFinds:
    """What requests have found lately; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._finds: deque[tuple[str, list[BlockHash]]] = deque()
        self._num_blocks = 0

    def __repr__(self) -> str:
        return f"<RecentFinds of {len(self._finds)} requests>"

    def add(self, request_id: str, names: list[BlockHash]) -> None:
        """Remember that a request has found these blocks."""
        self._finds.append((request_id, names))
        self._num_blocks += len(names)
        while self._num_blocks > MOST_REMEMBERED:
            self._num_blocks -= len(self._finds.popleft()[1])

    def of(self, names: Set[BlockHash]) -> list[str]:
        """Requests that have found any of these blocks."""
        return list(dict.fromkeys(each for each, found in self._finds if not names.isdisjoint(found)))


def listed(request_ids: Iterable[str]) -> str:
    """Requests for a line of the log, which names the first ones."""
    found = list(request_ids)
    more = len(found) - MOST_LISTED
    return ", ".join(found[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")
