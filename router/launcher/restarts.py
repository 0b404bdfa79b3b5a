"""Restarts of processes that ended (pure): which ones, after how long, and how often."""

from __future__ import annotations

from coordinator.process import process

FIRST_DELAY = 0.5
LONGEST_DELAY = 30.0
"""Seconds before an instance is started again: the first time, and at most.

Doubled in between.
"""
LONGEST_ABSENCE = 5.0
"""Longest delay in seconds before the coordinator or a router is restarted.

They load quickly, and all others need them. They come back at once the first time, after ``FIRST_DELAY`` the
second time.
"""
STEADY = 30.0
QUICKLY_STEADY = 10.0
"""Seconds of service after which the next end counts as the first one again."""
MAX_INSTANCE_RESTARTS = 5
"""Most restarts of an instance in a row without steady service in between.

Beyond that it is left alone: the cause stays, and each try takes the memory and the time of a whole load.
"""

NOT_BY_ACCIDENT = (0, process.EXIT_USAGE, process.EXIT_REFUSED)
"""Exit statuses that a restart would not change: stopped, wrong settings, refused by the mesh."""


class Restarts:
    """Counts consecutive ends of each process, and decides on restarts."""

    def __init__(self, *, instances: bool) -> None:
        """``instances``: whether ``--restart`` was given; coordinator and routers are always started
        again."""
        self._instances = instances
        self._row: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<Restarts {self._row}>"

    def wants(self, role: str, status: int, *, wanted_its_rank: bool = False) -> bool:
        """Whether to restart a process of this role that ended with this status.

        ``status`` is negative for a signal. ``wanted_its_rank``: it was to come back under its former rank,
        which another instance may have got in the meantime. Any other rank will do.
        """
        if role != "engine":
            return True
        lost_it = wanted_its_rank and status == process.EXIT_REFUSED
        return self._instances and (lost_it or status not in NOT_BY_ACCIDENT)

    def after_end(self, key: int, role: str, served_for: float) -> float | None:
        """Seconds to wait before the next start; None when it has ended too often.

        ``served_for``: seconds of service (not of loading) before this end.
        """
        steady = STEADY if role == "engine" else QUICKLY_STEADY
        row = 0 if served_for >= steady else self._row.get(key, 0)
        if role == "engine" and row >= MAX_INSTANCE_RESTARTS:
            return None
        self._row[key] = row + 1
        if role == "engine":
            return min(FIRST_DELAY * 2.0**row, LONGEST_DELAY)
        return min(FIRST_DELAY * 2.0 ** (min(row, 10) - 1), LONGEST_ABSENCE) if row else 0.0
