"""A model's narrow copy: its code over few heads and MLP columns, with made-up weights.

The copy runs the forward passes of the loaded modules themselves: layers, norms, rotary embedding, router and
all that stands between them. Only the weights are other ones, and fewer. There are two query heads to a KV
head, a few columns of the MLP, a few tokens of the vocabulary. The hidden size, the heads' size and the
number of experts stay, since forward passes read these. So a copy of a large model costs a few milliseconds a
layer.

A shard is copied as one that has no neighbours: its partial sums are taken for whole ones.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from engine.attention.base import LAYER_ATTRIBUTE
from engine.kernels.attention.latent import is_latent, latent_modules
from engine.kernels.attention.rotary import NORMS
from engine.kernels.decoder import (
    Attention,
    Decoder,
    Layer,
    Mlp,
    Moe,
    attention_of,
    base_parts,
    recognise,
    shared_of,
)
from engine.kernels.experts.routing import CORRECTION
from engine.kernels.products.activations import ActivationKind
from engine.kernels.products.projections import (
    attention_projections,
    is_joined,
    linear_of,
    mlp_projections,
)
from engine.model.expert_weights import expert_modules
from engine.model.experts_function import EXPERTS_IMPLEMENTATION
from engine.model.shard import PassThrough, StageInput
from engine.model.weights import LoadedModel
from parallel.expert_parallel import ATTRIBUTE as EXPERTS_ATTRIBUTE
from parallel.tensor_parallel import ParallelRMSNorm, TensorRank, VocabularyParallel

MOST_KV_HEADS, MOST_QUERY_HEADS = 2, 2
"""KV heads of a copy, and query heads of each.

A copy has one KV head unless each has one query head.
"""
MOST_COLUMNS = 16
"""Width of a copy's MLP, and of each expert."""
MOST_TOKENS = 64
"""Vocabulary of a copy."""
LOUD = 32.0
"""Factor on loud rows of projections, far beyond where models clip or soften.

A power of two, so that it can be taken back.
"""
SQUARED = ActivationKind.RELU_SQUARED, ActivationKind.XIELU


def random_numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Normal numbers in float32.

    Not torch's own, whose generator needs libraries that instances do not load (:mod:`engine.host.deferred`).
    """
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32))


class NarrowCopy:
    """A copy of a model in float32.

    At first, half of its query heads, values, MLP columns and tokens are loud.
    """

    def __init__(self, model: LoadedModel, decoder: Decoder) -> None:
        """``decoder``: the parts of the model.

        Equal models get equal weights, all of them numbers of bfloat16.
        """
        self.weights = _Weights(model, decoder)
        self.module = deepcopy(model.module, self.weights.memo)
        """The model's code."""
        for part in self.module.modules():
            if isinstance(part, StageInput):
                part.received = None
            elif isinstance(part, Conv1D):
                part.nf = part.weight.shape[1]
            elif isinstance(part, ParallelRMSNorm):
                part.be_alone()
            elif isinstance(part, VocabularyParallel):
                part.first = 0
        for layer, part in zip(decoder.layers, _parts(self.module), strict=True):
            module = attention_of(part)
            if not is_latent(module) and is_joined(attention_projections(module)[0]):
                _tell_heads(module, *_heads(layer.attention), layer.attention.dim)
        experts = {layer.mlp.num_experts for layer in decoder.layers if isinstance(layer.mlp, Moe)}
        for part in expert_modules(self.module).values():
            part.num_experts = max(experts, default=part.num_experts)
        if experts and self.module._can_set_experts_implementation():
            self.module.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        self.layers = tuple(
            replace(shape, kv_heads=_heads(layer.attention)[1])
            for shape, layer in zip(model.layers, decoder.layers, strict=True)
        )
        """What the copy's layers cache."""
        self._keep_latents = [layer.attention.keeps_latents for layer in decoder.layers]
        self.decoder = self._recognise(torch.float32)
        """The copy's parts, with whole sums, whatever the model's sums are."""

    @property
    def base(self) -> Any:
        """The module that holds the layers."""
        return getattr(self.module, self.module.base_model_prefix)

    @property
    def parts(self) -> list[Any]:
        """The modules of the layers that are computed here."""
        return _parts(self.module)

    def quieten(self) -> None:
        """Make no number loud any more."""
        self.weights.quieten()
        self.decoder = self._recognise(self.decoder.dtype)

    def convert(self, dtype: torch.dtype) -> None:
        """Compute in another data type, with the same weights."""
        self.weights.convert(dtype)
        self.decoder = self._recognise(dtype)

    def _recognise(self, dtype: torch.dtype) -> Decoder:
        decoder = _with_whole_sums(recognise(self.module, self.layers, dtype))
        layers = (
            replace(layer, attention=replace(layer.attention, keeps_latents=keeps))
            for layer, keeps in zip(decoder.layers, self._keep_latents, strict=True)
        )
        return replace(decoder, layers=tuple(layers))


