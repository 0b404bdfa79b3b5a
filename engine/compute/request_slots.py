"""State of running requests by slot: tokens, block tables, wanted logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.attention.base import Int64s
from engine.compute.logits_backend import SampleRow
from engine.compute.token_rules import TokenRules
from engine.kernels.choosing.logits import draw_of
from engine.step import Admit, Step
from engine.vision.axes import RequestAxes

MIN_TABLE_WIDTH = 16
"""Blocks of a context that the first block tables have room for."""
MIN_SPARE_TOKENS = 64
"""Tokens of room behind a prompt."""


@dataclass
class RequestSlot:
    """State of the request in a slot, apart from its block table."""

    admit: Admit
    token_ids: Int64s
    """Tokens by position, with room for more."""
    is_plain: bool
    """Whether nothing but its token is wanted of a step, see :attr:`SamplingParams.is_plain`."""
    draw: bytes
    """See :func:`engine.kernels.choosing.logits.draw_of`."""
    rules: TokenRules
    axes: RequestAxes | None = None
    """Positions of its tokens on axes; None: they are those in the text."""

    @classmethod
    def of(cls, admit: Admit) -> RequestSlot:
        room = np.zeros(len(admit.token_ids) + MIN_SPARE_TOKENS, dtype=np.int64)
        rules = TokenRules(admit.params, admit.barred_ids)
        is_plain = admit.params.is_plain and not admit.keeps_experts
        slot = cls(admit, room, is_plain, draw_of(admit.params, admit.seed), rules)
        slot.token_ids[: len(admit.token_ids)] = admit.token_ids
        return slot

    def sample_row(self, position: int, mask: npt.NDArray[np.uint8] | None) -> SampleRow:
        """A row whose token at ``position`` is to be chosen."""
        admit = self.admit
        return SampleRow(
            admit.params, admit.seed, position, self.token_ids[:position], admit.num_prompt, self.rules, mask
        )

    def put(self, position: int, *token_ids: int) -> None:
        """Set the tokens from a position on.

        Behind them stays room for one that is not known yet.
        """
        end = position + len(token_ids)
        while end >= len(self.token_ids):
            self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
        self.token_ids[position:end] = token_ids

    def put_one(self, position: int, token_id: int) -> None:
        """Set one token, as most steps do for each row."""
        if position + 1 < len(self.token_ids):
            self.token_ids[position] = token_id
        else:
            self.put(position, token_id)


class BlockTables:
    """Block tables of all slots, one row each; grows as slots and contexts do."""

    def __init__(self, block_size: int) -> None:
        self.blocks = np.zeros((1, MIN_TABLE_WIDTH), dtype=np.int32)
        self._block_size = block_size
        self._admitted: set[int] = set()
        """Slots whose next row brings its whole block table."""

    def clear(self, slot: int) -> None:
        while slot >= len(self.blocks):
            self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)])
        self._admitted.add(slot)

    def extend(self, step: Step) -> None:
        """Enter a step's new blocks, at indices that follow from the rows' starts.

        So a row that is run again puts its blocks there again.
        """
        for index, new_blocks in step.new_blocks.items():
            slot, start = step.slots[index], step.starts[index]
            begin = 0 if slot in self._admitted else -(-start // self._block_size)
            end = begin + len(new_blocks)
            while end > self.blocks.shape[1]:
                self.blocks = np.concatenate([self.blocks, np.zeros_like(self.blocks)], axis=1)
            self.blocks[slot, begin:end] = new_blocks
        if self._admitted:
            self._admitted.difference_update(step.slots)


@dataclass(frozen=True)
class WantedLogits:
    """Positions whose logits a step needs: sampled tokens and prompt log-probabilities."""

    tokens: Int64s
    """[logits] indices into the packed tokens.

    Those that sample come first, then those of prompt tokens.
    """
    sampled: Sequence[int]
    """Row of each sampled token.

    A row with a draft has one more than the draft has tokens.
    """
    ends: Sequence[int]
    """Position of each sampled token."""
    prompt_rows: list[tuple[int, int, int]]
    """(row, first prompt position predicted, how many) for prompt log-probabilities."""
