"""The fast path for consecutive decode steps: the same rows, each one token further.

The arrays of the previous step are updated in place: nothing is packed, and no array is made. Tokens are kept
here for a while instead of going to their slots one by one. Between two steps the weights have gone through
the caches, so that touching many objects, or the code of many functions, costs several times what it would
in a loop of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from engine.attention.base import Int64s, PackedRows
from engine.kernels.cache.native_cache import NativePlan
from engine.kernels.core.operations import StepArguments
from engine.step import Step


class DecodeContinuation:
    """Rows of one token each, whose next tokens are chosen natively, step after step.

    A :class:`.Program` makes it and advances it. A :class:`.ModelRunner` asks whether a step continues its
    rows, and takes the tokens.
    """

    MOST = 64
    """Steps whose tokens are kept before they go to their slots."""

    def __init__(
        self,
        arguments: StepArguments,
        input_ids: Int64s,
        packed: PackedRows,
        plan: NativePlan,
        block_size: int,
        turned: Int64s | None = None,
    ) -> None:
        """``arguments`` point to the arrays of the others, which are changed from now on."""
        self.arguments = arguments
        arguments.array["apart"] = 1  # none of these rows comes anew, to share a block that another one fills
        self.size = len(input_ids)
        self._ids, self._slots, self._tables = input_ids, plan.slots, plan.tables
        self._positions, self._starts = packed.positions, packed.starts
        self._turned = turned
        """[rows] positions by which heads are turned; None: those in the text."""
        self._block_size = block_size
        self._longest = int(packed.positions.max())
        """The highest position."""
        self._step = Step()
        self._expected: list[int] = []
        """Positions at which the rows of the next step begin."""
        self._kept: list[list[int]] = []
        """Tokens by step, the last of which the next step computes."""

    def __repr__(self) -> str:
        return f"<DecodeContinuation {self.size} rows, up to position {self._longest}>"

    def begin(self, step: Step) -> None:
        """Note which step's rows these are, so that :meth:`is_followed_by` can tell."""
        self._step, self._expected = step, step.ends

    def is_followed_by(self, step: Step) -> bool:
        """Whether this step is the next one of the same rows, and brings nothing else."""
        return (
            step.starts == self._expected
            and step.slots == self._step.slots
            and step.counts == self._step.counts
            and not (step.admits or step.partial or step.tokens)
            and step.masks is None
        )

    def fits(self, positions: int) -> bool:
        """Whether the next step has room in the tables, and among so many positions."""
        room = int(self._tables.shape[1]) * self._block_size
        return self._longest + 1 < min(positions, room)

    def advance(self, new_blocks: Mapping[int, Sequence[int]]) -> None:
        """Move all rows one position on.

        ``new_blocks``: by row, for those whose position begins a block.
        """
        self._positions += 1
        if self._turned is not None:
            self._turned += 1
        self._starts += 1
        self._slots += 1
        self._longest += 1
        for row, (block,) in new_blocks.items():
            self._tables[row, self._positions[row] // self._block_size] = block
            self._slots[row] = block * self._block_size

    def chose(self, tokens: Int64s) -> list[int]:
        """Make the tokens that the step gave [rows] the input of the next one."""
        self._ids[:] = tokens
        found: list[int] = self._ids.tolist()
        return found

    def keep(self, tokens: list[int]) -> None:
        """Keep the tokens of a step after the first until :meth:`take`."""
        self._kept.append(tokens)
        self._expected = [position + 1 for position in self._expected]

    @property
    def is_full(self) -> bool:
        """Whether so many tokens are kept that :meth:`take` is due."""
        return len(self._kept) == self.MOST

    def take(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """Take the kept tokens: (slot, position, tokens from there on) for each row."""
        kept, self._kept = self._kept, []
        for slot, end, tokens in zip(self._step.slots, self._expected, zip(*kept, strict=True), strict=False):
            yield slot, end + 1 - len(tokens), tokens
