"""Recognition of what attention does with queries and keys: norms, rotation and factors.

The module's own code runs on made-up projections, with an attention that takes notes.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import PLAN_KEYWORD, AttentionUse, LayerShape, Scoring
from engine.kernels.core.stand_ins import Gives, NotRecognised, distance, made_up, with_parts
from engine.kernels.norms.norm import Norm, alone, norm_of
from engine.kernels.products.projections import (
    QUERIES_ALONE,
    VALUES_OF_KEYS,
    attention_projections,
    is_joined,
    linear_of,
)
from parallel.tensor_parallel import ParallelRMSNorm

NORMS = ("q_norm", "k_norm"), ("query_layernorm", "key_layernorm"), ("q_layernorm", "k_layernorm")
"""Names of the norms of queries and keys."""
CLOSE = 1e-5
"""Distance of two ways to compute the same."""
VALUE_NORM = "v_norm"
NORM_NAMES = {name for both in NORMS for name in both}
TOKENS = 6
ON_AXES = 300, 1100, 1900
"""Positions on three axes that tell which axis turns a pair."""


class Rotary:
    """A model's rotary embedding, for one kind of layers."""

    def __init__(self, module: Any, *kind: str) -> None:
        """``kind``: of layers, where the module asks for it."""
        self.module = module
        self.kind = kind

    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [1, tokens, numbers that are turned] of positions [1, tokens]."""
        angles = self.given(ids)
        if isinstance(angles, torch.Tensor):  # a complex number for each pair
            angles = torch.cat([angles.real, angles.real], -1), torch.cat([angles.imag, angles.imag], -1)
        cosines, sines = angles
        return cosines.float(), sines.float()

    def given(self, ids: torch.Tensor) -> Any:
        """Position embeddings as attention modules take them, for positions [1, tokens]."""
        return self.module(torch.zeros(1), ids, *self.kind)

    def halves(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, half] of positions [tokens]: each pair of numbers has one."""
        cosines, sines = self(ids.unsqueeze(0))
        return halved(cosines)[0].contiguous(), halved(sines)[0].contiguous()

    def axes(self) -> torch.Tensor:
        """Axis [half] whose position turns each pair, where tokens have three positions.

        Raises:
            NotRecognised: some pairs are turned in another way.
        """
        each = torch.cat(self.halves(torch.tensor(ON_AXES)), dim=-1)
        angles = self.module(torch.zeros(1), torch.tensor(ON_AXES).view(3, 1, 1), *self.kind)
        mixed = torch.cat([halved(part.float())[0] for part in angles], dim=-1)
        far = (each - mixed).abs().unflatten(-1, (2, -1)).amax(1)
        if float(far.amin(0).max()) > CLOSE:
            raise NotRecognised(f"the axes of {type(self.module).__name__}")
        return far.argmin(0)


def halved(angles: torch.Tensor) -> torch.Tensor:
    """Angles [..., half], each once, of numbers that may come in equal pairs.

    Equal ones lie side by side, or half of all apart. Where none are equal, each is for a pair already.
    """
    half = angles.shape[-1] // 2
    if torch.equal(angles[..., :half], angles[..., half:]):
        return angles[..., :half]
    return angles[..., ::2] if torch.equal(angles[..., ::2], angles[..., 1::2]) else angles


@dataclass(frozen=True)
class Turning:
    """Norms and rotation of the heads of queries and keys."""

    norms: Norm | None = None
    """Norm of each head: weights [query heads + KV heads, dim], and no bias."""
    wide_norms: tuple[Norm, Norm] | None = None
    """Norms of all heads of queries together, and of keys."""
    is_norm_last: bool = False
    """Whether norms come behind the rotation."""
    angles: str | None = None
    """Pairing of rotated numbers: ``halves`` or ``neighbours``; None: nothing is rotated."""


