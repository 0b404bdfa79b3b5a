"""Laying out weights for ``step.cpp``: panels of 16 outputs; a word of 32 bits holds one float32 or two
bfloat16 that are neighbours along the inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

LANES = 16
PACK = {torch.float32: 1, torch.bfloat16: 2}
"""Numbers per word."""
SLACK = 16
"""Rows by which inputs of products can be read beyond their end: products take 16 rows at a time."""


def panels(weight: torch.Tensor, multiple: int = LANES) -> torch.Tensor:
    """[..., outputs, inputs] -> [..., outputs / 16, inputs / pack, 16, pack], contiguous. Outputs are filled
    up with zeros to a multiple of ``multiple``."""
    pack = PACK[weight.dtype]
    outputs, inputs = weight.shape[-2:]
    if inputs % pack:
        raise ValueError(f"{inputs} inputs do not divide into words of {pack}")
    padded = F.pad(weight, (0, 0, 0, -outputs % multiple))
    split = padded.unflatten(-1, (inputs // pack, pack)).unflatten(-3, (-1, LANES))
    return split.transpose(-3, -2).contiguous()


def gate_and_up(weight: torch.Tensor) -> torch.Tensor:
    """[..., 2 * width, inputs], gate first -> gate's panels, then up's."""
    gate, up = weight.chunk(2, dim=-2)
    return torch.cat([panels(gate), panels(up)], dim=-4)
