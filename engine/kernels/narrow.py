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
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from engine.kernels.core.base_model import base_parts, mixer_module
from engine.kernels.decoder import DecoderModel, recognise
from engine.kernels.experts.routing import CORRECTIONS
from engine.kernels.products.made_up import MadeUpWeights, random_numbers
from engine.kernels.registry import NARROW_MIXERS, NARROW_PARTS
from engine.model.expert_weights import expert_modules
from engine.model.experts_function import EXPERTS_IMPLEMENTATION
from engine.model.sharding.shard import PassThrough, StageInput
from engine.model.weights import LoadedModel
from parallel.expert_parallel import ATTRIBUTE as EXPERTS_ATTRIBUTE
from parallel.tensor_parallel import ParallelRMSNorm, TensorRank, VocabularyParallel

MOST_TOKENS = 64
"""Vocabulary of a copy."""


class NarrowCopy:
    """A copy of a model in float32.

    At first, half of its query heads, values, MLP columns and tokens are loud.
    """

    def __init__(self, model: LoadedModel, decoder: DecoderModel) -> None:
        """``decoder``: the parts of the model.

        Equal models get equal weights, all of them numbers of bfloat16.
        """
        self.weights = _weights_for(model, decoder)
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
        for part in self.module.modules():
            if part.__dict__.get("forward", part) is None:
                del part.forward  # the one that computes on the grid, which :func:`_weights_for` left out
        for layer, part in zip(decoder.layers, _parts(self.module), strict=True):
            if layer.mixer is not None:
                NARROW_MIXERS[type(layer.mixer)].tell(layer.mixer, mixer_module(part))
        for part in expert_modules(self.module).values():
            part.num_experts = max((moe.num_experts for moe in decoder.sparse), default=part.num_experts)
        if decoder.sparse and self.module._can_set_experts_implementation():
            self.module.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        attentions = [mixer for mixer in decoder.mixers if mixer.cached is not None]
        self.layers = tuple(
            NARROW_MIXERS[type(mixer)].shape(mixer, shape)
            for shape, mixer in zip(model.layers, attentions, strict=True)
        )
        """Shapes of what the copy's attention layers cache."""
        self._mixers = [layer.mixer for layer in decoder.layers]
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
        """Replace loud weights by others of the usual size."""
        self.weights.quieten()
        self.decoder = self._recognise(self.decoder.dtype)

    def convert(self, dtype: torch.dtype) -> None:
        """Compute in another data type, with the same weights."""
        self.weights.convert(dtype)
        self.decoder = self._recognise(dtype)

    def _recognise(self, dtype: torch.dtype) -> DecoderModel:
        decoder = recognise(self.module, self.layers, dtype)
        embedding, output = decoder.embedding, decoder.output
        layers = (
            replace(
                layer,
                mixer=None if layer.mixer is None else layer.mixer.whole().chosen_as(mixer),
                mlp=None if layer.mlp is None else layer.mlp.whole(),
            )
            for layer, mixer in zip(decoder.layers, self._mixers, strict=True)
        )
        return replace(
            decoder,
            embedding=None if embedding is None else replace(embedding, is_partial=False),
            layers=tuple(layers),
            output=None if output is None else replace(output, is_partial=False),
        )


def _parts(module: Any) -> list[Any]:
    base = getattr(module, module.base_model_prefix)
    layers = getattr(base, base_parts(base)["layers"])
    return [layer for layer in layers if not isinstance(layer, PassThrough)]


def _weights_for(model: LoadedModel, decoder: DecoderModel) -> MadeUpWeights:
    """Made-up weights for all that a model has."""
    weights = MadeUpWeights(model.dtype)
    for layer, part in zip(decoder.layers, _parts(model.module), strict=True):
        if layer.mixer is not None:
            NARROW_MIXERS[type(layer.mixer)].make_up(weights, layer.mixer, mixer_module(part))
        if layer.mlp is not None:
            NARROW_PARTS[type(layer.mlp)](weights, layer.mlp, part)
    if decoder.embedding is not None:
        weight = decoder.embedding.weight
        weights.put(weight, (min(len(weight), MOST_TOKENS), decoder.hidden), size=1.0)
        if decoder.embedding.inputs is not None:
            table = decoder.embedding.inputs.table
            weights.put(table, (min(len(table), MOST_TOKENS), table.shape[1]), size=1.0)
    if decoder.output is not None:
        rows = min(len(decoder.output.head), MOST_TOKENS)
        weights.put(decoder.output.head, (rows, decoder.hidden), loud_rows=range(rows // 2, rows))
        bias = getattr(model.module.lm_head, "bias", None)
        if bias is not None:
            weights.put(bias, (rows,), size=0.2)
    _add_rest(weights, model)
    return weights


def _add_rest(weights: MadeUpWeights, model: LoadedModel) -> None:
    """Norms, routers and biases keep their shape.

    Objects that a mesh's workers share are left out.
    """
    memo = weights.memo
    biases = {id(weight) for name, weight in model.module.named_parameters() if name.endswith("bias")}
    for weight in model.module.parameters():
        if id(weight) not in memo:
            is_vector = weight.ndim == 1
            size, mean = (0.2, float(id(weight) not in biases)) if is_vector else (None, 0.0)
            weights.put(weight, tuple(weight.shape), size=size, mean=mean)
    for name, buffer in model.module.named_buffers():
        if name.endswith(CORRECTIONS):
            made = random_numbers(buffer.shape, zlib.crc32(b"correction")).mul_(0.2)
            memo[id(buffer)] = made.to(torch.bfloat16).float()
        elif buffer.dtype == model.dtype and id(buffer) not in memo:
            weights.keep_buffer(buffer)
    for module in model.module.modules():
        if (forward := module.__dict__.get("forward")) is not None:
            memo[id(forward)] = None
        if (ranks := getattr(module, "_ranks", None)) is not None:
            memo[id(ranks)] = TensorRank(0, 1)
        if (spread := getattr(module, EXPERTS_ATTRIBUTE, None)) is not None:
            memo[id(spread)] = spread
