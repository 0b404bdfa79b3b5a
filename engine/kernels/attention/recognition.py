"""Recognition of attention: its heads, and how they are made, turned and compared."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import torch

from engine.attention.base import TEMPERATURE_ATTRIBUTE, LayerShape
from engine.kernels.attention.attention import Attention
from engine.kernels.attention.latent import Latents, is_latent, latent_parts, noted_latent
from engine.kernels.attention.rotary import (
    HEAD_GATES,
    TOKENS,
    Noted,
    QueryFactors,
    Rotary,
    is_gated,
    noted,
    order_of_pairs,
    rotary_of,
)
from engine.kernels.core.base_model import BaseModel, mixer_module
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.norms.norm import Norm
from engine.kernels.products.packing import LANES
from engine.kernels.products.projections import (
    QUERIES_ALONE,
    VALUES_OF_KEYS,
    Linear,
    attention_projections,
    is_joined,
    joined_bias,
    linear_of,
    whole,
)
from engine.model.quantization.attached import reader_of, rows_of


def attention_of(module: Any, shape: LayerShape | None, base: BaseModel) -> Attention:
    """The attention of a module.

    Raises:
        NotRecognised: it has other parts, or does something else with them.
    """
    if shape is None:
        raise NotRecognised(f"the recurrence of {type(module).__name__}")
    dim, value_dim = shape.key_dim, shape.value_dim
    if dim % LANES or value_dim % LANES:
        raise NotRecognised(f"heads of {dim} and {value_dim}")
    if shape.chunk is not None or shape.index_dim or TEMPERATURE_ATTRIBUTE in vars(module):
        raise NotRecognised("chunked attention, chosen keys, or a temperature by position")
    if is_latent(module):
        return _latent_attention(module, shape, base)
    inward, out_name = attention_projections(module)
    source = _source(module, base)
    if (source is not None) != (tuple(inward) == QUERIES_ALONE):
        raise NotRecognised("attention that has no keys of its own, nor another layer's")
    projections = [whole(each) for each in inward.values()]
    if len(projections) == len(VALUES_OF_KEYS):
        projections.append(projections[1])
    gated, head_gates = is_gated(module, shape), _head_gates(module)
    heads, weights = _weights_by_kind(
        projections, shape, is_joined(inward), numbers=2 * dim if gated else dim, has_keys=source is None
    )
    rotary = rotary_of(base.module, module)
    seen = noted(module, rotary, shape, heads, _telling(module.config))
    number, places = _rotary_number(seen, rotary, base.rotaries, dim)
    norms, qkv_bias = seen.turning.norms, joined_bias(projections)
    if gated:
        if seen.turning.wide_norms is not None or (places is not None and qkv_bias is not None):
            raise NotRecognised("a norm over all heads that have gates, or biases of turned pairs")
        qkv_bias = _gates_behind(qkv_bias, heads, dim)
    if head_gates is not None:
        if gated or source is not None or qkv_bias is not None or seen.turning.wide_norms is not None:
            raise NotRecognised("gates of heads beside biases, other gates or other layers' keys")
        if len(head_gates) != heads:
            raise NotRecognised(f"{len(head_gates)} gates of {heads} heads")
    if places is not None:
        everywhere = _everywhere(places, heads + (shape.kv_heads if source is None else 0), dim)
        if norms is not None:
            norms = Norm(norms.weights[everywhere], norms.eps, norms.is_centred)
        if seen.turning.wide_norms is not None:
            raise NotRecognised("a norm over all heads whose numbers are turned in neighbouring pairs")
        if qkv_bias is not None:
            qkv_bias[: len(everywhere)] = qkv_bias[everywhere]
    return replace(
        _plain_attention(module, shape, seen, out_name, weights, inward.values()),
        qkv_bias=qkv_bias,
        head_norms=norms,
        wide_norms=seen.turning.wide_norms,
        is_norm_last=seen.turning.is_norm_last,
        rotary=number,
        places=places,
        heads=heads,
        source=source,
        has_gates=gated,
        head_gates=head_gates,
    )


def _head_gates(module: Any) -> torch.Tensor | None:
    """Weights of a gate for each head; None without one."""
    gates = getattr(module, HEAD_GATES, None)
    if gates is None:
        return None
    found = whole(gates)
    if found.bias is not None:
        raise NotRecognised("gates of heads with a bias")
    return found.weight


def _gates_behind(bias: torch.Tensor | None, heads: int, dim: int) -> torch.Tensor | None:
    """A bias of each head's query and gates, with all queries first."""
    if bias is None:
        return None
    both, others = bias.split([2 * heads * dim, len(bias) - 2 * heads * dim])
    return torch.cat([both.view(heads, 2, dim).transpose(0, 1).flatten(), others])


