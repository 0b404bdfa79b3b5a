"""Recognition of the layers of encoders, and of decoders that answer with states.

The embedding and what comes behind the layers stay the model's own code. Whether the layers do what is
recognised here is for the caller to try (:mod:`engine.pooling.pooling_model`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import AttentionInterface

from engine.attention.base import IMPLEMENTATION, LAYER_ATTRIBUTE, LayerShape, paged_attention
from engine.kernels.attention.attention import Attention
from engine.kernels.attention.rotary import Rotary
from engine.kernels.core.base_model import BaseModel
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.decoder import DecoderModel, Layer, layers_of
from engine.kernels.mlp.mlp import Mlp, mlp_of
from engine.kernels.norms.norm import norm_of
from engine.kernels.products.activations import activation_by_results
from engine.kernels.products.packing import LANES, PACK
from engine.kernels.products.projections import joined_bias, whole
from engine.model.quantization.attached import rows_of

BERT_PARTS = "attention", "intermediate", "output"
"""Parts of a layer of BERT, and of many that follow it."""
DISTIL_PARTS = "attention", "sa_layer_norm", "ffn", "output_layer_norm"
MODERN_PARTS = "attn_norm", "attn", "mlp_norm", "mlp"
ROTARY_PARTS = "self_attn", "post_attention_layernorm", "mlp", "post_mlp_layernorm"
"""Parts of a layer of GTE: rotary positions, and norms of the stream itself."""


def recognise_layers(base: Any, dtype: torch.dtype, *, sees_all: bool) -> DecoderModel:
    """All layers of a base model, without embedding and output.

    ``sees_all``: each token sees all others, whatever the model's masks are.

    Raises:
        NotRecognised: they have other parts.
    """
    if dtype not in PACK:
        raise NotRecognised(f"no kernels for {dtype}")
    with torch.inference_mode():
        owner, name = place_of_layers(base)
        layers = getattr(owner, name)
        names = {name for name, _ in layers[0].named_children()}
        for parts, made in (
            (BERT_PARTS, _of_bert),
            (DISTIL_PARTS, _of_distil),
            (MODERN_PARTS, _of_modern),
            (ROTARY_PARTS, _of_rotary),
        ):
            if names.issuperset(parts):
                return made(base, layers, dtype)
        return _of_decoder(base, layers, dtype, sees_all=sees_all)


def place_of_layers(base: Any) -> tuple[Any, str]:
    """Module with a base model's list of layers, and its name there."""
    for path in ("encoder.layer", "transformer.layer", "layers"):
        owner, _, name = path.rpartition(".")
        module = getattr(base, owner, None) if owner else base
        found = getattr(module, name, None)
        if isinstance(found, torch.nn.ModuleList) and len(found):
            return module, name
    raise NotRecognised(f"{type(base).__name__} without layers of the usual name")


def _stack(
    base: Any, layers: list[Layer], dtype: torch.dtype, rotaries: tuple[Rotary, ...] = ()
) -> DecoderModel:
    return DecoderModel(None, tuple(layers), None, int(base.config.hidden_size), rotaries, dtype)


def _of_bert(base: Any, layers: Any, dtype: torch.dtype) -> DecoderModel:
    return _stack(base, [_bert_layer(layer, base.config) for layer in layers], dtype)


def _of_distil(base: Any, layers: Any, dtype: torch.dtype) -> DecoderModel:
    return _stack(base, [_distil_layer(layer, base.config) for layer in layers], dtype)


def _of_rotary(base: Any, layers: Any, dtype: torch.dtype) -> DecoderModel:
    heads = base.config.num_attention_heads

    def made(layer: Any) -> Layer:
        own = layer.self_attn
        attention = _attention([own.q_proj, own.k_proj, own.v_proj], own.o_proj, heads)
        norms = layer.post_attention_layernorm, layer.post_mlp_layernorm
        return _encoder_layer(replace(attention, rotary=0), mlp_of(layer.mlp), *norms)

    return _stack(base, [made(layer) for layer in layers], dtype, (Rotary(base.rotary_emb),))


def _bert_layer(layer: Any, config: Any) -> Layer:
    own, behind = layer.attention.self, layer.attention.output
    attention = _attention([own.query, own.key, own.value], behind.dense, config.num_attention_heads)
    activation = layer.intermediate.intermediate_act_fn
    mlp = _mlp(layer.intermediate.dense, layer.output.dense, activation)
    return _encoder_layer(attention, mlp, behind.LayerNorm, layer.output.LayerNorm)


