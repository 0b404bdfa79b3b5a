"""A decoder's weights as the kernels want them, laid out once (:mod:`engine.kernels.packing`)."""

from __future__ import annotations

import torch

from engine.kernels.decoder import Attention, Decoder, Layer, Mlp, Moe
from engine.kernels.experts import PackedExperts
from engine.kernels.packing import Laid, Packer
from engine.kernels.recognition.latent import Latents
from engine.kernels.recognition.per_layer import LayerInput
from engine.model.quantization.attached import reader_of
from parallel.parts import parts_here


def num_bytes(decoder: Decoder) -> int:
    """Bytes of a decoder's weights when laid out without compression.

    Spread experts that are here count, too.
    """
    total: int = sum(weight.numel() * weight.itemsize for weight in _weights(decoder))
    return total


def _weights(decoder: Decoder) -> list[torch.Tensor]:
    weights: list[torch.Tensor] = [] if decoder.output is None else [decoder.output.head]
    if decoder.embedding is not None and decoder.embedding.inputs is not None:
        weights.append(decoder.embedding.inputs.projection)
    for layer in decoder.layers:
        mlp = layer.mlp
        weights += [*layer.attention.qkv, layer.attention.out, *_of_latents(layer.attention.latents)]
        weights += [] if layer.input is None else [layer.input.gate, layer.input.out]
        for dense in (mlp if isinstance(mlp, Mlp) else mlp.shared,):
            parts = () if dense is None else (dense.gate, dense.up, dense.down)
            weights += [each for each in parts if each is not None]
        if isinstance(mlp, Moe):
            weights += [mlp.router, mlp.experts.gate_up_proj, mlp.experts.down_proj]
    return weights


def rounds_inputs(decoder: Decoder) -> bool:
    """Whether some of its weights are multiplied by inputs in 8 bits."""
    return any(reader.rounds for weight in _weights(decoder) if (reader := reader_of(weight)) is not None)


class PackedMlp:
    """The weights of an MLP."""

    def __init__(self, mlp: Mlp, packer: Packer, ranks: int) -> None:
        self.mlp = mlp
        self.inward = (
            packer.panels(mlp.up, multiple=32) if mlp.gate is None else packer.gate_and_up(mlp.gate, mlp.up)
        )
        """Gate and up, or up alone."""
        self.down = packer.panels(
            mlp.down, multiple=32, parts=parts_here(mlp.width, ranks if mlp.is_partial else 1)
        )


class PackedMoe:
    """The weights of a mixture."""

    def __init__(self, moe: Moe, packer: Packer, dtype: torch.dtype, ranks: int, *, spread: bool) -> None:
        self.moe = moe
        self.router = packer.panels(moe.router, multiple=32)
        self.routing = moe.routing.record(dtype)
        self.shared = None if moe.shared is None else PackedMlp(moe.shared, packer, ranks)
        self.shared_gate = None if moe.shared_gate is None else packer.panels(moe.shared_gate, multiple=32)
        self.experts: PackedExperts | None = None
        if not spread:
            self.experts = PackedExperts.of(moe.experts, moe.form, packer, ranks if moe.has_parts else 1)


class PackedLatents:
    """The weights of latent attention that make latents, then heads."""

    def __init__(self, attention: Attention, latents: Latents, packer: Packer) -> None:
        (query,), own = attention.qkv, attention.dim - attention.shared
        kept, shared = _kept_and_shared(attention, latents)
        before = [] if latents.queries is None else [latents.queries.weight.data]
        queries = _ordered(query, attention)
        self.queries: Laid | None = None
        """Makes queries from their latent; None where they are made with the latents."""
        if latents.queries is None:
            before = [queries]
        else:
            self.queries = packer.panels(queries, multiple=32)
        self.inward = packer.panels(torch.cat([*before, kept, shared]), multiple=32)
        """Makes queries, if they come from no latent, and all latents."""
        heads = latents.expand.data.unflatten(0, (-1, own + attention.value_dim))
        keys, values = (part.flatten(0, 1) for part in heads.split([own, attention.value_dim], dim=1))
        self.expand = packer.panels(torch.cat([keys, values]), multiple=32)
        """Makes keys and values from their latent."""


def _kept_and_shared(attention: Attention, latents: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the latent of keys, and of what they share, in computed order."""
    assert attention.places is not None
    kept, shared = latents.keys.weight.data.split([latents.keys.size, latents.num_shared])
    return kept, shared[attention.places[: latents.num_shared] - (attention.dim - latents.num_shared)]


def _of_latents(latents: Latents | None) -> list[torch.Tensor]:
    """All weights of latents, and of the heads that are made from them."""
    return [] if latents is None else [*(each.weight for each in latents.normed), latents.expand]


class PackedInput:
    """The weights for a layer's input beside the stream."""

    def __init__(self, layer_input: LayerInput, packer: Packer) -> None:
        self.input = layer_input
        self.gate = packer.panels(layer_input.gate, multiple=32)
        self.out = packer.panels(layer_input.out, multiple=32)


class PackedLayer:
    """The weights of one layer."""

    def __init__(self, layer: Layer, packer: Packer, ranks: int, *, spread: bool) -> None:
        """``spread``: its experts come and go, so they are packed when they are used."""
        attention = layer.attention
        self.layer = layer
        self.qkv: Laid | None = None
        self.latents: PackedLatents | None = None
        """What makes heads in two steps, instead of ``qkv``."""
        if attention.latents is None:
            self.qkv = packer.panels(*_projections(attention), multiple=32)
        else:
            self.latents = PackedLatents(attention, attention.latents, packer)
        parts = parts_here(attention.width, ranks if attention.is_partial else 1)
        self.out = packer.panels(attention.out, multiple=32, parts=parts)
        self.mlp: PackedMlp | PackedMoe
        if isinstance(layer.mlp, Mlp):
            self.mlp = PackedMlp(layer.mlp, packer, ranks)
        else:
            self.mlp = PackedMoe(layer.mlp, packer, attention.out.dtype, ranks, spread=spread)
        self.input = None if layer.input is None else PackedInput(layer.input, packer)


def _projections(attention: Attention) -> list[torch.Tensor]:
    """Weights of queries, keys and values, their heads in the order of computation."""
    turned, values = attention.qkv[:2], attention.qkv[2:]
    if attention.places is None:
        return [*attention.qkv]
    return [*(_ordered(weight, attention) for weight in turned), *values]


def _ordered(weight: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Weights of heads in the order of computation."""
    return weight.data.unflatten(0, (-1, attention.dim))[:, attention.places].flatten(0, 1)


class PackedDecoder:
    """The weights of all layers, and of the output layer.

    The embedding and the norms are read as they are.
    """

    def __init__(self, decoder: Decoder, packer: Packer, ranks: int, *, spread: bool) -> None:
        """``ranks``: how many add up products whose results are partial."""
        self.decoder = decoder
        self.layers = [PackedLayer(layer, packer, ranks, spread=spread) for layer in decoder.layers]
        self.head = None if decoder.output is None else packer.panels(decoder.output.head, multiple=32)
        inputs = None if decoder.embedding is None else decoder.embedding.inputs
        self.inputs = None if inputs is None else packer.panels(inputs.projection, multiple=32)
        """What makes the layers' inputs beside the stream."""

    def __repr__(self) -> str:
        return f"<PackedDecoder {len(self.layers)} layers, {self.decoder.dtype}>"
