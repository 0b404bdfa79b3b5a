"""Grid of positions at which recurrent states are kept, and its cells (no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

GRID = 64
"""Tokens between two kept states: a constant, by absolute position, on which bits depend."""


class Cell(NamedTuple):
    """Tokens of one cell of the grid, as indices behind a boundary."""

    begin: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether the cell ends here, so that the state behind it is kept."""
        return self.end - self.begin == GRID


def boundary_of(position: int) -> int:
    """The last boundary at or before a position."""
    return position - position % GRID


def cells(count: int) -> Iterator[Cell]:
    """Cells of the first ``count`` tokens behind a boundary."""
    for begin in range(0, count, GRID):
        yield Cell(begin, min(begin + GRID, count))
