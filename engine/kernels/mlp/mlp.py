"""MLPs, gated or not: recognition, weights and operations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.kernels.adapters.sites import Site, in_whole_panels
from engine.kernels.core.operations import OperationKind
from engine.kernels.core.stand_ins import Gives, NotRecognised, with_parts
from engine.kernels.lowering.parts import Packing, PartPlace
from engine.kernels.lowering.product import Product, Rows
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.lowering.writer import Writer, factor_field
from engine.kernels.products.activations import NAMES, Activation, activation_by_results, activation_of
from engine.kernels.products.projections import UNNAMED, joined_bias, linear_of, mlp_projections, whole
from engine.model.quantization.attached import rows_of
from parallel.parts import parts_here

MIDDLE = "middle"
"""Rows between the products of an MLP."""
GATE_FACTOR, FACTOR = "gate_multiplier", "down_multiplier"
"""Names of factors on a gate, and on what an MLP gives."""


@dataclass(frozen=True)
class Mlp:
    """An MLP, gated or not."""

    gate: torch.Tensor | None
    """[width, hidden], like ``up``"""
    up: torch.Tensor
    down: torch.Tensor
    is_partial: bool
    """Whether its result, without the bias, is a sum over the tensor-parallel ranks."""
    width: int
    activation: Activation
    bias: torch.Tensor | None
    """float32, of gate, then of up."""
    down_bias: torch.Tensor | None
    gate_factor: float = 1.0
    """Factor on what the activation is applied to, of an MLP with a gate."""
    factor: float = 1.0
    """Factor on what it gives."""
    modules: tuple[Any, ...] = ()
    """The linear layers: of gate and up, together or apart, then of down."""

    sums_per_token = 1

    @property
    def num_sums(self) -> int:
        return int(self.is_partial)

    def matrices(self) -> list[torch.Tensor]:
        return [each for each in (self.gate, self.up, self.down) if each is not None]

    def scratch(self) -> list[Scratch]:
        return [Scratch(MIDDLE, self.width)]

    def cut_inputs(self) -> list[int]:
        return [self.width] if self.is_partial else []

    def whole(self) -> Mlp:
        return replace(self, is_partial=False)


def mlp_of(module: Any) -> Mlp:
    """The MLP of a module.

    Raises:
        NotRecognised: it has other parts.
    """
    projections = mlp_projections(module)
    if projections is None:
        children = {name for name, _ in module.named_children()}
        raise NotRecognised(f"{type(module).__name__} has the parts {', '.join(sorted(children))}")
    *inward, down = [*map(whole, projections[:-1]), linear_of(projections[-1])]
    width = down.weight.shape[1]
    gate, up = (inward[0].weight, inward[-1].weight) if len(inward) == 2 else (None, inward[0].weight)
    if up.shape[0] == 2 * width:
        gate, up = rows_of(up, slice(0, width)), rows_of(up, slice(width, 2 * width))
    if up.shape[0] != width:
        raise NotRecognised("an MLP whose parts have different widths")
    return Mlp(
        gate=gate,
        up=up,
        down=down.weight,
        is_partial=down.is_partial,
        width=width,
        activation=_activation(module, projections),
        bias=joined_bias(inward),
        down_bias=down.own_bias,
        gate_factor=float(getattr(module, GATE_FACTOR, 1.0)),
        factor=float(getattr(module, FACTOR, 1.0)),
        modules=tuple(projections),
    )


def _activation(module: Any, projections: list[Any]) -> Activation:
    """The activation of an MLP: a part of it, or what its code does."""
    if len(projections) != len(UNNAMED) or any(hasattr(module, name) for name in NAMES):
        return activation_of(module)
    names = {id(part): name for name, part in module.named_children()}
    gate, up, down = (names[id(part)] for part in projections)

    def run(given: torch.Tensor) -> torch.Tensor:
        parts = {gate: Gives(given), up: Gives(torch.ones_like(given)), down: Gives(given)}
        with_parts(module, parts)(given)
        return parts[down].given[0]

    return activation_by_results(run, f"of {type(module).__name__}")


class PackedMlp:
    """The weights of an MLP, and its operations."""

    exchanges = False

    def __init__(self, mlp: Mlp, packing: Packing) -> None:
        self.mlp = mlp
        packer, ranks = packing.packer, packing.ranks if mlp.is_partial else 1
        self.inward = (
            packer.panels(mlp.up, multiple=32) if mlp.gate is None else packer.gate_and_up(mlp.gate, mlp.up)
        )
        """Gate and up, or up alone."""
        self.down = packer.panels(mlp.down, multiple=32, parts=parts_here(mlp.width, ranks))
        *inward, down = mlp.modules or (None,)
        (outputs, hidden), width = mlp.up.shape, mlp.width
        every = outputs * (1 if mlp.gate is None else 2) // max(len(inward), 1)
        order = None if mlp.gate is None else in_whole_panels(torch.arange(2 * width).split(width))
        self.sites = (
            packing.site(Site(tuple(inward), (every,) * len(inward), hidden, order) if inward else None),
            packing.site(None if down is None else Site((down,), (mlp.down.shape[0],), width)),
        )
        """Adapters of gate and up, and of down."""

    def read(self, writer: Writer, place: PartPlace) -> Rows:
        """Write the norm before it; returns the rows that it reads."""
        return writer.norm(place.norm, writer.buffers.normed)

    def add(self, writer: Writer, place: PartPlace, rows: Rows) -> None:
        """Write all that it adds to the stream."""
        writer.add_product(self.product(writer, rows), place.last_norm, place.factor)

    def product(self, writer: Writer, into: Rows, row_factors: torch.Tensor | None = None) -> Product:
        """Write the MLP up to its last product, which is returned.

        ``row_factors``: see :class:`~engine.kernels.lowering.product.Product`.
        """
        mlp, middle = self.mlp, writer.buffers[MIDDLE]
        added = writer.adapted(self.sites[0], into)
        into = writer.rounded(into, self.inward, writer.hidden)
        shape = {"into": into, "out": middle, "n": mlp.width, "k": writer.hidden, "flags": writer.rows}
        given = {"weights": self.inward, "more": mlp.bias, "added": added}
        if mlp.gate is not None:
            factor = factor_field(mlp.gate_factor)
            writer.add(OperationKind.GATED, a=mlp.activation.kind, number=factor, **given, **shape)
        else:
            numbers, kind = mlp.activation.numbers, mlp.activation.kind
            writer.add(OperationKind.LINEAR, extra=numbers, c=kind, **given, **shape)
        bias = mlp.down_bias
        partial, site = mlp.is_partial, self.sites[1]
        return Product(middle, self.down, mlp.width, bias, partial, row_factors, mlp.factor, site)
