"""Launches products and sums whose tiles do not follow the number of rows (loads triton)."""

from __future__ import annotations

from functools import cache

import torch

from engine.gpu import fixed_kernels as kernels

TILE, WIDE_TILE = (64, 64, 64), (16, 64, 32)
"""Rows, outputs and inputs of a tile of float32: larger ones exceed the registers."""
WANTED_PROGRAMS = 264
"""Programs that keep a device busy, whichever it is: two for each of 132 multiprocessors."""
MOST_CUTS, LEAST_CUT = 8, 256
"""Cuts of a sum, and inputs of a cut."""
ADDED_BLOCK = 1024
"""Outputs of a program that adds up cuts."""
SUM_BLOCK = 1024
"""Numbers of a row that a program adds at once."""


def linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Rows [..., inputs] by a matrix [outputs, inputs]: each row as if it were alone."""
    outputs, inputs = weight.shape
    flat = rows.reshape(-1, inputs)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    count = len(flat)
    found = flat.new_empty(count, outputs)
    if not count or not outputs:
        return found.view(*rows.shape[:-1], outputs)
    block_m, block_n, block_k = TILE if rows.element_size() <= 2 else WIDE_TILE
    block_k = min(block_k, max(16, _power(inputs)))
    parts, tiles = -(-outputs // block_n), -(-count // block_m)
    cuts, cut = cuts_of(parts, inputs)
    is_spread = cuts > 1 and parts * tiles < WANTED_PROGRAMS
    sums = flat.new_empty(cuts, count, outputs, dtype=torch.float32) if is_spread else found
    shift = weight if bias is None else bias
    kernels.fixed_product[(parts, tiles, cuts if is_spread else 1)](
        flat,
        weight,
        shift,
        sums,
        count,
        flat.stride(0),
        weight.stride(0),
        weight.stride(1),
        IN=inputs,
        OUT=outputs,
        CUT=cut,
        CUTS=cuts,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        SPREAD=is_spread,
        BIAS=bias is not None,
        WIDEN=rows.dtype == torch.bfloat16 and rows.device.type == "cpu",
        num_warps=4,
        num_stages=3,
    )
    if is_spread:
        kernels.add_cuts[(-(-count * outputs // ADDED_BLOCK),)](
            sums, shift, found, count, OUT=outputs, CUTS=cuts, BLOCK=ADDED_BLOCK, BIAS=bias is not None
        )
    return found.view(*rows.shape[:-1], outputs)


@cache
def cuts_of(parts: int, inputs: int) -> tuple[int, int]:
    """Number of cuts of a matrix's sums, and inputs of each.

    Few outputs alone would not keep a device busy with one row. The number of rows does not count.
    """
    wanted = min(MOST_CUTS, WANTED_PROGRAMS // parts, inputs // LEAST_CUT)
    cuts = 1 << max(wanted, 1).bit_length() - 1
    cut = -(-inputs // cuts // TILE[2]) * TILE[2]
    return -(-inputs // cut), cut


def sum_of_rows(rows: torch.Tensor) -> torch.Tensor:
    """Sums of rows [..., width] along the last dimension: float32 [...]."""
    width = rows.shape[-1]
    flat = rows.reshape(-1, width)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    sums = flat.new_zeros(len(flat), dtype=torch.float32)
    if flat.numel():
        block = min(SUM_BLOCK, _power(width))
        kernels.sum_rows[(len(flat),)](flat, sums, flat.stride(0), WIDTH=width, BLOCK=block)
    return sums.view(rows.shape[:-1])


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (max(size, 1) - 1).bit_length()
