"""Native implementation of :class:`.LogitsBackend` on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.attention.base import Int64s
from engine.compute.logits_backend import SampleRow
from engine.kernels.choosing import logits as kernels
from engine.kernels.core.library import KernelLibrary


class NativeLogits:
    """A :class:`.LogitsBackend` that calls the compiled kernels."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library

    def __repr__(self) -> str:
        return "NativeLogits()"

    def mask(
        self, shaped: torch.Tensor, indices: Sequence[int], rows: Sequence[SampleRow], first: int
    ) -> None:
        """See :class:`.LogitsBackend`."""
        masks = [row.mask for row in rows if row.mask is not None]
        kernels.leave_out(self._library, shaped, indices, masks, first)

    def penalise(
        self, shaped: torch.Tensor, indices: Sequence[int], rows: Sequence[SampleRow], first: int
    ) -> None:
        """See :class:`.LogitsBackend`."""
        histories = [
            kernels.TokenHistory(i, rows[i].token_ids, rows[i].num_prompt, rows[i].params) for i in indices
        ]
        kernels.penalise(self._library, shaped, histories, first)

    def draw(self, shaped: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
        """See :class:`.LogitsBackend`."""
        how = kernels.draws(_draws_of(rows))
        lines = shaped.float().contiguous()
        return torch.from_numpy(kernels.draw(self._library, lines, how, _positions(rows)))

    def contestants(
        self, shaped: torch.Tensor, rows: Sequence[SampleRow], first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`.LogitsBackend`."""
        how = [kernels.draw_of(row.params, row.seed) if row.races else kernels.GREEDY for row in rows]
        lines = shaped.float().contiguous()
        scores, tokens = kernels.contestants(
            self._library, lines, kernels.draws(how), _positions(rows), first
        )
        return torch.from_numpy(scores), torch.from_numpy(tokens)

    def logprob_table(self, logits: torch.Tensor, targets: torch.Tensor, num_top: int) -> torch.Tensor:
        """See :class:`.LogitsBackend`."""
        lines = logits.float().contiguous()
        num_top = min(num_top, logits.shape[1])
        return torch.from_numpy(kernels.logprobs(self._library, lines, targets.numpy(), num_top))


def _draws_of(rows: Sequence[SampleRow]) -> list[bytes]:
    """Parameters of each row; rows of one request are neighbours, and share theirs."""
    found: list[bytes] = []
    last, made = None, b""
    for row in rows:
        if last is None or row.params is not last.params or row.seed != last.seed:
            made = kernels.draw_of(row.params, row.seed)
        found.append(made)
        last = row
    return found


def _positions(rows: Sequence[SampleRow]) -> Int64s:
    return np.array([row.position for row in rows], dtype=np.int64)
