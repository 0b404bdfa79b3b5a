"""Gated delta rules as mixers: recognition of their projections, decays, norm and gate.

A module's own code runs on made-up projections. What reaches its last projection is compared with what the
kernels would compute from the same numbers (``delta.hpp``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from engine.attention.base import LayerShape
from engine.kernels.cache.state_shape import StateShape
from engine.kernels.core.base_model import BaseModel
from engine.kernels.core.stand_ins import NotRecognised, distance
from engine.kernels.lowering.parts import PartialResult, PositionTable
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.products.activations import ActivationKind
from engine.kernels.products.packing import LANES
from engine.kernels.products.projections import linear_of
from engine.kernels.states.conv import Conv, conv_of
from engine.kernels.states.delta_layer import DeltaSizes
from engine.kernels.states.delta_parts import BOUND, DeltaParts, Outputs, parts_of
from engine.states.layers import has_state

INPUTS, CONVOLVED, REDUCED, DECAYS, GATES = (
    "delta inputs",
    "convolved",
    "reduced",
    "delta decays",
    "delta gates",
)
"""Names of scratch rows: projections, convolved numbers, and what few numbers make."""
RULED, WANTED = "ruled", "wanted ruled"
"""Names of scratch rows: results of all tokens, and those of the stream's tokens."""
MOST_DIM = 256
"""Most numbers of a key and of a value (``delta.hpp``)."""
TOKENS = 5
GATE_KINDS = ActivationKind.SILU, ActivationKind.SIGMOID
CLOSE = {torch.float32: 1e-4}
"""Distance of two ways to compute the same; in 16 bits 0.05."""


class Given(NamedTuple):
    """What projections gave for some tokens: [tokens, ...] each."""

    mixed: torch.Tensor
    gates: torch.Tensor
    decays: torch.Tensor
    steps: torch.Tensor


@dataclass(frozen=True)
class Decay:
    """How fast a state decays: from a token's numbers to logarithms of factors."""

    rates: torch.Tensor
    """[heads] float32, below 0."""
    shifts: torch.Tensor
    """[heads] or [heads * key_dim] float32, added to the numbers."""
    by_channel: bool
    """Whether each number of a key has a decay of its own."""
    bound: float = 0.0
    """``bound * sigmoid(-rate * x)``; 0: ``rate * softplus(x)``."""

    def of_rows(self, rows: torch.Tensor, heads: int) -> torch.Tensor:
        """Logarithms [tokens, heads, 1 or key_dim] for a token's numbers."""
        shifted = (rows.double() + self.shifts).view(len(rows), heads, -1)
        rates = self.rates.double()[:, None]
        return self.bound * torch.sigmoid(-rates * shifted) if self.bound else rates * F.softplus(shifted)


