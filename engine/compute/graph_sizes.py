"""Row counts for which decode steps are captured (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SMALL = (1, 2, 4, 8)
STRIDE = 8
MOST_SMALL = 32
"""Rows up to which each number is captured for low latency, as in vLLM."""
MOST_ROWS = 512
"""Largest size that is captured by default.

Each takes time when an instance starts, and a step of more rows computes for so long that launching its
kernels one by one costs little.
"""


def capture_sizes(wanted: Sequence[int], max_num_seqs: int, *, each_small: bool = False) -> tuple[int, ...]:
    """Row counts to capture graphs for, ascending.

    They are those of ``wanted`` (--cudagraph-capture-sizes) that can occur. By default they are a few small
    ones and then every eighth, so that at most 7 rows of a larger step compute for no request. With
    ``each_small`` (--performance-mode interactivity) all up to :data:`MOST_SMALL` are captured.
    """
    if wanted:
        return tuple(sorted({size for size in wanted if size <= max_num_seqs}))
    most = min(max_num_seqs, MOST_ROWS)
    small = range(1, MOST_SMALL + 1) if each_small else SMALL
    sizes = {*small, *range(2 * STRIDE, most + 1, STRIDE), most}
    return tuple(sorted(size for size in sizes if size <= most))


def size_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest size for so many rows; None if they are too many."""
    index = bisect_left(sizes, num_rows)
    return sizes[index] if index < len(sizes) else None
