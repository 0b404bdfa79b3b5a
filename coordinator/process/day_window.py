"""Count of the last 24 hours, from a total that grows (pure)."""

from __future__ import annotations

from collections import deque

DAY = 86_400.0
"""Seconds that count."""
GRAIN = 900.0
"""Least seconds between two remembered totals."""


class DayWindow:
    """Remembers a total that began at 0, every quarter of an hour."""

    def __init__(self) -> None:
        self._totals: deque[tuple[float, int]] = deque()
        """Times and totals of the last day, and one older pair."""

    def __repr__(self) -> str:
        return f"<DayWindow of {len(self._totals)} totals>"

    def count(self, total: int, now: float) -> int:
        """The part that was counted in the last day; ``now`` in seconds."""
        if not self._totals or now - self._totals[-1][0] >= GRAIN:
            self._totals.append((now, total))
        while len(self._totals) > 1 and self._totals[1][0] <= now - DAY:
            self._totals.popleft()
        at, before = self._totals[0]
        return total - before if at <= now - DAY else total
