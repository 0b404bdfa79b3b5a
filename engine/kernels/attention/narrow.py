"""Attention of a model's narrow copy: few heads, and made-up weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.attention.base import LayerShape
from engine.kernels.attention.attention import Attention
from engine.kernels.attention.latent import is_latent, latent_modules
from engine.kernels.attention.rotary import HEAD_GATES, NORMS
from engine.kernels.products.made_up import MadeUpWeights
from engine.kernels.products.projections import attention_projections, is_joined

MOST_KV_HEADS, MOST_QUERY_HEADS = 2, 2
"""KV heads of a copy, and query heads of each.

A copy has one KV head unless each has one query head.
"""
HEADS = "num_attention_heads", "num_heads", "n_head"
KV_HEADS = "num_key_value_heads", "num_kv_heads"


def tell(attention: Attention, module: Any) -> None:
    """Set the numbers that a copy's forward pass splits joined projections by."""
    if is_latent(module) or not is_joined(attention_projections(module)[0]):
        return
    (heads, kv_heads), config = narrow_heads(attention), module.config
    for owner in (module, config):
        for names, number in ((HEADS, heads), (KV_HEADS, kv_heads)):
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, number)
    if hasattr(module, "split_size"):
        module.split_size = heads * attention.dim


def narrow_heads(attention: Attention) -> tuple[int, int]:
    """Query heads and KV heads of the copy of a layer."""
    group = min(attention.heads // attention.kv_heads, MOST_QUERY_HEADS)
    kv_heads = min(attention.kv_heads, MOST_KV_HEADS) if group == 1 else 1
    return kv_heads * group, kv_heads


def narrow_shape(attention: Attention, shape: LayerShape) -> LayerShape:
    """Shape of what the copy of a layer caches."""
    return replace(shape, kv_heads=narrow_heads(attention)[1])


def make_up(weights: MadeUpWeights, attention: Attention, module: Any) -> None:
    """Make weights up for an attention module."""
    (heads, kv_heads), dim, hidden = narrow_heads(attention), attention.dim, attention.out.shape[0]
    loud_query, value_dim = [*range(dim * (heads // 2), dim * heads)], attention.value_dim
    loud_value, loud_out = (
        [index for index in range(number * value_dim) if index % value_dim >= value_dim // 2]
        for number in (kv_heads, heads)
    )
    if attention.latents is not None:
        _make_up_latents(weights, attention, module, loud_value, loud_out)
        return
    num_queries = heads * dim
    if attention.has_gates:  # behind the queries of each head
        num_queries *= 2
        loud_query = [2 * dim * (index // dim) + index % dim for index in loud_query]
    sizes = num_queries, kv_heads * dim, kv_heads * value_dim
    inward, out = attention_projections(module)
    if is_joined(inward):
        before = sizes[0] + sizes[1]
        loud = [*loud_query, *(before + index for index in loud_value)]
        weights.linear(next(iter(inward.values())), sum(sizes), hidden, loud_rows=loud)
    else:
        for each, rows, loud_rows in zip(inward.values(), sizes, (loud_query, (), loud_value), strict=False):
            weights.linear(each, rows, hidden, loud_rows=loud_rows)
    weights.linear(getattr(module, out), hidden, heads * value_dim, quiet_columns=loud_out)
    if attention.head_gates is not None:
        weights.linear(getattr(module, HEAD_GATES), heads, hidden)
    for weight in module.parameters(recurse=False):
        if weight.shape == (attention.heads,):  # sinks
            weights.put(weight, (heads,), size=1.0)
    for names in NORMS:
        for name, number in zip(names, (heads, kv_heads), strict=True):
            weight = getattr(getattr(module, name, None), "weight", None)
            if weight is not None and weight.numel() != dim:
                shape = (number, dim) if weight.ndim == 2 else (number * dim,)
                weights.put(weight, shape, size=0.2, mean=1.0)


def _make_up_latents(
    weights: MadeUpWeights, attention: Attention, module: Any, loud_value: list[int], loud_out: list[int]
) -> None:
    """Make weights up for latent attention, whose latents keep their size."""
    latents, (heads, _) = attention.latents, narrow_heads(attention)
    dim, value_dim = attention.dim, attention.value_dim
    assert latents is not None
    of_queries, (down, _, up), out = latent_modules(module)
    hidden, own = attention.out.shape[0], dim - attention.shared
    if latents.queries is not None:
        weights.linear(getattr(module, of_queries[0]), latents.queries.size, hidden)
    size = hidden if latents.queries is None else latents.queries.size
    loud_queries = range(dim * (heads // 2), dim * heads)
    weights.linear(getattr(module, of_queries[-1]), heads * dim, size, loud_rows=loud_queries)
    weights.linear(getattr(module, down), latents.keys.size + attention.shared, hidden)
    loud = [index // value_dim * (own + value_dim) + own + index % value_dim for index in loud_value]
    weights.linear(getattr(module, up), heads * (own + value_dim), latents.keys.size, loud_rows=loud)
    weights.linear(getattr(module, out), hidden, heads * value_dim, quiet_columns=loud_out)
