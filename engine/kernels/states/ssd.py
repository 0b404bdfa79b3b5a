"""State space duality (Mamba 2): recognition of a layer, and its weights.

A token's row is projected to a gate, to what a short convolution reads (x, B and C), and to a step size of
each head. Behind the heads come a gate and a norm in groups, in either order. What the module's code makes of
made-up projections decides what is recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from engine.attention.base import LayerShape
from engine.kernels.cache.state_shape import StateShape
from engine.kernels.core.base_model import BaseModel
from engine.kernels.core.stand_ins import Gives, NotRecognised, distance, made_up, with_parts
from engine.kernels.lowering.parts import PartialResult, PositionTable
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.products.projections import linear_of, whole
from engine.kernels.states.conv import Conv, conv_of
from engine.kernels.states.ssd_sizes import Sizes

PROJECTED, CONVOLVED, MIXED_HEADS, GATED_HEADS, WANTED_HEADS = (
    "projected",
    "convolved",
    "mixed heads",
    "gated heads",
    "wanted heads",
)
"""Names of scratch rows: projections, what the convolution gives, and results of heads.

The latter in float32, then behind gate and norm, then of those tokens whose logits are wanted.
"""
PARTS = "in_proj", "conv1d", "out_proj"
OWN = {"A_log", "D", "dt_bias"}
"""Names of a module's parts, and of its own weights."""
COLUMN_FACTORS = "mup_vector"
"""Name of factors on the projections, if a module has some."""
TOKENS = 7
"""Made-up tokens that a module is seen with."""
CLOSE = 1e-5
"""Distance of two ways to compute the same in float32."""


@dataclass(frozen=True)
class HeadNorm:
    """Norm of the heads' results in equal parts."""

    weights: torch.Tensor
    """[inner] float32"""
    eps: float
    parts: int
    is_last: bool
    """Whether it comes behind the gate."""


@dataclass(frozen=True)
class Ssd(PartialResult):
    """Weights and properties of one layer, as recognised."""

    sizes: Sizes
    inward: torch.Tensor
    """[projected, hidden]"""
    inward_bias: torch.Tensor | None
    inward_factor: float
    """Factor on what the first product gives, without its bias."""
    conv: Conv
    """Convolution of x, B and C."""
    of_heads: torch.Tensor
    """[4, heads] float32: A, what is added to step sizes, D, and factors on those."""
    limits: tuple[float, float]
    """Least and greatest step size."""
    gate_factor: float
    norm: HeadNorm | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    is_partial: bool
    """Whether its result, without the bias, is a sum over the tensor-parallel ranks."""

    cached = source = None

    @property
    def state(self) -> StateShape:
        return self.sizes.state(self.conv.kernel)

    def matrices(self) -> list[torch.Tensor]:
        return [self.inward, self.out]

    def scratch(self) -> list[Scratch]:
        sizes = self.sizes
        return [
            Scratch(PROJECTED, sizes.projected),
            Scratch(CONVOLVED, sizes.convolved),
            Scratch(MIXED_HEADS, sizes.inner, dtype=torch.float32),
            Scratch(GATED_HEADS, sizes.inner),
            Scratch(WANTED_HEADS, sizes.inner),
        ]

    def tables(self) -> list[PositionTable]:
        return []

    def with_tables(self, made: Callable[[PositionTable], PositionTable]) -> Ssd:
        return self

    def reading(self, source: int) -> Ssd:
        raise AssertionError("it has a state of its own")

    def chosen_as(self, other: Any) -> Ssd:
        return self

    def cut_inputs(self) -> list[int]:
        return [self.sizes.inner] if self.is_partial else []

    def whole(self) -> Ssd:
        return replace(self, is_partial=False)


def ssd_of(module: Any, shape: LayerShape | None, base: BaseModel) -> Ssd | None:
    """The layer of a module; None for modules of another kind.

    Raises:
        NotRecognised: it has such parts, and computes something else.
    """
    children = {name for name, part in module.named_children() if next(part.parameters(), None) is not None}
    own = {name for name, _ in module.named_parameters(recurse=False)}
    if own != OWN or not set(PARTS) <= children <= {*PARTS, "norm"}:
        return None
    sizes = Sizes(
        *(int(getattr(module, name)) for name in ("num_heads", "n_groups", "head_dim", "ssm_state_size"))
    )
    inward, out = whole(module.in_proj), linear_of(module.out_proj)
    conv = conv_of(module.conv1d, is_activated=True)
    if inward.outputs != sizes.projected or conv.width != sizes.convolved or sizes.heads % sizes.groups:
        raise NotRecognised(f"{type(module).__name__} with projections of another size than its heads")
    columns = _column_factors(module, sizes)
    gate_factor, of_convolved, of_steps = columns.split([sizes.inner, sizes.convolved, sizes.heads])
    if float(gate_factor.max() - gate_factor.min()) > CLOSE:
        raise NotRecognised("factors on a gate that differ")
    least, greatest = module.time_step_limit
    found = Ssd(
        sizes=sizes,
        inward=inward.weight,
        inward_bias=inward.own_bias,
        inward_factor=1.0,
        conv=replace(conv, weights=conv.weights * of_convolved),
        of_heads=torch.stack(
            [-module.A_log.float().exp(), module.dt_bias.float(), module.D.float(), of_steps]
        ),
        limits=(float(least), float(greatest)),
        gate_factor=float(gate_factor[0]),
        norm=None,
        out=out.weight,
        out_bias=out.own_bias,
        is_partial=out.is_partial,
    )
    return _seen(module, found, base.hidden)


