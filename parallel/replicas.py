"""Choice of the expert replica that serves each row (pure; numpy, no torch).

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
    """Rank that serves a row, by its place among all ``total`` rows of a step."""
    return copies[min(len(copies) - 1, place * len(copies) // max(total, 1))]


def line(sizes: Sequence[int]) -> list[int]:
    """Offset of each member's first row among all rows, then the total."""
    return [0, *accumulate(sizes)]


class Replicas:
    """Lookup arrays of an expert placement for one rank, by layer.

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
        """Ranks of each expert's copies [layers, experts, most copies], ascending."""
        self.numbers: Ints = np.array([placement.numbers_at(rank, layer) for layer in layers], dtype=np.int64)
        """Local number of each expert held here [layers, experts], or -1."""
        self.mine: list[Ints] = [
            np.array(placement.experts_of(rank, layer), dtype=np.int64) for layer in layers
        ]
        """Experts held by this rank, by layer."""

    def __repr__(self) -> str:
        return f"<Replicas at rank {self.rank}, up to {self.most_copies} copies>"

    def row_of(self, layer: int) -> int:
        """Row of a layer in the lookup arrays."""
        return layer if len(self.counts) > 1 else 0

    def owners(self, layer: int, experts: Ints, places: Ints, total: int) -> Ints:
        """Serving rank of each row [n], by its expert and its place among all rows."""
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
    """Cached lookup arrays of a placement for one rank.

    For many layers they take as long as a step, so a change of placement makes them before.
    """
    return Replicas(placement, rank)
