"""Decides when a step loop hangs: one turn took longer than any may (pure).

Where an instance computes in its own process, no other process misses a result, and its membership goes on
with signs of life. So the membership's thread looks at the loop with each of them; the loop itself only
counts its turns. (What hangs with Python's lock in its hands stops that thread, too: such an instance falls
silent, and the coordinator takes it out for that.)
"""

from __future__ import annotations

import sys
from types import FrameType

LONGEST_GAP = 2.0
"""Seconds between two looks that count at most.

When more went by, this process did not run itself (it was stopped, or its machine was), and so may have been
any step.
"""
EARLY_STEPS = 8
"""First turns, which may still compile: a prompt, single tokens, a batch."""
NUM_FRAMES = 3
"""Number of innermost frames logged to show where something hangs."""


class StepWatch:
    """Watches the turns of a step loop; used from one thread."""

    def __init__(self, limit: float, early_limit: float) -> None:
        """Seconds that a turn may take; ``early_limit``: in the first ``EARLY_STEPS`` steps."""
        self._limit = limit
        self._early_limit = max(limit, early_limit)
        self._turn = -1
        self._watched = 0.0
        """Seconds for which the turn was seen to last."""
        self._looked_at: float | None = None

    def __repr__(self) -> str:
        return f"<StepWatch turn {self._turn} for {self._watched:.1f} of {self._limit:g} s>"

    def look(self, turn: int, num_steps: int, now: float) -> float | None:
        """Seconds that this turn has taken, once that is too long. ``num_steps``: scheduled so far."""
        before, self._looked_at = self._looked_at, now
        if turn != self._turn or before is None:
            self._turn, self._watched = turn, 0.0
            return None
        self._watched += min(now - before, LONGEST_GAP)
        limit = self._limit if num_steps > EARLY_STEPS else self._early_limit
        return self._watched if self._watched > limit else None


def place_of(thread: int) -> str:
    """Stack of a thread of this process: files, lines and functions, innermost first."""
    frame: FrameType | None = sys._current_frames().get(thread)
    places: list[str] = []
    while frame is not None and len(places) < NUM_FRAMES:
        code = frame.f_code
        places.append(f"{code.co_name} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})")
        frame = frame.f_back
    return " < ".join(places) or "a thread that has ended"