def _weights_by_kind(
    projections: list[Linear], shape: LayerShape, are_joined: bool, *, numbers: int, has_keys: bool
) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Number of query heads, and weights of queries, keys and values.

    ``numbers``: that a query head has of them. Without keys, weights of queries alone.
    """
    dim, value_dim, kv_heads = shape.key_dim, shape.value_dim, shape.kv_heads
    of_keys = kv_heads * (dim + value_dim) if has_keys else 0
    heads = (sum(each.outputs for each in projections) - of_keys) // numbers
    sizes = (heads * numbers, kv_heads * dim, kv_heads * value_dim)[: 3 if has_keys else 1]
    weights = [each.weight for each in projections]
    if are_joined:
        ends = list(accumulate(sizes, initial=0))
        weights = [rows_of(weights[0], slice(begin, end)) for begin, end in pairwise(ends)]
    if tuple(map(len, weights)) != sizes:
        raise NotRecognised("projections of another size than its heads")
    return heads, tuple(weights)


def _plain_attention(
    module: Any,
    shape: LayerShape,
    seen: Noted,
    out_name: str,
    weights: tuple[torch.Tensor, ...],
    inward: Iterable[Any] = (),
) -> Attention:
    """Attention as seen, without norms, rotation and biases of queries and keys.

    It has as many query heads as key heads.
    """
    out = linear_of(getattr(module, out_name))
    return Attention(
        qkv=weights,
        qkv_bias=None,
        out=out.weight,
        out_bias=out.own_bias,
        modules=(*inward, out.module),
        is_partial=out.is_partial,
        head_norms=None,
        wide_norms=None,
        is_norm_last=False,
        rotary=None,
        places=None,
        heads=shape.kv_heads,
        kv_heads=shape.kv_heads,
        dim=shape.key_dim,
        scale=seen.scale * _constant(seen.factors),
        window=shape.window or 0,
        value_dim=shape.value_dim,
        cap=seen.cap,
        sinks=_copy(seen.sinks),
        factors=_factors(module.config, seen.factors),
        value_norm=seen.value_norm,
    )


def _source(module: Any, base: BaseModel) -> int | None:
    """See :attr:`Attention.source`."""
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    for number, other in enumerate(map(mixer_module, base.layers)):
        if other.store_full_length_kv and other.layer_type == module.layer_type:
            return number
    raise NotRecognised("keys and values of a layer that is not here")


def _latent_attention(module: Any, shape: LayerShape, base: BaseModel) -> Attention:
    dim, value_dim = shape.key_dim, shape.value_dim
    parts = latent_parts(module, shape)
    rotary = rotary_of(base.module, module)
    seen = noted_latent(module, parts, rotary, shape, _telling(module.config))
    shared = parts.latents.num_shared
    number, places = _rotary_number(seen, rotary, base.rotaries, shared)
    if places is None:
        places = torch.arange(shared)
    latents = parts.latents.with_shared_in(places)
    return replace(
        _plain_attention(module, shape, seen, parts.out, (parts.heads.weight,)),
        rotary=number,
        places=torch.cat([dim - shared + places, torch.arange(dim - shared)]),
        latents=latents,
        keeps_latents=_can_keep(latents, dim, value_dim),
    )


def _can_keep(latents: Latents, dim: int, value_dim: int) -> bool:
    """Whether latents can be cached: whether the products of each head fill whole panels.

    It does not depend on the number of heads, so ranks with fewer of them do the same. Where the latent is
    rounded to 8 bits before keys and values are made of it, they are made, and cached.
    """
    reader = reader_of(latents.expand)
    if reader is not None and reader.rounds:
        return False
    shared, pair = latents.num_shared, 2 * LANES
    return not (shared % LANES or (dim - shared) % 2 or value_dim % pair or latents.keys.size % pair)


SAME = 1e-4
"""Largest difference of factors that count as equal."""


def _telling(config: Any) -> torch.Tensor:
    """Positions [TOKENS] at which a factor on queries would show."""
    near = int(_rope(config).get("original_max_position_embeddings") or 0)
    last = int(getattr(config, "max_position_embeddings", 1 << 12)) - 1
    near = near or last // 2
    return torch.tensor([0, 1, near - 1, near, near + 1, max(last, 3 * near)])[:TOKENS]


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _constant(seen: torch.Tensor) -> float:
    """The factor on queries at all positions; 1 if it depends on them."""
    mean = float(seen.double().mean())
    is_one = float(seen.max() - seen.min()) >= SAME or abs(mean - 1) < SAME
    return 1.0 if is_one else mean


def _factors(config: Any, seen: torch.Tensor) -> QueryFactors | None:
    """Factors on queries that fit those seen at some positions; None for none."""
    if float(seen.max() - seen.min()) < SAME:
        return None
    rope = _rope(config)
    growth, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if growth and original:
        factors = QueryFactors(float(growth), int(original))
        if float((seen - factors.table(_telling(config))).abs().max()) < SAME:
            return factors
    raise NotRecognised("queries with a factor that depends on the position")


def _rotary_number(
    seen: Noted, rotary: Rotary | None, rotaries: dict[tuple[str, ...], Rotary], dim: int
) -> tuple[int | None, torch.Tensor | None]:
    """The number of the rotary embedding, and :attr:`Attention.places`."""
    if rotary is None or seen.turning.angles is None:
        return None, None
    number = list(rotaries | {rotary.kind: rotary}).index(rotary.kind)
    rotaries.setdefault(rotary.kind, rotary)
    if seen.turning.angles == "halves":
        return number, None
    width = int(rotary(torch.zeros(1, 1, dtype=torch.int64))[0].shape[-1])
    return number, torch.cat([order_of_pairs(width, seen.turning.angles), torch.arange(width, dim)])


def _everywhere(places: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """Indices that put the numbers of every head into the same order."""
    return (torch.arange(heads)[:, None] * dim + places).flatten()


def _copy(vector: torch.Tensor | None) -> torch.Tensor | None:
    """A copy in float32, since the model's own tensor is emptied."""
    return None if vector is None else vector.detach().to(torch.float32, copy=True)
