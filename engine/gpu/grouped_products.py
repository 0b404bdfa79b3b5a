"""Launches the kernels of a mixture's experts (loads triton)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.gpu import grouped_kernels as kernels
from engine.gpu.coded_parameter import coded_of
from engine.gpu.product_choice import Product

SMALL_TILE, LARGE_TILE = 16, 64
"""Rows of a tile: where most experts have few pairs, and where they have many."""
FIXED_TILE = 32
"""Rows of a tile where tiles do not follow the number of rows."""
MANY_ROWS = 48
"""Pairs per expert, on average, from which tiles are large."""
SORTED_BY_KERNEL = 8192
"""Pairs up to which one kernel sorts them, by comparing each with all."""
SORT_BLOCK, SORT_LOOK = 64, 256
SUM_BLOCK = 1024


@dataclass(frozen=True)
class Pairs:
    """The pairs of one layer of one step, sorted by expert."""

    order: torch.Tensor
    """[pairs] the pair at each place."""
    places: torch.Tensor
    """[tokens, k] the place of each pair."""
    ends: torch.Tensor
    """[experts] where the pairs of each expert end."""
    top_k: int

    @staticmethod
    def of(expert_ids: torch.Tensor, num_experts: int) -> Pairs:
        """Sort the pairs of these choices [tokens, k]."""
        flat = expert_ids.reshape(-1)
        count = flat.numel()
        if count > SORTED_BY_KERNEL:
            ordered, order = torch.sort(flat, stable=True)
            experts = torch.arange(num_experts, device=flat.device, dtype=flat.dtype)
            ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
            places = torch.empty(count, dtype=torch.int32, device=flat.device)
            places[order] = torch.arange(count, dtype=torch.int32, device=flat.device)
            return Pairs(order.int(), places, ends, expert_ids.shape[1])  # of the types of the kernel's
        order, places = torch.empty(2, count, dtype=torch.int32, device=flat.device)
        ends = torch.empty(num_experts, dtype=torch.int32, device=flat.device)
        programs = -(-count // SORT_BLOCK) + -(-num_experts // SORT_BLOCK)
        kernels.sort_pairs[(programs,)](
            flat, order, places, ends, count, EXPERTS=num_experts, BLOCK=SORT_BLOCK, LOOK=SORT_LOOK
        )
        return Pairs(order, places, ends, expert_ids.shape[1])

    def __len__(self) -> int:
        return int(self.order.shape[0])

    def weighted_sum(self, computed: torch.Tensor, weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """computed [pairs, H], sorted, and weights [tokens, k] -> [tokens, H]."""
        tokens, width = weights.shape[0], computed.shape[1]
        outputs = computed.new_empty(tokens, width, dtype=dtype)
        block = min(SUM_BLOCK, _power(width))
        kernels.weighted_sum[(tokens, -(-width // block))](
            computed,
            weights.contiguous(),
            self.places,
            self.ends,
            outputs,
            self.top_k,
            EXPERTS=self.ends.shape[0],
            WIDTH=width,
            BLOCK=block,
        )
        return outputs


def grouped_linear(
    module: Any, name: str, rows: torch.Tensor, pairs: Pairs, product: Product, *, gather: bool
) -> torch.Tensor:
    """Outputs [pairs, out], sorted, of a matrix of each expert.

    ``gather``: rows are [tokens, in]; else [pairs, in], sorted.
    """
    weight = getattr(module, name)
    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if (codes := coded_of(weight)) is not None:
        return codes.product(rows.to(weight.dtype), bias, pairs, gather=gather)
    if product == "grouped_mm":
        if gather:
            rows = rows.index_select(0, pairs.order // pairs.top_k)
        matrices = weight if module.is_transposed else weight.transpose(1, 2)
        outputs = F.grouped_mm(rows, matrices, offs=pairs.ends)
        if bias is not None:
            experts = torch.searchsorted(pairs.ends, _numbers(pairs), right=True)
            outputs += bias[experts]
        return outputs
    count = len(pairs)
    tile = LARGE_TILE if count >= MANY_ROWS * weight.shape[0] else SMALL_TILE
    tile = FIXED_TILE if product == "fixed" else tile
    return _multiply(weight, bias, rows, pairs, tile, transposed=module.is_transposed, gather=gather)


def _numbers(pairs: Pairs) -> torch.Tensor:
    return torch.arange(len(pairs), dtype=torch.int32, device=pairs.ends.device)


def _multiply(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: torch.Tensor,
    pairs: Pairs,
    block_m: int,
    *,
    transposed: bool,
    gather: bool,
) -> torch.Tensor:
    experts = weight.shape[0]
    out, inner = (weight.shape[2], weight.shape[1]) if transposed else (weight.shape[1], weight.shape[2])
    rows = rows.to(weight.dtype)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count = len(pairs)
    outputs = rows.new_empty(count, out)
    block_n = min(128 if block_m <= FIXED_TILE else 64, max(16, _power(out)))
    block_k = min(64 if weight.itemsize <= 2 else 32, max(16, _power(inner)))
    tiles = count // block_m + min(experts, count)  # enough for any routing
    kernels.grouped_product[(-(-out // block_n), tiles)](
        rows,
        weight,
        weight if bias is None else bias,
        outputs,
        pairs.ends,
        pairs.order,
        pairs.top_k,
        rows.stride(0),
        weight.stride(0),
        weight.stride(2 if transposed else 1),
        weight.stride(1 if transposed else 2),
        0 if bias is None else bias.stride(0),
        IN=inner,
        OUT=out,
        EXPERTS=experts,
        BLOCK_E=_power(experts),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GATHER=gather,
        BIAS=bias is not None,
        WIDEN=weight.dtype == torch.bfloat16 and weight.device.type == "cpu",
    )
    return outputs


def _power(size: int) -> int:
    """The next power of two."""
    return 1 << (max(size, 1) - 1).bit_length()
