"""For which numbers of rows decode steps are captured (pure)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SMALL = (1, 2, 4, 8)
STRIDE = 8
MOST_ROWS = 512
"""Of sizes that nobody asked for: each takes time when an instance starts, and a step of more rows computes
for so long that launching its kernels one by one costs little."""


def capture_sizes(wanted: Sequence[int], max_num_seqs: int) -> tuple[int, ...]:
    """Rising. As ``wanted`` (--cudagraph-capture-sizes), those that can occur; or, if none are, a few small
    ones and then every eighth, so that at most 7 rows of a larger step compute for nobody."""
    if wanted:
        return tuple(sorted({size for size in wanted if size <= max_num_seqs}))
    most = min(max_num_seqs, MOST_ROWS)
    sizes = {*SMALL, *range(2 * STRIDE, most + 1, STRIDE), most}
    return tuple(sorted(size for size in sizes if size <= most))


def size_for(num_rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest that so many rows fit into; None: too many, compute them without a graph."""
    place = bisect_left(sizes, num_rows)
    return sizes[place] if place < len(sizes) else None
