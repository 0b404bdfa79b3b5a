"""A decoder's weights as the kernels want them, laid out once (:mod:`engine.kernels.packing`)."""

from __future__ import annotations

from engine.kernels.decoder import Decoder, Layer, Mlp
from engine.kernels.experts import PackedExperts
from engine.kernels.packing import Packer


class PackedLayer:
    """One layer's."""

    def __init__(self, layer: Layer, packer: Packer, *, spread: bool) -> None:
        """``spread``: its experts come and go, so they are packed when they are used."""
        attention = layer.attention
        self.layer = layer
        self.qkv = packer.panels(attention.qkv.data, 32)
        self.out = packer.panels(attention.out.data, 32)
        self.gate_up = self.down = self.router = None
        self.experts: PackedExperts | None = None
        if isinstance(layer.mlp, Mlp):
            self.gate_up = packer.gate_and_up(layer.mlp.gate_up.data)
            self.down = packer.panels(layer.mlp.down.data, 32)
        else:
            self.router = packer.panels(layer.mlp.router.data, 32)
            if not spread:
                module = layer.mlp.experts
                self.experts = PackedExperts.of(module.gate_up_proj.data, module.down_proj.data, packer)

    def let_go(self) -> None:
        """Empty the weights as they came; those laid out here are used."""
        attention, mlp = self.layer.attention, self.layer.mlp
        replaced = [attention.qkv, attention.out]
        if isinstance(mlp, Mlp):
            replaced += [mlp.gate_up, mlp.down]
        for weight in replaced:
            weight.data = weight.data.new_empty(0)


class PackedDecoder:
    """All layers' and the output layer's. The embedding and the norms are read as they are."""

    def __init__(self, decoder: Decoder, packer: Packer, *, spread: bool) -> None:
        self.decoder = decoder
        self.layers = [PackedLayer(layer, packer, spread=spread) for layer in decoder.layers]
        self.head = packer.panels(decoder.head.data, 32)

    def __repr__(self) -> str:
        return f"<PackedDecoder {len(self.layers)} layers, {self.decoder.dtype}>"

    def let_go(self) -> None:
        for layer in self.layers:
            layer.let_go()
