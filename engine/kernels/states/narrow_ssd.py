"""State space duality of a model's narrow copy: few heads, and made-up weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.kernels.products.made_up import MadeUpWeights
from engine.kernels.states.ssd import COLUMN_FACTORS, Ssd
from engine.kernels.states.ssd_sizes import Sizes

MOST_GROUPS, MOST_HEADS = 2, 2
"""Groups of a copy, and heads of each."""


def narrow_sizes(sizes: Sizes) -> Sizes:
    """Sizes of the copy of a layer."""
    groups = min(sizes.groups, MOST_GROUPS)
    return replace(sizes, groups=groups, heads=groups * min(sizes.heads // sizes.groups, MOST_HEADS))


def tell(ssd: Ssd, module: Any) -> None:
    """Set the numbers that a copy's forward pass splits its rows by."""
    sizes = narrow_sizes(ssd.sizes)
    module.num_heads, module.n_groups = sizes.heads, sizes.groups
    module.intermediate_size = sizes.inner
    module.conv_dim = module.conv1d.in_channels = sizes.convolved
    if ssd.norm is None:
        return
    parts = {1: 1, ssd.sizes.heads: sizes.heads}.get(ssd.norm.parts, sizes.groups)
    if hasattr(module.norm, "group_size"):
        module.norm.group_size = sizes.inner // parts
    if hasattr(module.norm, "n_groups"):
        module.norm.n_groups = parts


def make_up(weights: MadeUpWeights, ssd: Ssd, module: Any) -> None:
    """Make weights up for a module: half of the heads have large step sizes."""
    sizes, hidden = narrow_sizes(ssd.sizes), ssd.out.shape[0]
    first = sizes.projected - sizes.heads
    weights.linear(module.in_proj, sizes.projected, hidden, loud_rows=range(first, first + sizes.heads // 2))
    weights.linear(module.out_proj, hidden, sizes.inner)
    weights.put(module.conv1d.weight, (sizes.convolved, 1, ssd.conv.kernel))
    if module.conv1d.bias is not None:
        weights.put(module.conv1d.bias, (sizes.convolved,), size=0.2)
    weights.put(module.A_log, (sizes.heads,), "decay", size=0.5)
    weights.put(module.D, (sizes.heads,), "skip", size=0.5, mean=1.0)
    weights.put(module.dt_bias, (sizes.heads,), "step", size=0.5)
    if ssd.norm is not None:
        weights.put(module.norm.weight, (sizes.inner,), size=0.2, mean=1.0)
    if (factors := getattr(module, COLUMN_FACTORS, None)) is not None:
        weights.keep_buffer(factors, _columns(ssd.sizes, sizes))


def _columns(all_of_it: Sizes, some: Sizes) -> torch.Tensor:
    """Columns of projections that a copy has."""
    inner, shared, few = all_of_it.inner, all_of_it.groups * all_of_it.size, some.groups * some.size
    begins = 0, inner, 2 * inner, 2 * inner + shared, 2 * (inner + shared)
    counts = some.inner, some.inner, few, few, some.heads
    return torch.cat([torch.arange(at, at + count) for at, count in zip(begins, counts, strict=True)])
