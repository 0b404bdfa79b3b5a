"""Grid of positions at which recurrent states are kept, and its cells (no torch)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

LABEL = "recurrent state"
"""Word for this kind of piece, in names and in logs."""
GRID = 64
"""Tokens between two states that torch's modules keep, by absolute position: bits depend on it."""
NATIVE_GRID = 16
"""The same of the native kernels (``GRID`` in ``engine/kernels/states/state.hpp``)."""


class Cell(NamedTuple):
    """Tokens of one cell of the grid, as indices behind a boundary."""

    begin: int
    end: int

    @property
    def is_whole(self) -> bool:
        """Whether the cell ends here, so that the state behind it is kept."""
        return self.end - self.begin == GRID


def boundary_of(position: int, grid: int = GRID) -> int:
    """The last boundary at or before a position."""
    return position - position % grid


def cells(count: int) -> Iterator[Cell]:
    """Cells of the first ``count`` tokens behind a boundary."""
    for begin in range(0, count, GRID):
        yield Cell(begin, min(begin + GRID, count))
