"""Short convolutions between two gates, as mixers: recognition, weights and operations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.base import LayerShape
from engine.kernels.cache.state_shape import StateShape
from engine.kernels.core.base_model import BaseModel
from engine.kernels.core.operations import OperationKind
from engine.kernels.core.stand_ins import Gives, NotRecognised, distance, made_up, with_parts
from engine.kernels.lowering.parts import KeptNumbers, Packing, PartialResult, PositionTable
from engine.kernels.lowering.product import Product, Rows
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.lowering.writer import Writer
from engine.kernels.products.made_up import MadeUpWeights
from engine.kernels.products.projections import joined_bias, linear_of, whole
from engine.kernels.states.conv import Conv, conv_of
from engine.states.layers import has_state

PARTS = {"in_proj", "conv", "out_proj"}
GATED_INPUTS, MIXED, WANTED = "gated inputs", "mixed", "wanted mixed"
"""Names of scratch rows: projections, results of all tokens, and those of the stream's tokens."""
TOKENS = 5
CLOSE = {torch.float32: 1e-5}
"""Distance of two ways to compute the same; in 16 bits 0.03."""


@dataclass(frozen=True)
class ShortConv(PartialResult):
    """A convolution between two gates, each of which is a projection of a token."""

    inward: torch.Tensor
    """[3 * width, hidden]"""
    inward_bias: torch.Tensor | None
    conv: Conv
    gate: int
    """Number of the projection that gates the convolution's result."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    is_partial: bool

    cached = source = None

    @property
    def width(self) -> int:
        return self.conv.width

    @property
    def state(self) -> StateShape:
        return StateShape(kernel=self.conv.kernel, width=self.width)

    def matrices(self) -> list[torch.Tensor]:
        return [self.inward, self.out]

    def scratch(self) -> list[Scratch]:
        return [
            Scratch(GATED_INPUTS, 3 * self.width),
            Scratch(MIXED, self.width),
            Scratch(WANTED, self.width),
        ]

    def cut_inputs(self) -> list[int]:
        return [self.width] if self.is_partial else []

    def whole(self) -> ShortConv:
        return replace(self, is_partial=False)

    def tables(self) -> list[PositionTable]:
        return []

    def with_tables(self, made: Callable[[PositionTable], PositionTable]) -> ShortConv:
        return self

    def reading(self, source: int) -> ShortConv:
        raise AssertionError("it has a state of its own")

    def chosen_as(self, other: Any) -> ShortConv:
        return self


def short_conv_of(module: Any, shape: LayerShape | None, base: BaseModel) -> ShortConv | None:
    """The short convolution of a module; None for modules of another kind.

    Raises:
        NotRecognised: it does something else with the same parts.
    """
    if shape is not None or not has_state(module) or {name for name, _ in module.named_children()} != PARTS:
        return None
    inward, out, conv = whole(module.in_proj), linear_of(module.out_proj), conv_of(module.conv)
    if inward.outputs != 3 * conv.width or out.weight.shape[1] != conv.width:
        raise NotRecognised(f"{type(module).__name__} has projections of other sizes")
    return ShortConv(
        inward=inward.weight,
        inward_bias=joined_bias([inward]),
        conv=conv,
        gate=_gate(module, conv),
        out=out.weight,
        out_bias=out.own_bias,
        is_partial=out.is_partial,
    )


def _gate(module: Any, conv: Conv) -> int:
    """Number of the projection that the module multiplies the convolution's result by."""
    dtype = module.conv.weight.dtype
    given = made_up(1, TOKENS, 3 * conv.width, seed=1, dtype=dtype)
    hidden = made_up(1, TOKENS, module.in_proj.weight.shape[1], seed=2, dtype=dtype)
    out = Gives(hidden)
    alone = with_parts(module, {"in_proj": Gives(given), "out_proj": out})
    alone.__dict__.pop("forward", None)  # the one that computes on the grid
    alone(hidden)
    parts = given[0].float().chunk(3, dim=-1)
    for gate in range(3):
        one, other = (part for number, part in enumerate(parts) if number != gate)
        expected = parts[gate] * conv.of_rows(one * other)
        if len(out.given) == 1 and distance(out.given[0][0], expected) < CLOSE.get(dtype, 0.03):
            return gate
    raise NotRecognised(f"{type(module).__name__} mixes tokens in another way")


class PackedShortConv:
    """The weights of a short convolution, and its operations."""

    def __init__(self, mixer: ShortConv, packing: Packing) -> None:
        self.mixer = mixer
        self.inward = packing.packer.panels(mixer.inward, multiple=32)
        self.out = packing.packer.panels(mixer.out, multiple=32)

    def project(self, writer: Writer, into: Rows, kept: KeptNumbers) -> None:
        """Write the projections, and the convolution between its gates."""
        mixer, buffers = self.mixer, writer.buffers
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(into, self.inward, writer.hidden),
            out=buffers[GATED_INPUTS],
            weights=self.inward,
            more=mixer.inward_bias,
            n=3 * mixer.width,
            k=writer.hidden,
        )
        one, other = (number * mixer.width for number in range(3) if number != mixer.gate)
        mixer.conv.write(
            writer,
            buffers[GATED_INPUTS],
            buffers[MIXED],
            writer.layer_state(kept.state),
            n=3 * mixer.width,
            a=other,
            b=one,
            c=mixer.gate * mixer.width,
        )

    def mix(self, writer: Writer, kept: KeptNumbers) -> Product:
        """Write the choice of the stream's rows: only the last product is left."""
        mixer, buffers = self.mixer, writer.buffers
        rows = writer.selected(buffers[MIXED], buffers[WANTED], mixer.width)
        return Product(rows, self.out, mixer.width, mixer.out_bias, mixer.is_partial)


def make_up(weights: MadeUpWeights, mixer: ShortConv, module: Any) -> None:
    """Make weights up for a short convolution, all of its numbers.

    Half of the gates' numbers are loud, and what the last product reads of them is quiet.
    """
    width, hidden = mixer.width, mixer.out.shape[0]
    loud = range(width // 2, width)
    rows = [mixer.gate * width + number for number in loud]
    weights.linear(module.in_proj, 3 * width, hidden, loud_rows=rows)
    weights.linear(module.out_proj, hidden, width, quiet_columns=loud)
    mixer.conv.make_up(weights, module.conv)
