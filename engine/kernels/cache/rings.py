"""Choice of the rings of open rows that a step reads and fills (pure).

Each request has two rings, one cell of the grid each. A row that ends in the cell in which it began adds to
the ring of that cell. One that goes on into other cells leaves the rows of the last cell in the other ring.
So whatever it read is there still, and the step can run again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.states.grid import NATIVE_GRID, boundary_of
from engine.states.held import RowBoundaries
from engine.step import RowPieces

NUM_RINGS = 2
"""Rings of a request."""


class NativeRow(NamedTuple):
    """What a row of a step reads and keeps."""

    reads: int | None
    """Slot of the state at the row's boundary; None: a context's beginning."""
    rings: tuple[int, int]
    """Numbers of the rings of its first cell, and of the others."""
    num_open: int
    fills: dict[int, int]
    """Slots to fill, by position."""
    start: int
    end: int


@dataclass
class _Ring:
    """Open rows from a boundary on."""

    boundary: int = 0
    end: int = 0
    """Position behind the last row of it that is right in all layers."""


class RequestRings:
    """Rings of one request, and the boundaries that its rows may begin from."""

    def __init__(self) -> None:
        self._boundaries = RowBoundaries()
        self._rings = [_Ring() for _ in range(NUM_RINGS)]

    def __repr__(self) -> str:
        return f"<RequestRings {self._rings}>"

    def admit(self, num_equal: int) -> None:
        """Another request is here, whose first ``num_equal`` tokens are those of the one before."""
        self._boundaries = RowBoundaries()
        for ring in self._rings:
            ring.end = max(ring.boundary, min(ring.end, num_equal))

    def begin(self, start: int, count: int, pieces: RowPieces | None) -> NativeRow:
        """Begin a row. Nothing is kept from its start on until it has :meth:`ended`.

        Raises:
            RuntimeError: what is kept does not reach its start.
        """
        boundary, reads, fills = self._boundaries.begin(start, pieces)
        end = start + count
        first = self._ring_of(boundary, start)
        if boundary != boundary_of(start, NATIVE_GRID) or first is None:
            raise RuntimeError(f"no rows of layers with a state are kept from {boundary} to {start}")
        last = boundary_of(end, NATIVE_GRID)
        if last > boundary and last not in fills:
            raise RuntimeError(f"no slot for the state at {last}, which a row from {start} to {end} passes")
        others = first if last == boundary else 1 - first
        self._rings[others] = _Ring(last, last)
        self._rings[first] = _Ring(boundary, start)
        return NativeRow(reads, (first, others), start - boundary, fills, start, end)

    def ended(self, row: NativeRow) -> None:
        """The row's step has come to its end in all layers."""
        self._rings[row.rings[1]].end = row.end

    def _ring_of(self, boundary: int, start: int) -> int | None:
        """The ring with the rows up to a row's start; any where there are none."""
        for number, ring in enumerate(self._rings):
            if ring.boundary == boundary and ring.end >= start:
                return number
        return 0 if start == boundary else None
