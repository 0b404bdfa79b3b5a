"""Laying out weights for ``step.cpp``: panels of 16 outputs; a word of 32 bits holds one float32 or two
bfloat16 that are neighbours along the inputs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from engine.kernels.pages import Arena

LANES = 16
PACK = {torch.float32: 1, torch.bfloat16: 2}
"""Numbers per word."""
SLACK = 16
"""Rows by which inputs of products can be read beyond their end: products take 16 rows at a time."""


def panels(weight: torch.Tensor, multiple: int = LANES, arena: Arena | None = None) -> torch.Tensor:
    """[..., outputs, inputs] -> [..., outputs / 16, inputs / pack, 16, pack], contiguous, in memory of the
    arena. Outputs are filled up with zeros to a multiple of ``multiple``."""
    return _written([_turned(weight, multiple)], arena)


def gate_and_up(weight: torch.Tensor, arena: Arena | None = None) -> torch.Tensor:
    """[..., 2 * width, inputs], gate first -> gate's panels, then up's."""
    gate, up = weight.chunk(2, dim=-2)
    return _written([_turned(gate, LANES), _turned(up, LANES)], arena)


def _turned(weight: torch.Tensor, multiple: int) -> torch.Tensor:
    """A view of the weight as its panels."""
    pack = PACK[weight.dtype]
    outputs, inputs = weight.shape[-2:]
    if inputs % pack:
        raise ValueError(f"{inputs} inputs do not divide into words of {pack}")
    padded = F.pad(weight, (0, 0, 0, -outputs % multiple))
    split = padded.unflatten(-1, (inputs // pack, pack)).unflatten(-3, (-1, LANES))
    return split.transpose(-3, -2)


def _written(parts: Sequence[torch.Tensor], arena: Arena | None) -> torch.Tensor:
    """One after the other along the panels."""
    first = parts[0]
    panel = first.dim() - 4
    shape = [*first.shape]
    shape[panel] = sum(part.shape[panel] for part in parts)
    out = (arena or Arena()).zeros(tuple(shape), first.dtype)
    return torch.cat([*parts], dim=panel, out=out)
