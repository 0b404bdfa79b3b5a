"""The last product of a part, whose result is added to the stream."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch

from engine.kernels.adapters.sites import PackedSite
from engine.kernels.products.packing import PackedWeights

Rows: TypeAlias = "torch.Tensor | int"
"""Rows between operations: a tensor, or an address inside of wider rows."""


class Product(NamedTuple):
    """Last product of a part, whose result is added to the stream."""

    into: torch.Tensor
    weights: PackedWeights | None
    width: int
    """Inputs here."""
    bias: torch.Tensor | None
    is_partial: bool
    """Whether other ranks have other inputs."""
    row_factors: torch.Tensor | None = None
    """Logits [rows] in float32, whose sigmoids are factors on the result."""
    factor: float = 1.0
    """Factor on the result."""
    site: PackedSite | None = None
    """Adapters that add to it."""
