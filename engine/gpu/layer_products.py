"""Launches products with norm, activation and residual inside, for few rows (loads triton)."""

from __future__ import annotations

import torch

from engine.gpu import layer_kernels as kernels
from engine.gpu.late_rotary import LateNorm

MOST_ROWS = 32
"""Rows up to which such a product is used.

More would read the weights several times.
"""
TILE_ROWS = 16
"""Rows of a tile, of which two at most read the same weights."""
TILE_INPUTS = 128
"""Inputs that a program multiplies at once, in two bytes each."""
WANTED_PROGRAMS = 132
"""Programs that read a matrix together where it has outputs enough."""


def layer_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: LateNorm | None = None,
    gate: bool | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rows [..., inputs] by a matrix [outputs, inputs], and the bias: [..., outputs].

    ``norm``: of the rows, before the product. ``gate``: rows are [..., 2 inputs], activations of whose first
    half are multiplied by the second; with GELU by its tanh if True, else SiLU. ``residual`` [..., outputs]
    is added. Sums are not rounded before it is.
    """
    outputs, inputs = weight.shape
    flat = rows.reshape(-1, rows.shape[-1])
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    if residual is not None and not residual.is_contiguous():
        residual = residual.contiguous()
    count = len(flat)
    found = flat.new_empty(count, outputs)
    if count:
        block_n = 32 if outputs >= 32 * WANTED_PROGRAMS else 16
        block_k = min(TILE_INPUTS * 2 // flat.element_size(), max(16, 1 << (inputs - 1).bit_length()))
        kernels.layer_product[(-(-outputs // block_n), -(-count // TILE_ROWS))](
            flat,
            weight,
            weight if bias is None else bias,
            weight if norm is None else norm.weight,
            found if residual is None else residual,
            found,
            count,
            flat.stride(0),
            weight.stride(0),
            0.0 if norm is None else norm.epsilon,
            IN=inputs,
            OUT=outputs,
            BLOCK_M=TILE_ROWS,
            BLOCK_N=block_n,
            BLOCK_K=block_k,
            NORMED=norm is not None,
            PLUS_ONE=norm is not None and norm.plus_one,
            GATED=gate is not None,
            TANH=bool(gate),
            BIAS=bias is not None,
            RESIDUAL=residual is not None,
            WIDEN=flat.dtype == torch.bfloat16 and flat.device.type == "cpu",
            num_warps=4,
            num_stages=3,
        )
    return found.view(*rows.shape[:-1], outputs)
