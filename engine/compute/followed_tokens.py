"""Tokens that stay on the device between two steps: one chooses them, one computes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Int64s
from engine.attention.transfer import upload
from engine.step import Step

KNOWN = -1
"""Source of a row whose token the host knows."""


@dataclass(frozen=True)
class ChosenTokens:
    """Tokens that a step chooses, maybe later, and the slots that they are for."""

    tokens: torch.Tensor
    """[tokens] int64, on the device."""
    slots: Sequence[int]
    """Slot of each token."""

    def followed_by(self, step: Step) -> FollowedTokens:
        """Where the rows of the next step find the tokens that they follow."""
        if len(step.ahead) == len(step.slots) and step.slots == self.slots:  # most steps
            return FollowedTokens(self.tokens, np.arange(len(step.slots)))
        sources = np.full(len(step.slots), KNOWN, dtype=np.int64)
        index_of = {slot: index for index, slot in enumerate(self.slots)}
        sources[step.ahead] = [index_of[step.slots[row]] for row in step.ahead]
        return FollowedTokens(self.tokens, sources)


@dataclass(frozen=True)
class FollowedTokens:
    """Tokens of the step before, and which of them the rows of a step compute."""

    tokens: torch.Tensor
    """[tokens] int64, on the device."""
    sources: Int64s
    """[rows] index of each row's token among them; :data:`KNOWN`: the host knows it.

    Rows of one token come first, and no others follow one.
    """

    def fill(self, input_ids: torch.Tensor) -> None:
        """Put them into packed token ids [tokens] on the device, in place."""
        rows = np.flatnonzero(self.sources != KNOWN)
        places = upload(np.stack([rows, self.sources[rows]]), input_ids.device)
        input_ids.index_copy_(0, places[0], self.tokens.index_select(0, places[1]))
