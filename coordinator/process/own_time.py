"""Time in which this process could hear others (pure).

A process that was stopped or had no core, or whose machine slept, finds on its return that all peers have
been silent for long. That silence is its own.
"""

from __future__ import annotations

LONGEST_GAP = 0.1
"""Maximum seconds that count between two readings; longer gaps were a stall.

The clock is read every 0.05 s, and a probe waits 0.3 s for its answer, which may lie in the queue when a
pause is over.
"""


class OwnTime:
    """Clock that stands still while its process does: gaps between readings are capped."""

    def __init__(self) -> None:
        self._read_at: float | None = None
        self._time = 0.0

    def __repr__(self) -> str:
        return f"<OwnTime {self._time:.1f} s>"

    def at(self, now: float) -> float:
        """Time of this clock at ``now``, a reading of a monotonic clock."""
        if self._read_at is not None:
            self._time += min(now - self._read_at, LONGEST_GAP)
        self._read_at = now
        return self._time
