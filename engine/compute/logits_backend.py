"""Interface of sampling operations on logits, with two implementations: torch and native.

:class:`engine.compute.torch_logits.TorchLogits` works on every device, and is the reference.
:class:`engine.compute.native_logits.NativeLogits` computes the same on the CPU, but for rounding, in a small
part of the time. :class:`engine.compute.sampler.Sampler` chooses one of them, once for a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import Int64s
from engine.compute.token_rules import TokenRules
from engine.sampling import SamplingParams

NEVER = float("-inf")
"""The logit of a token that cannot be chosen."""


@dataclass(frozen=True)
class SampleRow:
    """Sampling parameters and history of one row whose token is chosen."""

    params: SamplingParams
    seed: int
    position: int
    """Position, in its request, of the token to choose."""
    token_ids: Int64s
    """Prompt and output so far."""
    num_prompt: int
    rules: TokenRules
    mask: npt.NDArray[np.uint8] | None = None
    """One bit per token, 1 if it may be chosen; None: all may.

    The lowest bit of a byte comes first.
    """

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def output_ids(self) -> Int64s:
        return self.token_ids[self.num_prompt :]

    @property
    def truncates(self) -> bool:
        """Whether only the most likely tokens take part."""
        return not self.params.greedy and (self.params.top_k > 0 or self.params.top_p < 1.0)

    @property
    def needs_whole_row(self) -> bool:
        """Whether choosing needs the whole row at one place.

        Then a token's chance depends on more than its logit and the best one of a part of the row.
        """
        return self.truncates or (not self.params.greedy and self.params.min_p > 0.0)

    @property
    def races(self) -> bool:
        """Whether a race decides, which ranks can run on parts of the row."""
        return not (self.params.greedy or self.needs_whole_row)


class LogitsBackend(Protocol):
    """Operations on rows of logits [rows, columns].

    Column 0 is token ``first`` of the vocabulary.
    """

    def mask(
        self, shaped: torch.Tensor, indices: Sequence[int], rows: Sequence[SampleRow], first: int
    ) -> None:
        """Set tokens that the masks of these rows forbid to -infinity, in place.

        ``shaped`` is contiguous float32, here and in :meth:`penalise`; ``rows`` are all its rows.
        """
        ...

    def penalise(
        self, shaped: torch.Tensor, indices: Sequence[int], rows: Sequence[SampleRow], first: int
    ) -> None:
        """Apply the penalties of the rows at ``indices``, in place.

        Repetition over prompt and output (multiplies), presence and frequency over output (subtract).
        """
        ...

    def draw(self, shaped: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """A token [rows] int64 for each row of the whole vocabulary.

        Some of the rows may be greedy.
        """
        ...

    def contestants(
        self, shaped: torch.Tensor, rows: Sequence[SampleRow], first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Best token [rows] of these columns in each row, after its score [rows] float64.

        Scores can be compared with other ranks': logits, or logs of speeds in a race. Rows that need to be
        looked at whole are greedy here.
        """
        ...

    def logprob_table(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
        """Log-probabilities of logits [rows, vocabulary] as they are.

        ``targets`` [rows] are the tokens that follow there.

        Returns:
            [rows, 3 + 2 * num_top] float64 (which holds token ids exactly): target, its log-probability, its
            rank, then the ``num_top`` best ids and their log-probabilities.
        """
        ...
