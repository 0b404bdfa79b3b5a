"""Tiles of a step on the device: queries that one program of attention computes together."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tiles:
    """Some tiles of a step, as arrays [tiles] on the device; see ``triton_kernels.attend``."""

    rows: torch.Tensor
    tokens: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor
    longest: int
    """Most tokens of a context among them."""

    @staticmethod
    def of(arrays: torch.Tensor, longest: int) -> Tiles:
        """Tiles from arrays [4, tiles]."""
        rows, tokens, counts, positions = arrays.unbind()
        return Tiles(rows, tokens, counts, positions, longest)

    def __len__(self) -> int:
        return len(self.rows)
