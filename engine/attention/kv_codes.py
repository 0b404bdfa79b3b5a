"""Keys and values as codes of eight bits, for ``--kv-cache-dtype``.

What a token has for a KV head, a key or a value, is codes times one scale. The greatest of its numbers has
the greatest code: 127 of whole numbers (int8), or 448 of numbers with four bits of exponent and three more
(fp8, e4m3). Scales are bfloat16, rounded up. ``kernels/kv_codes.hpp`` makes the same codes.
"""

from __future__ import annotations

from typing import Literal

import torch

KVCodes = Literal["int8", "fp8"]
LARGEST: dict[KVCodes, float] = {"int8": 127.0, "fp8": 448.0}
SCALE_TYPE = torch.bfloat16
LEAST = torch.finfo(torch.float32).tiny
"""Least scale that is divided by; smaller ones are 0, as are their codes."""


def quantized(numbers: torch.Tensor, kind: KVCodes) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., dim] as int8, and scales [...], of numbers [..., dim]."""
    numbers, largest = numbers.float(), LARGEST[kind]
    least = numbers.abs().amax(dim=-1) / largest
    above = (least.view(torch.int32) + 0xFFFF) >> 16 << 16
    scales = torch.where(least < LEAST, 0.0, above.view(torch.float32))
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales).unsqueeze(-1)
    codes = (numbers * inverse).clamp(-largest, largest)
    if kind == "fp8":
        return codes.to(torch.float8_e4m3fn).view(torch.int8), scales.to(SCALE_TYPE)
    return codes.round().to(torch.int8), scales.to(SCALE_TYPE)


def widened(codes: torch.Tensor, scales: torch.Tensor, kind: KVCodes, dtype: torch.dtype) -> torch.Tensor:
    """Numbers [..., dim] of codes [..., dim] and scales [...]."""
    numbers = codes.view(torch.float8_e4m3fn) if kind == "fp8" else codes
    return (numbers.float() * scales.float().unsqueeze(-1)).to(dtype)