def _parts(module: Any) -> list[Any]:
    base = getattr(module, module.base_model_prefix)
    layers = getattr(base, base_parts(base)["layers"])
    return [layer for layer in layers if not isinstance(layer, PassThrough)]


def _mlp_of(layer: Any) -> list[Any] | None:
    """The projections of a layer's MLP, or of its shared expert; None without either."""
    parts = [part for _, part in layer.named_children() if not hasattr(part, LAYER_ATTRIBUTE)]
    parts += [shared for shared in map(shared_of, parts) if shared is not None]
    return next((each for each in map(mlp_projections, parts) if each is not None), None)


HEADS = "num_attention_heads", "num_heads", "n_head"
KV_HEADS = "num_key_value_heads", "num_kv_heads"


def _tell_heads(module: Any, heads: int, kv_heads: int, dim: int) -> None:
    """Set the numbers that a forward pass splits joined projections by."""
    config = module.config
    for owner in (module, config):
        for names, number in ((HEADS, heads), (KV_HEADS, kv_heads)):
            for name in names:
                if hasattr(owner, name):
                    setattr(owner, name, number)
    if hasattr(module, "split_size"):
        module.split_size = heads * dim


def _heads(attention: Attention) -> tuple[int, int]:
    """Query heads and KV heads of the copy of a layer."""
    group = min(attention.heads // attention.kv_heads, MOST_QUERY_HEADS)
    kv_heads = min(attention.kv_heads, MOST_KV_HEADS) if group == 1 else 1
    return kv_heads * group, kv_heads


def _with_whole_sums(decoder: Decoder) -> Decoder:
    embedding, output = decoder.embedding, decoder.output
    return replace(
        decoder,
        embedding=None if embedding is None else replace(embedding, is_partial=False),
        layers=tuple(_with_whole_sum(layer) for layer in decoder.layers),
        output=None if output is None else replace(output, is_partial=False),
    )


def _with_whole_sum(layer: Layer) -> Layer:
    attention, mlp = replace(layer.attention, is_partial=False), replace(layer.mlp, is_partial=False)
    if attention.wide_norms is not None:
        query, key = (replace(norm, over=None) for norm in attention.wide_norms)
        attention = replace(attention, wide_norms=(query, key))
    if isinstance(mlp, Moe):
        mlp = replace(mlp, first_whole=None)
        if mlp.shared is not None:
            mlp = replace(mlp, shared=replace(mlp.shared, is_partial=False))
    return replace(layer, attention=attention, mlp=mlp)


@dataclass(frozen=True)
class _Made:
    """A made-up weight."""

    weight: torch.nn.Parameter
    loud_rows: tuple[int, ...]
    quiet_columns: tuple[int, ...]
    """Columns that make up for loud inputs, so that these weigh as much as others."""
    power: int
    """Loud factors of such an input."""
    is_turned: bool
    is_float: bool
    """Whether it stands for a weight in float32 of a model in another type."""

    def scale(self, factor: float) -> None:
        data = self.weight.data.mT if self.is_turned else self.weight.data
        if self.loud_rows:
            data[..., list(self.loud_rows), :] *= factor
        if self.quiet_columns:
            data[..., list(self.quiet_columns)] /= factor**self.power


class _Weights:
    """The made-up weights of a copy, by the identity of those that they stand for."""

    def __init__(self, model: LoadedModel, decoder: Decoder) -> None:
        self._made: dict[tuple[Any, ...], _Made] = {}
        """Made-up weights by shape and role, shared by layers of equal shape.

        So a deep copy takes no more memory than a shallow one.
        """
        self._buffers: list[torch.Tensor] = []
        self._model_dtype = model.dtype
        self.memo: dict[int, Any] = {}
        """Memo of ``deepcopy``."""
        for layer, part in zip(decoder.layers, _parts(model.module), strict=True):
            self._attention(layer.attention, attention_of(part))
            self._mlp(layer.mlp, _mlp_of(part))
        if decoder.embedding is not None:
            weight = decoder.embedding.weight
            self._put(weight, (min(len(weight), MOST_TOKENS), decoder.hidden), size=1.0)
            if decoder.embedding.inputs is not None:
                table = decoder.embedding.inputs.table
                self._put(table, (min(len(table), MOST_TOKENS), table.shape[1]), size=1.0)
        if decoder.output is not None:
            rows = min(len(decoder.output.head), MOST_TOKENS)
            self._put(decoder.output.head, (rows, decoder.hidden), loud_rows=range(rows // 2, rows))
            bias = getattr(model.module.lm_head, "bias", None)
            if bias is not None:
                self._put(bias, (rows,), size=0.2)
        self._rest(model)

    def quieten(self) -> None:
        for made in self._made.values():
            made.scale(1 / LOUD)

    def convert(self, dtype: torch.dtype) -> None:
        """Compute in another data type, but for weights that are float32 in any model."""
        for made in self._made.values():
            if not made.is_float:
                made.weight.data = made.weight.data.to(dtype)
        for buffer in self._buffers:
            buffer.data = buffer.data.to(dtype)

    def _attention(self, attention: Attention, module: Any) -> None:
        (heads, kv_heads), dim, hidden = _heads(attention), attention.dim, attention.out.shape[0]
        loud_query, value_dim = range(dim * (heads // 2), dim * heads), attention.value_dim
        loud_value, loud_out = (
            [index for index in range(number * value_dim) if index % value_dim >= value_dim // 2]
            for number in (kv_heads, heads)
        )
        if attention.latents is not None:
            self._latent_attention(attention, module, loud_value, loud_out)
            return
        sizes = heads * dim, kv_heads * dim, kv_heads * value_dim
        inward, out = attention_projections(module)
        if is_joined(inward):
            before = sizes[0] + sizes[1]
            loud = [*loud_query, *(before + index for index in loud_value)]
            self._linear(next(iter(inward.values())), sum(sizes), hidden, loud_rows=loud)
        else:
            for each, rows, loud_rows in zip(
                inward.values(), sizes, (loud_query, (), loud_value), strict=False
            ):
                self._linear(each, rows, hidden, loud_rows=loud_rows)
        self._linear(getattr(module, out), hidden, heads * value_dim, quiet_columns=loud_out)
        for weight in module.parameters(recurse=False):
            if weight.shape == (attention.heads,):  # sinks
                self._put(weight, (heads,), size=1.0)
        for names in NORMS:
            for name, number in zip(names, (heads, kv_heads), strict=True):
                weight = getattr(getattr(module, name, None), "weight", None)
                if weight is not None and weight.numel() != dim:
                    shape = (number, dim) if weight.ndim == 2 else (number * dim,)
                    self._put(weight, shape, size=0.2, mean=1.0)

    def _latent_attention(
        self, attention: Attention, module: Any, loud_value: list[int], loud_out: list[int]
    ) -> None:
        """Latents keep their size."""
        latents, (heads, _) = attention.latents, _heads(attention)
        dim, value_dim = attention.dim, attention.value_dim
        assert latents is not None
        of_queries, (down, _, up), out = latent_modules(module)
        hidden, own = attention.out.shape[0], dim - attention.shared
        if latents.queries is not None:
            self._linear(getattr(module, of_queries[0]), latents.queries.size, hidden)
        size = hidden if latents.queries is None else latents.queries.size
        loud_queries = range(dim * (heads // 2), dim * heads)
        self._linear(getattr(module, of_queries[-1]), heads * dim, size, loud_rows=loud_queries)
        self._linear(getattr(module, down), latents.keys.size + attention.shared, hidden)
        loud = [index // value_dim * (own + value_dim) + own + index % value_dim for index in loud_value]
        self._linear(getattr(module, up), heads * (own + value_dim), latents.keys.size, loud_rows=loud)
        self._linear(getattr(module, out), hidden, heads * value_dim, quiet_columns=loud_out)

    def _linear(
        self,
        module: Any,
        rows: int,
        columns: int,
        role: str = "",
        *,
        loud_rows: Sequence[int] = (),
        quiet_columns: Sequence[int] = (),
        power: int = 1,
    ) -> None:
        """Weight and bias of a linear layer. Biases are as loud as their rows."""
        linear = linear_of(module)
        self._put(
            module.weight,
            (rows, columns),
            role,
            loud_rows=loud_rows,
            quiet_columns=quiet_columns,
            power=power,
            is_turned=linear.is_turned,
        )
        if module.bias is not None:
            self._put(module.bias, (rows,), role, size=0.2)

    def _mlp(self, mlp: Mlp | Moe, projections: list[Any] | None) -> None:
        columns = min(mlp.width, MOST_COLUMNS)
        loud = range(columns // 2, columns)
        if isinstance(mlp, Mlp):
            assert projections is not None
            hidden, (*inward, down) = mlp.down.shape[0], projections
            both, power = [*loud, *(columns + index for index in loud)], 1 if mlp.gate is None else 2
            if len(inward) == 1 and mlp.gate is not None:
                self._linear(inward[0], 2 * columns, hidden, "gate and up", loud_rows=both)
            else:
                for each, role in zip(inward, ("gate", "up"), strict=False):
                    self._linear(each, columns, hidden, role, loud_rows=loud)
            if mlp.activation.kind in SQUARED:
                power *= 2
            self._linear(down, hidden, columns, quiet_columns=loud, power=power)
            return
        if mlp.shared is not None:
            self._mlp(mlp.shared, projections)
        hidden, module, count = mlp.router.shape[1], mlp.experts, mlp.num_experts
        both, turned = mlp.form.joined(columns, list(loud)), mlp.form.is_transposed
        self._put(module.gate_up_proj, (count, 2 * columns, hidden), loud_rows=both, is_turned=turned)
        self._put(module.down_proj, (count, hidden, columns), quiet_columns=loud, power=2, is_turned=turned)
        if mlp.form.has_bias:
            self._put(module.gate_up_proj_bias, (count, 2 * columns), size=0.2)
            self._put(module.down_proj_bias, (count, hidden), size=0.2)

    def _rest(self, model: LoadedModel) -> None:
        """Norms, routers and biases keep their shape.

        Objects that a mesh's workers share are left out.
        """
        biases = {id(weight) for name, weight in model.module.named_parameters() if name.endswith("bias")}
        for weight in model.module.parameters():
            if id(weight) not in self.memo:
                is_vector = weight.ndim == 1
                size, mean = (0.2, float(id(weight) not in biases)) if is_vector else (None, 0.0)
                self._put(weight, tuple(weight.shape), size=size, mean=mean)
        for name, buffer in model.module.named_buffers():
            if name.endswith(CORRECTION):
                made = random_numbers(buffer.shape, zlib.crc32(b"correction")).mul_(0.2)
                self.memo[id(buffer)] = made.to(torch.bfloat16).float()
            elif buffer.dtype == model.dtype:
                self.memo[id(buffer)] = buffer.to(torch.float32, copy=True)
                self._buffers.append(self.memo[id(buffer)])
        for module in model.module.modules():
            if (ranks := getattr(module, "_ranks", None)) is not None:
                self.memo[id(ranks)] = TensorRank(0, 1)
            if (spread := getattr(module, EXPERTS_ATTRIBUTE, None)) is not None:
                self.memo[id(spread)] = spread

    def _put(
        self,
        stands_for: torch.Tensor,
        shape: tuple[int, ...],
        role: str = "",
        *,
        size: float | None = None,
        mean: float = 0.0,
        loud_rows: Sequence[int] = (),
        quiet_columns: Sequence[int] = (),
        power: int = 1,
        is_turned: bool = False,
    ) -> None:
        """``role``: distinguishes weights of one shape.

        ``is_turned``: the module keeps the weight the other way round. ``size``: of a number; by default
        such that a product keeps the size of its input.
        """
        is_float = stands_for.dtype != self._model_dtype
        key = (shape, role, size, mean, tuple(loud_rows), tuple(quiet_columns), is_turned, is_float)
        if key not in self._made:
            made = random_numbers(shape, zlib.crc32(repr(key).encode()))
            made = (
                made.mul_(shape[-1] ** -0.5 if size is None else size).add_(mean).to(torch.bfloat16).float()
            )
            weight = torch.nn.Parameter(made.mT.contiguous() if is_turned else made, requires_grad=False)
            self._made[key] = _Made(weight, key[4], key[5], power, is_turned, is_float)
            self._made[key].scale(LOUD)
        self.memo[id(stands_for)] = self._made[key].weight
