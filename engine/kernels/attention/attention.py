"""Attention as the kernels compute it: heads made from the hidden numbers, or from latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.base import LayerShape
from engine.kernels.attention.latent import Latents
from engine.kernels.lowering.parts import PositionTable
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.norms.norm import Norm

PROJECTED, ATTENDED = "projected", "attended"
"""Names of scratch rows: projections before attention, and results of heads."""
LATENT, APART = "latent", "apart"
"""Names of scratch rows: latents behind their norm, and sums of latents.

The second: queries before they meet latents, and sums of latents once they are values.
"""


@dataclass(frozen=True)
class Attention:
    """Weights and properties of one attention layer, as recognised."""

    qkv: tuple[torch.Tensor, ...]
    """Weights of queries [heads * dim, hidden], keys and values [kv_heads * dim, hidden].

    With gates there are twice as many of queries.

    With latents it is queries alone: their weights know how to make keys and values.
    """
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    is_partial: bool
    """Whether its result, without the bias, is a sum over the tensor-parallel ranks."""
    head_norms: Norm | None
    """Norm of each head: weights [heads + kv_heads, dim] of queries, then of keys."""
    wide_norms: tuple[Norm, Norm] | None
    """Norms of all queries together, and of all keys."""
    is_norm_last: bool
    """Whether the norms of heads come behind the rotation."""
    rotary: int | None
    """Number of the rotary embedding that turns queries and keys; None: none does."""
    places: torch.Tensor | None
    """[dim]: order in which the numbers of a head are computed; None: as they are.

    It puts those of a pair half a head apart.
    """
    heads: int
    kv_heads: int
    dim: int
    """Numbers of a query, and of a key."""
    scale: float
    window: int
    value_dim: int
    cap: float = 0.0
    """Scores are ``cap * tanh(score / cap)``; 0 for none."""
    sinks: torch.Tensor | None = None
    """[heads] float32: a logit of each query head that joins the sum of its softmax."""
    factors: PositionTable | None = None
    """Factors on queries by position."""
    value_norm: Norm | None = None
    """Norm of the values of each head: weights [value_dim]."""
    has_gates: bool = False
    """Whether behind the weights of each head's query are those of as many gates.

    Their sigmoids are factors on the heads' results. They are computed between queries and keys.
    """
    head_gates: torch.Tensor | None = None
    """[heads, hidden]: weights of one such gate for each head; None: there are none."""
    source: int | None = None
    """Number of the keys and values that it reads, among those of all layers here.

    It has queries alone then. None: it has its own.
    """
    latents: Latents | None = None
    """Latents that heads are made from; None: from the hidden numbers.

    They lie between queries and keys. Last come the numbers that all keys of a token begin with.
    """
    modules: tuple[Any, ...] = ()
    """Linear layers: of queries, keys and values, then the one behind the heads."""
    sees_all: bool = False
    """Whether queries see keys on both sides, as far as the window reaches on each."""
    keeps_latents: bool = False
    """Whether the latents of keys are cached instead of keys and values.

    Queries are multiplied by what would make keys of them, and sums of latents by what would make values.
    """

    state = None

    @property
    def shared(self) -> int:
        """Numbers that the keys of all heads of a token share, at their beginning."""
        return 0 if self.latents is None else self.latents.num_shared

    @property
    def num_sums(self) -> int:
        return self.is_partial + (self.wide_norms is not None and self.wide_norms[0].over is not None)

    @property
    def cached(self) -> LayerShape:
        window = self.window or None
        if self.latents is None or not self.keeps_latents:
            return LayerShape(self.kv_heads, self.dim, self.value_dim, window)
        size = self.latents.keys.size
        return LayerShape(1, self.shared + size, size, window, apart=self.shared)

    @property
    def projected_width(self) -> int:
        """Numbers of a token's queries, keys and values, and of what they are made from."""
        if self.source is not None:
            return self.heads * self.dim
        latents = 0 if self.latents is None else self.latents.width
        queries = self.heads * self.cached.key_dim + self.gates_width
        if self.keeps_latents:
            return queries + latents
        return queries + latents + self.kv_heads * (self.dim - self.shared + self.value_dim)

    @property
    def gates_width(self) -> int:
        """Numbers of a token's gates."""
        return self.width if self.has_gates or self.head_gates is not None else 0

    @property
    def attended_width(self) -> int:
        """Numbers that are summed up over the keys of a token, for all heads."""
        return self.heads * self.cached.value_dim

    @property
    def width(self) -> int:
        """Width of attention's result for a token, over all heads."""
        return self.heads * self.value_dim

    def matrices(self) -> list[torch.Tensor]:
        latents = [] if self.latents is None else [each.weight for each in self.latents.normed]
        latents += [] if self.latents is None else [self.latents.expand]
        gates = [] if self.head_gates is None else [self.head_gates]
        return [*self.qkv, self.out, *latents, *gates]

    def scratch(self) -> list[Scratch]:
        latents = [] if self.latents is None else [each.size for each in self.latents.normed]
        apart = self.heads * max(self.dim - self.shared, self.value_dim) if self.keeps_latents else 0
        return [
            Scratch(PROJECTED, self.projected_width),
            Scratch(ATTENDED, self.attended_width),
            Scratch(LATENT, max(latents, default=0)),
            Scratch(APART, apart),
        ]

    def tables(self) -> list[PositionTable]:
        return [] if self.factors is None else [self.factors]

    def with_tables(self, made: Callable[[PositionTable], PositionTable]) -> Attention:
        return replace(self, factors=None if self.factors is None else made(self.factors))

    def reading(self, source: int) -> Attention:
        return replace(self, source=source)

    def chosen_as(self, other: Attention) -> Attention:
        return replace(self, keeps_latents=other.keeps_latents)

    def cut_inputs(self) -> list[int]:
        return [self.width] if self.is_partial else []

    def whole(self) -> Attention:
        norms = self.wide_norms
        if norms is not None:
            norms = replace(norms[0], over=None), replace(norms[1], over=None)
        return replace(self, is_partial=False, wide_norms=norms)
