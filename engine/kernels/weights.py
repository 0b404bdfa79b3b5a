"""A decoder's weights as the kernels want them, laid out once (:mod:`engine.kernels.packing`)."""

from __future__ import annotations

import torch

from engine.kernels.decoder import Decoder, Layer, Mlp
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
        weights += [mlp.gate, mlp.up, mlp.down] if isinstance(mlp, Mlp) else [mlp.router]
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
        self.qkv = packer.panels(*attention.qkv, multiple=32)
        self.out = packer.panels(attention.out, multiple=32)
        self.gate_up = self.down = self.router = None
        self.experts: PackedExperts | None = None
        if isinstance(layer.mlp, Mlp):
            self.gate_up = packer.gate_and_up(layer.mlp.gate, layer.mlp.up)
            self.down = packer.panels(layer.mlp.down, multiple=32)
        else:
            self.router = packer.panels(layer.mlp.router, multiple=32)
            if not spread:
                module = layer.mlp.experts
                self.experts = PackedExperts.of(module.gate_up_proj, module.down_proj, packer)


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
