"""A decoder's weights as the kernels want them, laid out once (:mod:`engine.kernels.packing`)."""

from __future__ import annotations

import torch

from engine.kernels.decoder import Attention, Decoder, Layer, Mlp, Moe
from engine.kernels.experts import PackedExperts
from engine.kernels.packing import Packer
from engine.kernels.recognition.per_layer import LayerInput


def num_bytes(decoder: Decoder) -> int:
    """Bytes of a decoder's weights when laid out without compression.

    Spread experts that are here count, too.
    """
    weights: list[torch.Tensor] = [] if decoder.output is None else [decoder.output.head]
    if decoder.embedding is not None and decoder.embedding.inputs is not None:
        weights.append(decoder.embedding.inputs.projection)
    for layer in decoder.layers:
        mlp = layer.mlp
        weights += [*layer.attention.qkv, layer.attention.out]
        weights += [] if layer.input is None else [layer.input.gate, layer.input.out]
        for dense in (mlp if isinstance(mlp, Mlp) else mlp.shared,):
            parts = () if dense is None else (dense.gate, dense.up, dense.down)
            weights += [each for each in parts if each is not None]
        if isinstance(mlp, Moe):
            weights += [mlp.router, mlp.experts.gate_up_proj, mlp.experts.down_proj]
    total: int = sum(weight.numel() * weight.itemsize for weight in weights)
    return total


class PackedMlp:
    """The weights of an MLP."""

    def __init__(self, mlp: Mlp, packer: Packer) -> None:
        self.mlp = mlp
        self.inward = (
            packer.panels(mlp.up, multiple=32) if mlp.gate is None else packer.gate_and_up(mlp.gate, mlp.up)
        )
        """Gate and up, or up alone."""
        self.down = packer.panels(mlp.down, multiple=32)


class PackedMoe:
    """The weights of a mixture."""

    def __init__(self, moe: Moe, packer: Packer, dtype: torch.dtype, *, spread: bool) -> None:
        self.moe = moe
        self.router = packer.panels(moe.router, multiple=32)
        self.routing = moe.routing.record(dtype)
        self.shared = None if moe.shared is None else PackedMlp(moe.shared, packer)
        self.shared_gate = None if moe.shared_gate is None else packer.panels(moe.shared_gate, multiple=32)
        self.experts: PackedExperts | None = None
        if not spread:
            self.experts = PackedExperts.of(moe.experts, moe.form, packer)


class PackedInput:
    """The weights for a layer's input beside the stream."""

    def __init__(self, layer_input: LayerInput, packer: Packer) -> None:
        self.input = layer_input
        self.gate = packer.panels(layer_input.gate, multiple=32)
        self.out = packer.panels(layer_input.out, multiple=32)


class PackedLayer:
    """The weights of one layer."""

    def __init__(self, layer: Layer, packer: Packer, *, spread: bool) -> None:
        """``spread``: its experts come and go, so they are packed when they are used."""
        attention = layer.attention
        self.layer = layer
        self.qkv = packer.panels(*_projections(attention), multiple=32)
        self.out = packer.panels(attention.out, multiple=32)
        self.mlp: PackedMlp | PackedMoe
        if isinstance(layer.mlp, Mlp):
            self.mlp = PackedMlp(layer.mlp, packer)
        else:
            self.mlp = PackedMoe(layer.mlp, packer, attention.out.dtype, spread=spread)
        self.input = None if layer.input is None else PackedInput(layer.input, packer)


def _projections(attention: Attention) -> list[torch.Tensor]:
    """Weights of queries, keys and values, their heads in the order of computation."""
    turned, values = attention.qkv[:2], attention.qkv[2:]
    if attention.places is None:
        return [*attention.qkv]
    ordered = [
        weight.data.unflatten(0, (-1, attention.dim))[:, attention.places].flatten(0, 1) for weight in turned
    ]
    return [*ordered, *values]


class PackedDecoder:
    """The weights of all layers, and of the output layer.

    The embedding and the norms are read as they are.
    """

    def __init__(self, decoder: Decoder, packer: Packer, *, spread: bool) -> None:
        self.decoder = decoder
        self.layers = [PackedLayer(layer, packer, spread=spread) for layer in decoder.layers]
        self.head = None if decoder.output is None else packer.panels(decoder.output.head, multiple=32)
        inputs = None if decoder.embedding is None else decoder.embedding.inputs
        self.inputs = None if inputs is None else packer.panels(inputs.projection, multiple=32)
        """What makes the layers' inputs beside the stream."""

    def __repr__(self) -> str:
        return f"<PackedDecoder {len(self.layers)} layers, {self.decoder.dtype}>"
