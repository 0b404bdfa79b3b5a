"""Parts of a context by its own length, and programs that share them (pure).

Results of parts are merged in their order, so they decide bits. Programs only share them out.
"""

from __future__ import annotations

SPLIT_KEYS = 256
"""Keys of a part of a context of up to ``MOST_PARTS`` such parts.

Of longer contexts parts have twice as many, as often as it takes.
"""
MOST_PARTS = 32
"""Most parts of a context."""
PART_KEYS = 2048
"""Most keys of a program, roughly, even where the device is busy anyway.

A step lasts as long as its longest context.
"""
MOST_ROUNDS = 8
"""Most programs, as a multiple of those that keep the device busy.

Programs of shorter contexts find nothing to do, but they are launched.
"""


def most_parts(longest: int, window: int | None) -> int:
    """Most parts of a context of up to ``longest`` keys.

    They begin at multiples of their size, so that a window may reach into one more.
    """
    seen = longest if window is None else min(longest, window)
    parts = min(-(-seen // SPLIT_KEYS), MOST_PARTS)
    return max(parts if seen == longest else parts + 1, 1)


def num_splits(lines: int, seen: int, programs: int, parts: int) -> int:
    """Programs that share the parts of each context, at least one.

    Args:
        lines: queries times KV heads: programs if nothing is shared.
        seen: keys of the longest context, as far as its window reaches.
        programs: how many of them keep the device busy.
        parts: of the longest context.
    """
    lines = max(lines, 1)
    to_be_busy = programs // lines
    to_end_together = min(-(-seen // PART_KEYS), MOST_ROUNDS * programs // lines)
    return max(1, min(max(to_be_busy, to_end_together), parts))


def with_equal_parts(start: int, count: int) -> list[tuple[int, int]]:
    """Tokens from position ``start`` on, cut where the size of their contexts' parts changes."""
    found = []
    border, end = SPLIT_KEYS * MOST_PARTS, start + count
    while start < end:
        if start < border:
            stop = min(end, border)
            found.append((start, stop - start))
            start = stop
        border *= 2
    return found