@dataclass(frozen=True)
class QueryFactors:
    """Factors on queries that grow with the position, from one original context to the next."""

    growth: float
    original: int
    """Tokens of the original context."""

    def table(self, positions: torch.Tensor) -> torch.Tensor:
        """float32 factors of positions."""
        return 1 + self.growth * torch.log1p((positions // self.original).float())


@dataclass(frozen=True)
class Noted:
    """Observed inputs of a module's attention function: turned heads, scale, cap, sinks."""

    turning: Turning
    value_norm: Norm | None
    """Norm of the values of each head: weights [value dim]."""
    scale: float
    cap: float
    sinks: torch.Tensor | None
    factors: torch.Tensor
    """[tokens] of the queries, at the positions that were asked for."""


class Notes:
    """Attention plan that records its inputs; its results are made up."""

    def __init__(self, value_dim: int) -> None:
        self.use = AttentionUse()
        self._value_dim = value_dim

    def attend(
        self, _layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        self.query, self.key, self.value = (each.transpose(0, 1) for each in (query, key, value))
        self.scale, self.cap, self.sinks = float(scoring.scale), float(scoring.softcap or 0), scoring.sinks
        self.result = made_up(query.shape[1], query.shape[0], self._value_dim, seed=6, dtype=query.dtype)
        return self.result


ROTARIES = "rotary_emb", "pos_emb"
"""Names of a base model's rotary embedding."""


def rotary_of(base: Any, attention: Any) -> Rotary | None:
    """The rotary embedding that a layer is given."""
    module = next((part for name in ROTARIES if (part := getattr(base, name, None)) is not None), None)
    if module is None:
        return None
    if "layer_type" not in inspect.signature(module.forward).parameters:
        return Rotary(module)
    return Rotary(module, attention.config.layer_types[attention.layer_idx])


def noted(
    module: Any, rotary: Rotary | None, shape: LayerShape, heads: int, positions: torch.Tensor
) -> Noted:
    """Observed behaviour of an attention module, for tokens at these positions [TOKENS]."""
    dim, kv_heads = shape.key_dim, shape.kv_heads
    names, out = attention_projections(module)
    raw = [
        made_up(1, TOKENS, number * width, seed=3 + place, dtype=torch.float32)
        for place, (number, width) in enumerate(((heads, dim), (kv_heads, dim), (kv_heads, shape.value_dim)))
    ]
    given = [torch.cat(raw, dim=-1)] if is_joined(names) else raw[: len(names)]
    gates = made_up(1, TOKENS, heads * dim, seed=9, dtype=torch.float32) if is_gated(module, shape) else None
    if gates is not None:
        both = [each.view(1, TOKENS, heads, dim) for each in (raw[0], gates)]
        given[0] = torch.cat(both, dim=-1).flatten(2)
    if len(names) == len(VALUES_OF_KEYS):
        raw[2] = raw[1]
    parts = {name: Gives(each) for name, each in zip(names, given, strict=True)}
    if getattr(module, HEAD_GATES, None) is not None:
        of_heads = made_up(1, TOKENS, heads, seed=9, dtype=torch.float32)
        parts[HEAD_GATES] = Gives(of_heads)
        gates = of_heads.repeat_interleave(shape.value_dim, dim=-1)
    parts |= {name: alone(part) for name, part in module.named_children() if name in NORM_NAMES}
    notes, result = Notes(shape.value_dim), Gives(lambda rows: rows)
    angles = None if rotary is None else rotary(torch.arange(TOKENS)[None])
    with_parts(module, parts | {out: result})(
        hidden_states=made_up(1, TOKENS, 2, seed=7, dtype=torch.float32),
        position_embeddings=angles,
        attention_mask=None,
        position_ids=positions[None],
        **_others_of(module, raw[1:], kv_heads),
        **{PLAN_KEYWORD: notes},
    )
    if gates is not None:
        _check_gates(module, notes, gates, result.given[0])
    query, key = (rows.view(TOKENS, -1, dim) for rows in raw[:2])
    norms = _norms(module)
    ways = list(_ways(module, norms, dim, heads, kv_heads, angles))
    which, rows, seen = (0, query, notes.query) if tuple(names) == QUERIES_ALONE else (1, key, notes.key)
    off = [_off(seen, _turned(rows, which, way, norms, angles)) for way in ways]
    way = ways[off.index(min(off))]
    expected = _turned(query, 0, way, norms, angles)
    factors = (notes.query * expected).sum((1, 2)) / expected.square().sum((1, 2))
    if which:
        expected = _turned(key, 1, way, norms, angles)
        factors *= (notes.key * expected).sum() / expected.square().sum()
    value_norm = _value_norm(module, raw[2].view(TOKENS, -1, shape.value_dim), notes.value)
    return Noted(way, value_norm, notes.scale, notes.cap, notes.sinks, factors)


def _off(seen: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance of rows but for a factor."""
    return distance(seen / seen.norm(), expected / expected.norm())


HEAD_GATES = "g_proj"
"""Name of the projection that gives a gate for each head."""


def is_gated(module: Any, shape: LayerShape) -> bool:
    """Whether the projection of queries gives a gate for each number of the result, too."""
    names, out = attention_projections(module)
    if is_joined(names) or shape.key_dim != shape.value_dim:
        return False
    queries, outputs = (linear_of(each).weight for each in (next(iter(names.values())), getattr(module, out)))
    return int(queries.shape[0]) == 2 * int(outputs.shape[1])


def _check_gates(module: Any, notes: Notes, gates: torch.Tensor, found: torch.Tensor) -> None:
    """Check that results are multiplied by the sigmoids of the gates."""
    expected = notes.result.flatten(1) * gates[0].sigmoid()
    if distance(found.view(TOKENS, -1), expected) > CLOSE:
        raise NotRecognised(f"{type(module).__name__} uses its gates in another way")


def _others_of(module: Any, raw: list[torch.Tensor], kv_heads: int) -> dict[str, Any]:
    """Arguments that some attention modules must be given: keys and values of other layers."""
    if "shared_kv_states" not in inspect.signature(module.forward).parameters:
        return {}
    both = tuple(each.view(1, TOKENS, kv_heads, -1).transpose(1, 2) for each in raw)
    return {"shared_kv_states": {module.layer_type: both}}


def _value_norm(module: Any, raw: torch.Tensor, found: torch.Tensor) -> Norm | None:
    """Norm of values [tokens, heads, dim], found by comparison; None without one."""
    norm = getattr(module, VALUE_NORM, None)
    if norm is None or distance(found, raw) < distance(found, norm(raw)):
        return None
    value_norm = norm_of(norm, raw.shape[-1])
    if value_norm.is_centred:
        raise NotRecognised(f"a norm of values of type {type(norm).__name__}")
    return value_norm


def _norms(module: Any) -> tuple[Any, Any] | None:
    """Norms of queries and of keys; the latter is None where keys are another layer's."""
    found = (pair for pair in NORMS if hasattr(module, pair[0]))
    return next(((getattr(module, query), getattr(module, key, None)) for query, key in found), None)


def _ways(
    module: Any,
    norms: tuple[Any, Any] | None,
    dim: int,
    heads: int,
    kv_heads: int,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> Iterator[Turning]:
    """Combinations of norms and rotation that the kernels can compute for a module."""
    pairs = [None] if angles is None else ["halves", "neighbours", None]
    if norms is None:
        yield from (Turning(angles=pair) for pair in pairs)
        return
    weight = getattr(norms[0], "weight", None)
    is_vector = weight is not None and weight.ndim == 1 and weight.numel() == heads * dim
    wide = is_vector and (heads > 1 or isinstance(norms[0], ParallelRMSNorm))
    if wide:
        each = norm_of(norms[0], heads * dim), norm_of(norms[1], kv_heads * dim)
        yield from (Turning(wide_norms=each, angles=pair) for pair in pairs)
        return
    both = _of_heads(module, norms, dim, heads, kv_heads)
    yield from (
        Turning(norms=both, angles=pair, is_norm_last=last) for pair in pairs for last in (False, True)
    )


def _of_heads(module: Any, norms: tuple[Any, Any], dim: int, heads: int, kv_heads: int) -> Norm:
    """Norms of query heads and key heads, joined into one.

    Weights are repeated for each head, unless each has its own.
    """
    found = []
    for norm, number in zip(norms, (heads, kv_heads), strict=True):
        if norm is None:
            continue
        if getattr(norm, "weight", None) is None or norm.weight.numel() == dim:
            one = norm_of(norm, dim)
            weights = one.weights[:dim].repeat(number)
        else:
            one = _of_own_heads(norm, number, dim)
            weights = one.weights
        if one.is_centred and getattr(norm, "bias", None) is not None:
            raise NotRecognised("a bias in the norms of heads")
        found.append(Norm(weights, one.eps, one.is_centred))
    if len({(each.eps, each.is_centred) for each in found}) > 1:
        raise NotRecognised(f"norms of different kinds in {type(module).__name__}")
    return Norm(torch.cat([each.weights for each in found]), found[0].eps, found[0].is_centred)


def _of_own_heads(norm: Any, number: int, dim: int) -> Norm:
    """A norm of each head with weights [heads, dim] of its own."""
    if tuple(norm.weight.shape) != (number, dim):
        raise NotRecognised(f"a norm of type {type(norm).__name__}")
    given = made_up(1, number, dim, seed=1, dtype=torch.float32) + 0.5
    mean = given.mean(-1, keepdim=True)
    weights, eps = norm.weight.detach().to(torch.float32, copy=True), float(norm.variance_epsilon)
    by_size = given * (given.pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    by_deviation = (given - mean) * ((given - mean).pow(2).mean(-1, keepdim=True) + eps).rsqrt()
    found = norm(given)
    is_centred = distance(found, by_deviation * weights) < distance(found, by_size * weights)
    return Norm(weights.flatten(), eps, is_centred)


def _turned(
    rows: torch.Tensor,
    which: int,
    way: Turning,
    norms: tuple[Any, Any] | None,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Queries (0) or keys (1) [tokens, heads, dim] after given norms and rotation."""

    def normed(given: torch.Tensor) -> torch.Tensor:
        if norms is None:
            return given
        shaped = given.flatten(1) if way.wide_norms is not None else given
        result: torch.Tensor = alone(norms[which])(shaped)
        return result.float().view(given.shape)

    if not way.is_norm_last:
        rows = normed(rows)
    if way.angles is not None and angles is not None:
        rows = rotated(rows, angles, way.angles)
    return normed(rows) if way.is_norm_last else rows


def rotated(rows: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor], pairs: str) -> torch.Tensor:
    """[tokens, heads, dim], whose first numbers are rotated, by angles of the tokens."""
    cosines, sines = (halved(each)[0][:, None] for each in angles)
    width = 2 * cosines.shape[-1]
    turned, rest = rows[..., :width], rows[..., width:]
    places = order_of_pairs(width, pairs)
    first, second = turned[..., places].chunk(2, dim=-1)
    both = torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1)
    result = torch.empty_like(turned)
    result[..., places] = both
    return torch.cat([result, rest], dim=-1)


def order_of_pairs(width: int, pairs: str | None) -> torch.Tensor:
    """Indices of the first numbers of all pairs, then of the second ones."""
    places = torch.arange(width)
    return torch.cat([places[::2], places[1::2]]) if pairs == "neighbours" else places
