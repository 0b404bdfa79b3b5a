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

from engine.kernels.decoder import Attention, Decoder, Layer, Mlp, Moe, recognise
from engine.kernels.routing import CORRECTION
from engine.model.expert_weights import expert_modules
from engine.model.shard import PassThrough, StageInput
from engine.model.weights import EXPERTS_IMPLEMENTATION, LoadedModel
from parallel.expert_parallel import ATTRIBUTE as EXPERTS_ATTRIBUTE
from parallel.tensor_parallel import TensorRank

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
        return _with_whole_sums(recognise(self.module, self.layers, dtype))


def _parts(module: Any) -> list[Any]:
    base = getattr(module, module.base_model_prefix)
    return [layer for layer in base.layers if not isinstance(layer, PassThrough)]


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
    if isinstance(mlp, Moe) and mlp.shared is not None:
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
    is_float: bool
    """Whether it stands for a weight in float32 of a model in another type."""

    def scale(self, factor: float) -> None:
        if self.loud_rows:
            self.weight.data[..., list(self.loud_rows), :] *= factor
        if self.quiet_columns:
            self.weight.data[..., list(self.quiet_columns)] /= factor**self.power


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
            self._attention(layer.attention, part.self_attn)
            self._mlp(layer.mlp)
        if decoder.embedding is not None:
            weight = decoder.embedding.weight
            self._put(weight, (min(len(weight), MOST_TOKENS), decoder.hidden), size=1.0)
        if decoder.output is not None:
            rows = min(len(decoder.output.head), MOST_TOKENS)
            self._put(decoder.output.head, (rows, decoder.hidden), loud_rows=range(rows // 2, rows))
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
        for projection, rows, loud in (
            (module.q_proj, heads * dim, loud_query),
            (module.k_proj, kv_heads * dim, ()),
            (module.v_proj, kv_heads * value_dim, loud_value),
        ):
            self._put(projection.weight, (rows, hidden), loud_rows=loud)
            if projection.bias is not None:
                self._put(projection.bias, (rows,), size=0.2)
        self._put(module.o_proj.weight, (hidden, heads * value_dim), quiet_columns=loud_out)

    def _mlp(self, mlp: Mlp | Moe) -> None:
        columns = min(mlp.width, MOST_COLUMNS)
        loud = range(columns // 2, columns)
        if isinstance(mlp, Mlp):
            hidden = mlp.down.shape[0]
            self._put(mlp.gate, (columns, hidden), "gate", loud_rows=loud)
            self._put(mlp.up, (columns, hidden), "up", loud_rows=loud)
            self._put(mlp.down, (hidden, columns), quiet_columns=loud, power=2)
            return
        if mlp.shared is not None:
            self._mlp(mlp.shared)
        hidden, module = mlp.router.shape[1], mlp.experts
        both = [*loud, *(columns + index for index in loud)]
        self._put(module.gate_up_proj, (mlp.num_experts, 2 * columns, hidden), loud_rows=both)
        self._put(module.down_proj, (mlp.num_experts, hidden, columns), quiet_columns=loud, power=2)

    def _rest(self, model: LoadedModel) -> None:
        """Norms, routers and biases keep their shape.

        Objects that a mesh's workers share are left out.
        """
        for weight in model.module.parameters():
            if id(weight) not in self.memo:
                is_vector = weight.ndim == 1
                size, mean = (0.2, 1.0) if is_vector else (None, 0.0)
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
    ) -> None:
        """``role``: distinguishes weights of one shape.

        ``size``: of a number; by default such that a product keeps the size of its input.
        """
        is_float = stands_for.dtype != self._model_dtype
        key = (shape, role, size, mean, tuple(loud_rows), tuple(quiet_columns), is_float)
        if key not in self._made:
            made = random_numbers(shape, zlib.crc32(repr(key).encode()))
            made = (
                made.mul_(shape[-1] ** -0.5 if size is None else size).add_(mean).to(torch.bfloat16).float()
            )
            weight = torch.nn.Parameter(made, requires_grad=False)
            self._made[key] = _Made(weight, key[4], key[5], power, is_float)
            self._made[key].scale(LOUD)
        self.memo[id(stands_for)] = self._made[key].weight
