"""A decoder's weights as the kernels want them, laid out once (:mod:`engine.kernels.products.packing`)."""

from __future__ import annotations

import torch

from engine.kernels.attention.latent import Latents
from engine.kernels.decoder import Attention, Decoder, Layer, Mlp, Moe
from engine.kernels.embedding.per_layer import LayerInput
from engine.kernels.experts.packed_experts import PackedExperts
from engine.kernels.products.packing import PackedWeights, Packer
from engine.model.quantization.attached import in_a_row, reader_of, rows_of
from parallel.parts import parts_here


def num_bytes(decoder: Decoder) -> int:
    """Bytes of a decoder's weights when laid out without compression.

    Spread experts that are here count, too.
    """
    total: int = sum(weight.numel() * weight.itemsize for weight in _weights(decoder))
    return total


def _weights(decoder: Decoder) -> list[torch.Tensor]:
    weights = [] if decoder.output is None else [decoder.output.head]
    if decoder.embedding is not None and decoder.embedding.inputs is not None:
        weights.append(decoder.embedding.inputs.projection)
    return [*weights, *(weight for layer in decoder.layers for weight in weights_of(layer))]


def weights_of(layer: Layer) -> list[torch.Tensor]:
    """The matrices of a layer, experts that are here among them."""
    attention, mlp = layer.attention, layer.mlp
    weights = [*attention.qkv, attention.out, *_of_latents(attention.latents)]
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
        queries, (kept, shared) = _ordered(attention.qkv[0], attention), _kept_and_shared(attention, latents)
        before = queries
        self.queries: PackedWeights | None = None
        """Makes queries from their latent; None where they are made with the latents."""
        if latents.queries is not None:
            before = latents.queries.weight
            self.queries = packer.panels(queries, multiple=32)
        self.inward = packer.panels(in_a_row([before, kept, shared]), multiple=32)
        """Makes queries, if they come from no latent, and all latents."""
        self.expand = packer.panels(in_a_row(_keys_and_values(attention, latents)), multiple=32)
        """Makes keys and values from their latent."""


class PackedKept:
    """The weights of latent attention whose latents are cached."""

    def __init__(self, attention: Attention, latents: Latents, packer: Packer) -> None:
        (query,), (kept, shared) = attention.qkv, _kept_and_shared(attention, latents)
        before = [] if latents.queries is None else [latents.queries.weight]
        self.inward = packer.panels(in_a_row([*before, shared, kept]), multiple=32)
        """Makes the latent of queries, what all keys share, and the latent of keys."""
        assert attention.places is not None
        first, last = attention.places.split([attention.shared, attention.dim - attention.shared])
        self.shared = packer.panels(_of_each_head(query, attention.dim, first), multiple=32)
        """Makes each query's numbers that meet those that all keys share."""
        self.own = packer.panels(_of_each_head(query, attention.dim, last), multiple=32)
        """Makes each query's numbers that meet a key's own ones."""
        keys, values = _keys_and_values(attention, latents)
        by_head = keys.unflatten(0, (attention.heads, -1))
        self.to_latent = packer.panels(by_head.mT.flatten(0, 1), multiple=32)
        """[heads * latent, own]: multiplies what meets a key's own numbers, to meet its latent.

        Its inputs are outputs of the model's matrix, whose codes have other groups: it has none.
        """
        self.from_latent = packer.panels(values, multiple=32)
        """[heads * value_dim, latent]: makes values of a sum of latents."""


def _kept_and_shared(attention: Attention, latents: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the latent of keys, and of what they share, in computed order."""
    assert attention.places is not None
    size, weight = latents.keys.size, latents.keys.weight
    places = attention.places[: latents.num_shared] - (attention.dim - latents.num_shared)
    return rows_of(weight, slice(0, size)), rows_of(weight, size + places)


def _keys_and_values(attention: Attention, latents: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights that make the keys' own numbers of a latent, and those that make values."""
    own, value_dim = attention.dim - attention.shared, attention.value_dim
    places = torch.arange(own + value_dim).split([own, value_dim])
    keys, values = (_of_each_head(latents.expand, own + value_dim, each) for each in places)
    return keys, values


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
        self.qkv: PackedWeights | None = None
        self.latents: PackedLatents | None = None
        """What makes heads in two steps, instead of ``qkv``."""
        self.kept: PackedKept | None = None
        """The same where latents are cached."""
        if attention.latents is None:
            self.qkv = packer.panels(*_projections(attention), multiple=32)
        elif attention.keeps_latents:
            self.kept = PackedKept(attention, attention.latents, packer)
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
    assert attention.places is not None
    return _of_each_head(weight, attention.dim, attention.places)


def _of_each_head(weight: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """Some of the ``dim`` outputs of each head, in this order."""
    return rows_of(weight, (torch.arange(0, len(weight), dim)[:, None] + places).flatten())


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
