"""Steps that only take the rows of the one before on, each by the token that it gave: most steps.

What such a step is given stays where it is, and is changed in place: nothing is packed, and no array is made.
Between two steps the weights have gone through the caches, so that it costs several times what it would in a
loop of its own to touch many objects, or the code of many functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.attention.base import Int64s, PackedRows
from engine.kernels.cache import NativePlan
from engine.kernels.operations import StepArguments


class GoingOn:
    """A step of one token a row, each of whose next tokens is chosen."""

    def __init__(
        self,
        arguments: StepArguments,
        input_ids: Int64s,
        packed: PackedRows,
        plan: NativePlan,
        block_size: int,
    ) -> None:
        """``arguments`` point to the arrays of the others, which are changed from now on."""
        self.arguments = arguments
        arguments.array["apart"] = 1  # none of these rows comes anew, to share a block that another one fills
        self.size = len(input_ids)
        self._ids, self._slots, self._tables = input_ids, plan.slots, plan.tables
        self._positions, self._starts = packed.positions, packed.starts
        self._block_size = block_size
        self._longest = int(packed.positions.max())
        """The highest position."""

    def __repr__(self) -> str:
        return f"<GoingOn {self.size} rows, up to position {self._longest}>"

    def fits(self, positions: int) -> bool:
        """Whether the next step has room in the tables, and among so many positions."""
        room = int(self._tables.shape[1]) * self._block_size
        return self._longest + 1 < min(positions, room)

    def chose(self, tokens: Int64s) -> list[int]:
        """The step gave these [rows]: they are what the next one computes."""
        self._ids[:] = tokens
        found: list[int] = self._ids.tolist()
        return found

    def advance(self, new_blocks: Mapping[int, Sequence[int]]) -> None:
        """To the next step. ``new_blocks``: of the rows that begin one, by row."""
        self._positions += 1
        self._starts += 1
        self._slots += 1
        self._longest += 1
        for row, (block,) in new_blocks.items():
            self._tables[row, self._positions[row] // self._block_size] = block
            self._slots[row] = block * self._block_size
