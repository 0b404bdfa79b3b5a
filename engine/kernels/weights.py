"""A decoder's weights as the kernels want them, laid out once (:mod:`engine.kernels.packing`)."""

from __future__ import annotations

import torch

from engine.kernels.decoder import Attention, Decoder, Layer, Mlp
from engine.kernels.experts import PackedExperts
from engine.kernels.packing import Packer


def num_bytes(decoder: Decoder) -> int:
    """Bytes of a decoder's weights when laid out without compression.

    Spread experts that are here count, too.
    """
    weights: list[torch.Tensor] = [] if decoder.output is None else [decoder.output.head]
    for layer in decoder.layers:
        mlp = layer.mlp
        weights += [*layer.attention.qkv, layer.attention.out]
        if isinstance(mlp, Mlp):
            weights += [each for each in (mlp.gate, mlp.up, mlp.down) if each is not None]
        else:
            weights.append(mlp.router)
        if not isinstance(mlp, Mlp):
            weights += [mlp.experts.gate_up_proj, mlp.experts.down_proj]
    total: int = sum(weight.numel() for weight in weights) * decoder.dtype.itemsize
    return total


class PackedLayer:
    """The weights of one layer."""

    def __init__(self, layer: Layer, packer: Packer, *, spread: bool) -> None:
        """``spread``: its experts come and go, so they are packed when they are used."""
        attention = layer.attention
        self.layer = layer
        self.qkv = packer.panels(*_projections(attention), multiple=32)
        self.out = packer.panels(attention.out, multiple=32)
        self.gate_up = self.up = self.down = self.router = None
        self.experts: PackedExperts | None = None
        if isinstance(layer.mlp, Mlp):
            if layer.mlp.gate is None:
                self.up = packer.panels(layer.mlp.up, multiple=32)
            else:
                self.gate_up = packer.gate_and_up(layer.mlp.gate, layer.mlp.up)
            self.down = packer.panels(layer.mlp.down, multiple=32)
        else:
            self.router = packer.panels(layer.mlp.router, multiple=32)
            if not spread:
                module = layer.mlp.experts
                self.experts = PackedExperts.of(module.gate_up_proj, module.down_proj, packer)


def _projections(attention: Attention) -> list[torch.Tensor]:
    """Weights of queries, keys and values, their heads in the order of computation."""
    query, key, value = attention.qkv
    if attention.places is None:
        return [query, key, value]
    ordered = [
        weight.data.unflatten(0, (-1, attention.dim))[:, attention.places].flatten(0, 1)
        for weight in (query, key)
    ]
    return [*ordered, value]


class PackedDecoder:
    """The weights of all layers, and of the output layer.

    The embedding and the norms are read as they are.
    """

    def __init__(self, decoder: Decoder, packer: Packer, *, spread: bool) -> None:
        self.decoder = decoder
        self.layers = [PackedLayer(layer, packer, spread=spread) for layer in decoder.layers]
        self.head = None if decoder.output is None else packer.panels(decoder.output.head, multiple=32)

    def __repr__(self) -> str:
        return f"<PackedDecoder {len(self.layers)} layers, {self.decoder.dtype}>"
