"""Recognition of latent attention: heads that are made from a few numbers of a token.

Keys and values of all heads come from one such vector, a *latent*, and queries may come from another one. A
part of a key is the same for all heads; that part alone is rotated. The module's own code runs on made-up
projections, with an attention that takes notes. What it does with them shows in the scores: these are the
same, however the numbers of queries and keys are ordered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.base import PLAN_KEYWORD, LayerShape
from engine.kernels.attention.rotary import TOKENS, Noted, Notes, Rotary, Turning, rotated
from engine.kernels.core.stand_ins import Gives, NotRecognised, distance, made_up, with_parts
from engine.kernels.norms.norm import Norm, norm_of
from engine.kernels.products.projections import OUT, Linear, joined_bias, whole

QUERIES = "q_proj"
QUERY_LATENT = "q_a_proj", "q_a_layernorm", "q_b_proj"
PAIRS = "halves", "neighbours"
LATENT = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"


@dataclass(frozen=True)
class Latent:
    """A latent of a token: its projection to few numbers, and the norm behind it."""

    weight: torch.Tensor
    """[numbers, hidden]; other outputs may come behind them."""
    norm: Norm
    size: int
    """Numbers of the latent, known also once its weights are laid out and freed."""


@dataclass(frozen=True)
class Latents:
    """Latents that the heads of an attention layer are made from."""

    queries: Latent | None
    """None: queries are made from the hidden numbers."""
    keys: Latent
    """Latent that keys and values are made from.

    Behind it, its weight makes what all keys of a token share.
    """
    num_shared: int
    expand: torch.Tensor
    """[heads * (own numbers of a key + value_dim), latent]"""
    bias: torch.Tensor | None
    """float32 biases of all these, in the order of computation."""

    @property
    def normed(self) -> list[Latent]:
        """Latents in the order of computation, each with its norm."""
        return [self.keys] if self.queries is None else [self.queries, self.keys]

    @property
    def width(self) -> int:
        """Numbers of a token before the heads are made."""
        return sum(each.size for each in self.normed) + self.num_shared

    def with_shared_in(self, places: torch.Tensor) -> Latents:
        """The same latents, with biases of the shared key numbers in another order."""
        if self.bias is None:
            return self
        begin = self.width - self.num_shared
        return replace(self, bias=torch.cat([self.bias[:begin], self.bias[begin:][places]]))


@dataclass(frozen=True)
class LatentParts:
    """The parts of a module of latent attention."""

    heads: Linear
    """Projection that makes queries."""
    latents: Latents
    out: str
    """Name of the projection behind attention."""


def is_latent(module: Any) -> bool:
    """Whether an attention module has the parts of latent attention."""
    return {name for name, _ in module.named_children()} >= set(LATENT)


def latent_modules(module: Any) -> tuple[list[str], list[str], str]:
    """Names of what makes queries, then keys and values, and of the last projection.

    The first are one projection; or one, a norm, and one.
    """
    names = {name for name, _ in module.named_children()}
    ways = [way for way in ((QUERIES,), QUERY_LATENT) if names.issuperset(way)]
    out = [name for name in OUT if name in names]
    if len(ways) != 1 or len(out) != 1 or names != {*ways[0], *LATENT, out[0]}:
        raise NotRecognised(f"{type(module).__name__} has the parts {', '.join(sorted(names))}")
    return list(ways[0]), list(LATENT), out[0]


def latent_parts(module: Any, shape: LayerShape) -> LatentParts:
    """The weights of a module of latent attention."""
    of_queries, (down, norm, up), out = latent_modules(module)
    keys, expand = whole(getattr(module, down)), whole(getattr(module, up))
    heads = whole(getattr(module, of_queries[-1]))
    size, num_heads = int(expand.weight.shape[1]), shape.kv_heads
    own = shape.key_dim - (keys.outputs - size)
    sizes = num_heads * shape.key_dim, num_heads * (own + shape.value_dim)
    if (
        own <= 0
        or (heads.outputs, expand.outputs) != sizes
        or heads.bias is not None
        or expand.bias is not None
    ):
        raise NotRecognised("latent attention of another shape than its heads")
    before = [] if len(of_queries) == 1 else [whole(getattr(module, of_queries[0]))]
    queries = None
    if before:
        rank = before[0].outputs
        queries = Latent(before[0].weight, norm_of(getattr(module, of_queries[1]), rank), rank)
    latents = Latents(
        queries,
        Latent(keys.weight, norm_of(getattr(module, norm), size), size),
        keys.outputs - size,
        expand.weight,
        joined_bias([*before, keys]),
    )
    return LatentParts(heads, latents, out)


def noted_latent(
    module: Any, parts: LatentParts, rotary: Rotary | None, shape: LayerShape, positions: torch.Tensor
) -> Noted:
    """Observed behaviour of a latent attention module, for tokens at these positions [TOKENS]."""
    heads, dim, shared = shape.kv_heads, shape.key_dim, parts.latents.num_shared
    of_queries, (down, norm, up), out = latent_modules(module)
    sizes = heads * dim, parts.latents.keys.size + shared, heads * (dim - shared + shape.value_dim)
    query, latent, expanded = (
        made_up(1, TOKENS, size, seed=3 + place, dtype=torch.float32) for place, size in enumerate(sizes)
    )
    notes, ids = Notes(shape.value_dim), torch.arange(TOKENS)[None]
    stand_ins = {name: Gives(query) for name in of_queries}
    stand_ins |= {down: Gives(latent), norm: Gives(latent[..., :-shared].contiguous())}
    stand_ins |= {up: Gives(expanded), out: Gives(lambda rows: rows)}
    with_parts(module, stand_ins)(
        hidden_states=made_up(1, TOKENS, 2, seed=7, dtype=torch.float32),
        position_embeddings=None if rotary is None else rotary.given(ids),
        attention_mask=None,
        position_ids=positions[None],
        **{PLAN_KEYWORD: notes},
    )
    queries = query.view(TOKENS, heads, dim).split([dim - shared, shared], dim=-1)
    own = expanded.view(TOKENS, heads, -1)[..., : dim - shared]
    keys = own, latent[0, :, None, -shared:].expand(-1, heads, -1)
    found = torch.einsum("qhd,khd->hqk", notes.query, notes.key)
    ways = [(None, None)] if rotary is None else [(pairs, rotary(ids)) for pairs in (*PAIRS, None)]
    scores = {pairs: _scores(queries, keys, pairs, angles) for pairs, angles in ways}
    best = min(scores, key=lambda pairs: distance(found, scores[pairs]))
    factors = (found * scores[best]).sum((0, 2)) / scores[best].square().sum((0, 2))
    return Noted(Turning(angles=best), None, notes.scale, notes.cap, notes.sinks, factors)


def _scores(
    queries: tuple[torch.Tensor, ...],
    keys: tuple[torch.Tensor, ...],
    pairs: str | None,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """Scores [heads, queries, keys] of both parts [tokens, heads, dim]; the second one is rotated."""
    if pairs is not None and angles is not None:
        queries, keys = ((own, rotated(turned, angles, pairs)) for own, turned in (queries, keys))
    return sum(
        (torch.einsum("qhd,khd->hqk", query, key) for query, key in zip(queries, keys, strict=True)),
        torch.zeros(()),
    )
