"""Inputs that layers have beside the stream, from a second embedding.

They are read from attributes. Whether that is what the model computes is tried elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.core.base_model import PROJECTION, TABLE, TABLE_NORM
from engine.kernels.core.operations import OperationKind
from engine.kernels.core.stand_ins import NotRecognised, with_parts
from engine.kernels.lowering.parts import Packing
from engine.kernels.lowering.product import Product
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.lowering.writer import Writer
from engine.kernels.norms.norm import Norm, norm_of
from engine.kernels.products.activations import Activation, activation_of
from engine.kernels.products.projections import whole

GATE, OUT, NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
"""Names of a layer's parts for its input."""
INPUTS, GATED_INPUT = "inputs", "middle"
"""Rows of all layers' inputs, token by token; and of one layer's, behind its gate."""
WIDTH = "hidden_size_per_layer_input"
"""Attribute of a layer: numbers of its input."""


@dataclass(frozen=True)
class LayerInput:
    """A layer's own input beside the stream, and the weights that use it.

    It adds ``norm((act(stream x gate) * input) x out)`` to the stream.
    """

    width: int
    """Numbers of its input."""
    gate: torch.Tensor
    """[width, hidden]"""
    activation: Activation
    out: torch.Tensor
    """[hidden, width]"""
    norm: Norm
    place: int
    """Number of the layer among all that have an input."""
    total: int
    """Numbers of a token's inputs of all layers."""

    def matrices(self) -> list[torch.Tensor]:
        """Weights that packing lays out."""
        return [self.gate, self.out]

    def scratch(self) -> list[Scratch]:
        """Rows that its operations hand on."""
        return [Scratch(INPUTS, self.total, is_input=False), Scratch(GATED_INPUT, self.width)]


@dataclass(frozen=True)
class LayerInputs:
    """Inputs of all layers: ``(norm(embedded x projection) + table[token]) * factor``."""

    table: torch.Tensor
    """[tokens, layers * width]"""
    factors: torch.Tensor
    """float32: on the table, and on the sum."""
    projection: torch.Tensor
    """[layers * width, hidden]"""
    projection_factor: float
    norm: Norm
    """Norm of the numbers of each layer."""
    padding: int
    """Token that stands for the rows of images."""

    @property
    def width(self) -> int:
        return int(self.norm.weights.numel())


def input_of(layer: Any, hidden: int, place: int, layers: int) -> LayerInput | None:
    """The input of a layer; None if it has none."""
    if not hasattr(layer, GATE):
        return None
    gate, out = whole(getattr(layer, GATE)), whole(getattr(layer, OUT))
    if gate.bias is not None or out.bias is not None:
        raise NotRecognised("a layer's own input with biases")
    norm, width = norm_of(getattr(layer, NORM), hidden), gate.outputs
    return LayerInput(width, gate.weight, activation_of(layer), out.weight, norm, place, layers * width)


def without_input(layer: Any) -> Any:
    """A copy of a layer that ignores its input beside the stream."""
    if not hasattr(layer, GATE):
        return layer
    made = with_parts(layer, {})
    for name in (GATE, OUT, NORM, "act_fn"):
        made._modules.pop(name, None)
    setattr(made, WIDTH, 0)
    return made


def inputs_of(base: Any, dtype: torch.dtype) -> LayerInputs | None:
    """Weights of the inputs of a base model's layers; None if these have none."""
    table = getattr(base, TABLE, None)
    if table is None:
        return None
    projection = whole(getattr(base, PROJECTION))
    norm = norm_of(getattr(base, TABLE_NORM), int(getattr(base, WIDTH)))
    factors = [float(torch.as_tensor(table.embed_scale).to(dtype)), float(base.per_layer_input_scale)]
    factor = float(base.per_layer_model_projection_scale)
    padding = getattr(base, "padding_idx", None) or 0
    return LayerInputs(table.weight, torch.tensor(factors), projection.weight, factor, norm, padding)


def without_inputs(base: Any) -> Any:
    """A base model whose layers are given no inputs of their own."""
    made = with_parts(base, {})
    setattr(made, WIDTH, 0)
    return made


class PackedInput:
    """The weights for a layer's input beside the stream, and its operations."""

    def __init__(self, layer_input: LayerInput, packing: Packing) -> None:
        self.input = layer_input
        self.gate = packing.packer.panels(layer_input.gate, multiple=32)
        self.out = packing.packer.panels(layer_input.out, multiple=32)

    def add(self, writer: Writer) -> None:
        """Write what the layer makes of its input, which is added to the stream."""
        own, middle, inputs = self.input, writer.buffers[GATED_INPUT], writer.buffers[INPUTS]
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(writer.stream, self.gate, writer.hidden),
            out=middle,
            weights=self.gate,
            extra=own.activation.numbers,
            c=own.activation.kind,
            n=own.width,
            k=writer.hidden,
            flags=writer.rows,
        )
        begin = inputs.data_ptr() + own.place * own.width * inputs.element_size()
        writer.add(OperationKind.TIMES, into=begin, out=middle, n=own.total, k=own.width, flags=writer.rows)
        writer.add_product(Product(middle, self.out, own.width, None, False), own.norm, 1.0)
