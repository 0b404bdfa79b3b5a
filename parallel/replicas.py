"""Which copy of an expert serves which rows (pure; arrays, but no torch).

The rows of a step stand in a line: those of the first member, then those of the next one, as many as their
headers say. An expert with three copies cuts that line into three equal spans, and the copy on the lowest
rank serves the first. So each serves about as many rows, all members know which without a message, and the
rows of a member that holds a copy are mostly its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel.placement import Placement

Ints = npt.NDArray[np.integer[Any]]


def serving(copies: Sequence[int], place: int, total: int) -> int:
    """The rank that serves the row at a place in the line of ``total`` rows."""
    return copies[min(len(copies) - 1, place * len(copies) // max(total, 1))]


def line(sizes: Sequence[int]) -> list[int]:
    """Place of the first row of each member, then the length of the line."""
    return [0, *accumulate(sizes)]


class Replicas:
    """A placement as one rank looks it up, in arrays by layer.

    Where all layers are alike there is one.
    """

    def __init__(self, placement: Placement, rank: int) -> None:
        self.placement, self.rank = placement, rank
        layers = range(placement.num_layers or 1)
        copies = [placement.copies(layer) for layer in layers]
        self.most_copies = max(len(ranks) for layer in copies for ranks in layer)
        self.counts: Ints = np.array([[len(ranks) for ranks in layer] for layer in copies], dtype=np.int64)
        """Copies of each expert [layers, experts]."""
        self.ranks: Ints = np.array(
            [
                [[*ranks, *[ranks[-1]] * (self.most_copies - len(ranks))] for ranks in layer]
                for layer in copies
            ],
            dtype=np.int64,
        )
        """Their ranks [layers, experts, most copies], ascending."""
        self.numbers: Ints = np.array([placement.numbers_at(rank, layer) for layer in layers], dtype=np.int64)
        """Local number of each expert held here [layers, experts], or -1."""
        self.mine: list[Ints] = [
            np.array(placement.experts_of(rank, layer), dtype=np.int64) for layer in layers
        ]
        """The experts held here, by layer."""

    def __repr__(self) -> str:
        return f"<Replicas at rank {self.rank}, up to {self.most_copies} copies>"

    def row_of(self, layer: int) -> int:
        """Where the arrays have a layer."""
        return layer if len(self.counts) > 1 else 0

    def owners(self, layer: int, experts: Ints, places: Ints, total: int) -> Ints:
        """Ranks that serve rows [n], by their experts [n] and places in the line [n]."""
        at = self.row_of(layer)
        if self.most_copies == 1:
            alone: Ints = self.ranks[at, experts, 0]
            return alone
        counts = self.counts[at, experts]
        numbers = np.minimum(counts - 1, places * counts // max(total, 1))
        found: Ints = self.ranks[at, experts, numbers]
        return found


@lru_cache(maxsize=2)
def replicas_at(placement: Placement, rank: int) -> Replicas:
    """The arrays of a placement for a rank; asked for again, they are there.

    For many layers they take as long as a step, so a change of placement makes them before.
    """
    return Replicas(placement, rank)