@dataclass(frozen=True)
class DeltaRule(PartialResult):
    """Weights and properties of a layer with a gated delta rule, as recognised."""

    mixed: tuple[Outputs, ...]
    """Queries, keys and values, in the order of the convolution's inputs."""
    gates: Outputs
    decays: Outputs
    steps: Outputs
    """Behind a sigmoid: how much of a correction is written."""
    conv: Conv
    decay: Decay
    sizes: DeltaSizes
    step_factor: float
    """Factor on those sigmoids."""
    norm: torch.Tensor
    """[value_dim] float32: weights of the norm of each head's result."""
    eps: float
    gate_kind: ActivationKind
    """Activation of the gates, with which the normalised results are multiplied."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    is_partial: bool

    cached = source = None

    def of_rows(self, given: Given) -> torch.Tensor:
        """What it gives [tokens, width] for a context's first tokens, in float64."""
        heads, key_heads, key_dim, value_dim = self.sizes
        tokens, each = len(given.steps), heads // key_heads
        mixed = self.conv.of_rows(given.mixed).double()
        queries, keys, values = mixed.split([key_heads * key_dim] * 2 + [self.width], dim=1)
        queries, keys = (
            F.normalize(rows.view(tokens, key_heads, key_dim), dim=2).repeat_interleave(each, 1)
            for rows in (queries, keys)
        )
        decays, steps = self.decay.of_rows(given.decays, heads).exp(), given.steps.double().sigmoid()
        state, results = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64), []
        for token in range(tokens):
            key, value = keys[token][..., None], values[token].view(heads, 1, value_dim)
            state = state * decays[token][..., None]
            correction = (value - (key * state).sum(1, keepdim=True)) * steps[token][:, None, None]
            state = state + key * correction * self.step_factor
            results.append((queries[token][..., None] * state).sum(1) * key_dim**-0.5)
        result, gates = torch.stack(results), given.gates.double().view(tokens, heads, value_dim)
        result = result * (result.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.norm
        opened = gates.sigmoid() if self.gate_kind == ActivationKind.SIGMOID else F.silu(gates)
        return (result * opened).flatten(1)

    @property
    def width(self) -> int:
        """Numbers of a token's result, over all heads."""
        return self.sizes.values

    @property
    def decays_width(self) -> int:
        """Numbers that a token's decays are made of."""
        return self.sizes.heads * (self.sizes.key_dim if self.decay.by_channel else 1)

    @property
    def inputs_width(self) -> int:
        """Numbers of a token that are made from the hidden ones at once."""
        gates = self.width if self.gates.down is None else 0
        decays = self.decays_width if self.decays.down is None else 0
        return self.conv.width + gates + decays + self.sizes.heads

    @property
    def state(self) -> StateShape:
        heads, _, key_dim, value_dim = self.sizes
        kept = self.sizes.kept(by_channel=self.decay.by_channel)
        return StateShape(self.conv.kernel, self.conv.width, heads, key_dim, value_dim, head_floats=kept)

    def matrices(self) -> list[torch.Tensor]:
        outputs = (*self.mixed, self.gates, self.decays, self.steps)
        made = [weight for each in outputs for weight in (each.weight, each.down) if weight is not None]
        return [*{id(weight): weight for weight in made}.values(), self.out]

    def scratch(self) -> list[Scratch]:
        downs = [each.down.shape[0] for each in (self.gates, self.decays) if each.down is not None]
        return [
            Scratch(INPUTS, self.inputs_width),
            Scratch(CONVOLVED, self.conv.width),
            Scratch(REDUCED, max(downs, default=0)),
            Scratch(DECAYS, 0 if self.decays.down is None else self.decays_width),
            Scratch(GATES, 0 if self.gates.down is None else self.width),
            Scratch(RULED, self.width),
            Scratch(WANTED, self.width),
        ]

    def cut_inputs(self) -> list[int]:
        return [self.width] if self.is_partial else []

    def whole(self) -> DeltaRule:
        return replace(self, is_partial=False)

    def tables(self) -> list[PositionTable]:
        return []

    def with_tables(self, made: Callable[[PositionTable], PositionTable]) -> DeltaRule:
        return self

    def reading(self, source: int) -> DeltaRule:
        raise AssertionError("it has a state of its own")

    def chosen_as(self, other: Any) -> DeltaRule:
        return self


def delta_rule_of(module: Any, shape: LayerShape | None, base: BaseModel) -> DeltaRule | None:
    """The gated delta rule of a module; None for modules of another kind.

    Raises:
        NotRecognised: it does something else with the same parts.
    """
    parts = parts_of(module) if shape is None and has_state(module) else None
    if parts is None:
        return None
    sizes, out = parts.sizes, linear_of(parts.layer(parts.out))
    if sizes.key_dim % LANES or sizes.value_dim % LANES or max(sizes.key_dim, sizes.value_dim) > MOST_DIM:
        raise NotRecognised(f"a delta rule with keys of {sizes.key_dim} and values of {sizes.value_dim}")
    if any(each.bias is not None for each in parts.linears()):
        raise NotRecognised("projections of a delta rule with biases")
    shifts = parts.owner.dt_bias.detach().to(torch.float32, copy=True).flatten()
    *mixed, gates, decays, steps = map(parts.outputs, parts.sources)
    found = DeltaRule(
        mixed=tuple(mixed),
        gates=gates,
        decays=decays,
        steps=steps,
        conv=conv_of(module.conv1d, is_activated=True),
        decay=Decay(-parts.owner.A_log.detach().float().exp().flatten(), shifts, len(shifts) > sizes.heads),
        sizes=sizes,
        step_factor=1.0,
        norm=parts.norm.weight.detach().to(torch.float32, copy=True),
        eps=float(parts.norm.variance_epsilon),
        gate_kind=ActivationKind.SILU,
        out=out.weight,
        out_bias=out.own_bias,
        is_partial=out.is_partial,
    )
    return _nearest(found, parts)


def _nearest(found: DeltaRule, parts: DeltaParts) -> DeltaRule:
    """The rule, with those choices that give what the module's code gives."""
    rows = parts.made_up_rows(TOKENS)
    *mixed, gates, decays, steps = (each.of(rows) for each in parts.sources)
    given = Given(torch.cat(mixed, dim=1), gates, decays, steps)
    result, ways = parts.run(rows), list(_ways(found, float(getattr(parts.owner, BOUND, None) or 0)))
    off = [distance(result, way.of_rows(given)) for way in ways]
    if not min(off) < CLOSE.get(result.dtype, 0.05):
        raise NotRecognised(f"{type(parts.module).__name__} mixes tokens in another way")
    return ways[off.index(min(off))]


def _ways(found: DeltaRule, bound: float) -> Iterator[DeltaRule]:
    """Rules that the kernels can compute with the same parts."""
    for each, factor, kind in product({0.0, bound}, (1.0, 2.0), GATE_KINDS):
        yield replace(found, decay=replace(found.decay, bound=each), step_factor=factor, gate_kind=kind)
