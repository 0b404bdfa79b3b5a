"""Sums over the ranks of a tensor-parallel group, in the middle of a step.

Each rank's attention and MLPs give partial sums in float32. Where the ranks share memory, each writes its own
into its arena and counts one up, waits for the others, and adds all up in the order of the ranks, so that
all have the same bits: as much as an all-reduce, inside of the list of operations. Over other transports the
list is cut there, and the communicator adds up.

The bits do not depend on the number of ranks, within limits (:func:`parallel.parts.is_order_fixed`). The
inputs of such a product are split into parts (:mod:`parallel.parts`). Each part is added up by itself, then
neighbours are added: (0 + 1) + (2 + 3). So two ranks add up halves of that, and four ranks one part each;
what they give is added up in the same order.

What a rank gave is read by the others until they give for the next sum. So the same memory may be written
for the sum after that: two areas in turn would do, if steps had an even number of sums. Where it is odd the
first of a step has an area of its own. What ranks find in their parts of the vocabulary has one, too, for not
every step chooses tokens.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import torch

from engine.kernels.core.pages import mapped
from engine.kernels.exchange.exchange import WORDS_BYTES
from engine.kernels.exchange.layouts import EXCHANGE
from engine.kernels.exchange.peer_waits import NativeWaits
from engine.kernels.products.packing import LANES
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.parts import MOST_PARTS
from parallel.tensor_parallel import TensorRank

NUM_AREAS = 4
_ALIGNMENT = 64
_OFFERED = 0
"""Index of an arena's word that counts the sums given by its rank."""


def norm_parts(width: int, here: int) -> int:
    """Parts of a norm's squares that are added up by themselves, ``here`` of ``width``.

    Ranks have whole heads, so the parts of one worker are theirs whenever they can be cut alike.
    """
    whole = next((parts for parts in (MOST_PARTS, 2) if width % (parts * LANES) == 0), 1)
    return max(1, whole * here // width)


class Area(NamedTuple):
    """Place of a rank's partial sums."""

    address: int
    """float32 [rows, width of a row's sums]"""
    begin: int
    """Distance from the beginning of the arena, in bytes."""


class Sums:
    """Partial sums in areas of the ranks' arenas, added up in rank order."""

    def __init__(
        self, rank: int, arenas: list[int], num_bytes: int, width: int, num_areas: int = NUM_AREAS
    ) -> None:
        """``num_bytes``: of an arena. ``width``: of the widest row of sums."""
        self._rank, self._width = rank, width
        self._area_bytes = (num_bytes - WORDS_BYTES) // num_areas // _ALIGNMENT * _ALIGNMENT
        self._arenas = np.array(arenas, dtype=np.int64)
        given = ctypes.c_int64.from_address(arenas[rank] + 8 * _OFFERED).value
        self._rounds = np.array([given], dtype=np.int64)
        self.record = np.zeros((), dtype=EXCHANGE)
        """Record of addresses for the kernels, which point into this object's arrays."""
        self.record["rank"], self.record["size"] = rank, len(arenas)
        self.record["arenas"], self.record["rounds"] = self._arenas.ctypes.data, self._rounds.ctypes.data
        self.record["returned"] = self.record["arenas"]

    def begin(self) -> None:
        """Prepare for a step.

        Raises:
            parallel.communicators.base.CollectiveError: the group is broken.
        """

    @property
    def error(self) -> BaseException | None:
        """Why a step was given up, if it was."""
        return None

    @property
    def rows(self) -> int:
        """Most rows of a step."""
        return self._area_bytes // (4 * self._width)

    def area(self, number: int, of: int) -> Area:
        """Area of a step's sum number ``number`` of ``of``, which are at least two."""
        return self._place(2 if of % 2 and number == 0 else (number - of % 2) % 2)

    def area_to_choose(self) -> Area:
        """Area for the best tokens of each rank."""
        return self._place(3)

    def _place(self, number: int) -> Area:
        begin = WORDS_BYTES + number * self._area_bytes
        return Area(int(self._arenas[self._rank]) + begin, begin)


class SharedSums(Sums):
    """Sums among ranks that share memory."""

    def __init__(self, group: SharedMemoryCommunicator, width: int) -> None:
        self._members = group.arenas  # keeps the memory mapped
        super().__init__(group.rank, [each.arena for each in self._members], group.arena_bytes, width)
        self.waits = NativeWaits(group, "a sum over ranks")
        self.record["check"], self.record["crowded"] = self.waits.address, group.is_crowded

    def begin(self) -> None:
        """See :class:`Sums`."""
        self.waits.begin()

    @property
    def error(self) -> BaseException | None:
        return self.waits.error

    def __repr__(self) -> str:
        return f"<SharedSums of {len(self._members)} ranks, up to {self.rows} rows>"


class OwnSums(Sums):
    """Sums of this rank alone, to which its communicator adds those of others.

    No other rank reads them, so one area is enough.
    """

    def __init__(self, ranks: TensorRank, rows: int, width: int) -> None:
        self._ranks = ranks
        self._memory = mapped(WORDS_BYTES + -(-4 * rows * width // _ALIGNMENT) * _ALIGNMENT)
        super().__init__(0, [self._memory.data_ptr()], len(self._memory), width, num_areas=1)

    def __repr__(self) -> str:
        return f"<OwnSums of rank {self._ranks.rank}, up to {self.rows} rows>"

    def area(self, number: int, of: int) -> Area:
        """See :class:`Sums`."""
        return self._place(0)

    def add_others(self, area: Area, count: int) -> None:
        """Add the other ranks' numbers to the first ``count`` in an area.

        Raises:
            parallel.communicators.base.CollectiveError: one of them is lost.
        """
        own = self._memory[area.begin :][: 4 * count].view(torch.float32)
        given = self._ranks.all_gather_rows(own, [count] * self._ranks.size)
        own.copy_(_sum_of_neighbours([*given.split(count)] if count else [own]))


def _sum_of_neighbours(terms: list[torch.Tensor]) -> torch.Tensor:
    """Sum of terms by neighbours, in the order of ``numbers.hpp``."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << ((len(terms) - 1).bit_length() - 1)
    return _sum_of_neighbours(terms[:half]) + _sum_of_neighbours(terms[half:])
