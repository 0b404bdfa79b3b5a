"""Number of parts of each context in a decode step, one program each (pure)."""

from __future__ import annotations

SPLIT_KEYS = 256
"""Least keys of a part of the longest context."""
PART_KEYS = 2048
"""Most keys of a part, roughly, even where the device is busy anyway.

A step lasts as long as its longest context.
"""
MOST_SPLITS = 32
MOST_ROUNDS = 8
"""Most programs, as a multiple of those that keep the device busy.

Programs of shorter contexts find nothing to do, but they are launched, and all of them have room for results.
"""


def num_splits(lines: int, seen: int, programs: int) -> int:
    """Parts of each context, at least one.

    Args:
        lines: queries times KV heads: programs if nothing is cut.
        seen: keys of the longest context, as far as its window reaches.
        programs: how many of them keep the device busy.
    """
    lines = max(lines, 1)
    to_be_busy = programs // lines
    to_end_together = min(-(-seen // PART_KEYS), MOST_ROUNDS * programs // lines)
    return max(1, min(max(to_be_busy, to_end_together), seen // SPLIT_KEYS, MOST_SPLITS))