def _column_factors(module: Any, sizes: Sizes) -> torch.Tensor:
    """[projected] float32: factors on projections, if there are any."""
    factors = getattr(module, COLUMN_FACTORS, None)
    return torch.ones(sizes.projected) if factors is None else _copy(factors.flatten())


def _seen(module: Any, ssd: Ssd, hidden: int) -> Ssd:
    """The layer with the norm, and the factor, that the module is seen to have."""
    rows = made_up(1, TOKENS, hidden, seed=1, dtype=torch.float32)
    projected = made_up(1, TOKENS, ssd.sizes.projected, seed=2, dtype=torch.float32)
    projected[..., -ssd.sizes.heads :] *= 3.0  # step sizes on both sides of their limits
    inward, out = Gives(projected), Gives(lambda given: given)
    parts = {"in_proj": inward, "out_proj": out, "conv1d": _as_float(module.conv1d)}
    if "norm" in module._modules:
        parts["norm"] = _as_float(module.norm)
    made = with_parts(module, parts)
    made.__dict__.pop("forward", None)  # where it is computed on a grid
    made.training = False
    made._parameters = {name: _copy(weight) for name, weight in module._parameters.items()}
    made._buffers = {name: _copy(buffer) for name, buffer in module._buffers.items()}
    found = made(rows)[0]
    given = inward.given[0].flatten()
    factor = float(given @ rows.flatten() / rows.flatten().square().sum())
    ssd = replace(ssd, inward_factor=round(factor, 12))
    mixed = heads_of(ssd, projected[0].double())
    gate = F.silu(projected[0, :, : ssd.sizes.inner].double() * ssd.gate_factor)
    for norm in _norms(module, ssd.sizes):
        if distance(found, gated(mixed, gate, norm)) < CLOSE:
            return replace(ssd, norm=norm)
    raise NotRecognised(f"{type(module).__name__} computes something else of its projections")


def _norms(module: Any, sizes: Sizes) -> list[HeadNorm | None]:
    """The norms that a module may have behind its heads."""
    weight = getattr(getattr(module, "norm", None), "weight", None)
    if weight is None:
        return [None]
    eps = float(module.norm.variance_epsilon)
    return [
        HeadNorm(_copy(weight), eps, parts, is_last)
        for is_last in (True, False)
        for parts in dict.fromkeys((sizes.groups, 1, sizes.heads))
    ]


def heads_of(ssd: Ssd, projected: torch.Tensor) -> torch.Tensor:
    """Results [tokens, inner] of the heads for the first tokens of a context."""
    sizes, kind = ssd.sizes, projected.dtype
    given = ssd.conv.of_rows(projected[:, sizes.inner : sizes.inner + sizes.convolved]).to(kind)
    x, b, c = given.split([sizes.inner, *(2 * [sizes.groups * sizes.size])], dim=1)
    x = x.unflatten(1, (sizes.heads, -1))
    b, c = (
        each.unflatten(1, (sizes.groups, -1)).repeat_interleave(sizes.heads // sizes.groups, dim=1)
        for each in (b, c)
    )
    decay, bias, skip, scale = ssd.of_heads.to(kind)
    steps = F.softplus(projected[:, -sizes.heads :] * scale + bias).clamp(*ssd.limits)
    state, rows = torch.zeros(sizes.heads, sizes.size, sizes.width, dtype=kind), []
    for token, step in enumerate(steps):
        added = b[token][:, :, None] * (step[:, None] * x[token])[:, None]
        state = (step * decay).exp()[:, None, None] * state + added
        rows.append((c[token][:, :, None] * state).sum(1) + skip[:, None] * x[token])
    return torch.stack(rows).flatten(1)


def gated(mixed: torch.Tensor, gate: torch.Tensor, norm: HeadNorm | None) -> torch.Tensor:
    """Results of heads with their gate and norm."""
    if norm is None:
        return mixed * gate
    given = (mixed * gate if norm.is_last else mixed).unflatten(-1, (norm.parts, -1))
    normed = (given * (given.square().mean(-1, keepdim=True) + norm.eps).rsqrt()).flatten(-2) * norm.weights
    return normed if norm.is_last else normed * gate


def _as_float(module: Any) -> Any:
    """A copy of a module in float32."""
    made = with_parts(module, {})
    made._parameters = {name: _copy(weight) for name, weight in module._parameters.items()}
    return made


def _copy(tensor: torch.Tensor | None) -> Any:
    """A copy in float32, since the model's own tensor is emptied."""
    return None if tensor is None else tensor.detach().to(torch.float32, copy=True)