def _distil_layer(layer: Any, config: Any) -> Layer:
    own, ffn = layer.attention, layer.ffn
    attention = _attention([own.q_lin, own.k_lin, own.v_lin], own.out_lin, config.num_attention_heads)
    mlp = _mlp(ffn.lin1, ffn.lin2, ffn.activation)
    return _encoder_layer(attention, mlp, layer.sa_layer_norm, layer.output_layer_norm)


def _encoder_layer(attention: Attention, mlp: Mlp, norm: Any, last_norm: Any) -> Layer:
    """A layer whose norms are those of the stream itself."""
    width = attention.out.shape[0]
    norms = norm_of(norm, width), norm_of(last_norm, width)
    return Layer(None, attention, None, None, mlp, None, False, 1.0, stream_norms=norms)


def _attention(projections: list[Any], out: Any, heads: int) -> Attention:
    """Attention of whole heads that sees all of its text."""
    inward, behind = [whole(each) for each in projections], whole(out)
    weights = [each.weight for each in inward]
    if len(weights) == 1:
        third = len(weights[0]) // 3
        weights = [rows_of(weights[0], slice(begin, begin + third)) for begin in range(0, 3 * third, third)]
    dim = len(weights[0]) // heads
    if len({len(each) for each in weights}) > 1 or dim % LANES:
        raise NotRecognised(f"heads of {dim}")
    return Attention(
        qkv=tuple(weights),
        qkv_bias=joined_bias(inward),
        out=behind.weight,
        out_bias=behind.own_bias,
        is_partial=False,
        head_norms=None,
        wide_norms=None,
        is_norm_last=False,
        rotary=None,
        places=None,
        heads=heads,
        kv_heads=heads,
        dim=dim,
        scale=dim**-0.5,
        window=0,
        value_dim=dim,
        sees_all=True,
    )


def _mlp(up: Any, down: Any, activation: Any) -> Mlp:
    inward, behind = whole(up), whole(down)
    width = behind.weight.shape[1]
    gate, rows = None, inward.weight
    if len(rows) == 2 * width:
        gate, rows = rows_of(rows, slice(0, width)), rows_of(rows, slice(width, 2 * width))
    if len(rows) != width:
        raise NotRecognised("an MLP whose parts have different widths")
    return Mlp(
        gate=gate,
        up=rows,
        down=behind.weight,
        is_partial=False,
        width=width,
        activation=activation_by_results(activation, type(activation).__name__),
        bias=joined_bias([inward]),
        down_bias=behind.own_bias,
    )


def _of_modern(base: Any, layers: Any, dtype: torch.dtype) -> DecoderModel:
    """Layers with norms before their parts, joined projections and angles by kind of layer."""
    kinds = list(dict.fromkeys(layer.attention_type for layer in layers))
    config = base.config

    def made(layer: Any) -> Layer:
        attention = replace(
            _attention([layer.attn.Wqkv], layer.attn.Wo, config.num_attention_heads),
            rotary=kinds.index(layer.attention_type),
            window=layer.attn.sliding_window or 0,
        )
        norms = [
            None if isinstance(each, torch.nn.Identity) else norm_of(each, config.hidden_size)
            for each in (layer.attn_norm, layer.mlp_norm)
        ]
        mlp = _mlp(layer.mlp.Wi, layer.mlp.Wo, layer.mlp.act)
        return Layer(norms[0], attention, None, norms[1], mlp, None, False, 1.0)

    rotaries = tuple(Rotary(base.rotary_emb, kind) for kind in kinds)
    return _stack(base, [made(layer) for layer in layers], dtype, rotaries)


def _of_decoder(base: Any, layers: Any, dtype: torch.dtype, *, sees_all: bool) -> DecoderModel:
    """Layers of a decoder, recognised as where it generates text."""
    config = base.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shapes = []
    for number, layer in enumerate(layers):
        if not hasattr(layer, "self_attn"):
            raise NotRecognised("layers without attention of the usual name")
        setattr(layer.self_attn, LAYER_ATTRIBUTE, number)
        window = getattr(layer.self_attn, "sliding_window", None)
        shapes.append(LayerShape(heads, dim, dim, window))
    sees_all = sees_all or layers[0].self_attn.is_causal is False
    sees_all = sees_all or bool(getattr(config, "use_bidirectional_attention", False))
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    before = config._attn_implementation
    base.set_attn_implementation(IMPLEMENTATION)
    try:
        parts = BaseModel(base, int(config.hidden_size), dtype)
        found = layers_of(parts, shapes)
    finally:
        base.set_attn_implementation(before)
    if sees_all:
        found = tuple(replace(each, mixer=replace(each.mixer, sees_all=True)) for each in found)  # type: ignore[type-var]
    return DecoderModel(None, found, None, parts.hidden, tuple(parts.rotaries.values()), dtype)
