"""Recognises a transformers model whose layers are of the usual kind, and finds its weights.

Usual: a mixer (attention, a recurrence), then a feed-forward part (an MLP or a mixture of experts), or one of
them alone, each added to the residual stream, with norms before or behind them. Which of the known operations
the model's code makes of its parts is seen in what that code gives for made-up inputs
(:mod:`engine.kernels.core.stand_ins`). Whether that is all it does is tried by running both
(:mod:`engine.kernels.trial`). So a family that differs in a detail is computed by torch, not served wrong.

A model may be a shard: a stage without the embedding or the output layer, or a tensor-parallel rank's part,
whose mixers and MLPs give partial sums (:mod:`parallel.tensor_plan`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.attention.base import LAYER_ATTRIBUTE, LayerShape, LayersInTurn
from engine.kernels.attention.rotary import Rotary
from engine.kernels.cache.state_shape import StateShape
from engine.kernels.choosing.output import Output, output_of
from engine.kernels.core.base_model import BaseModel
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.embedding.embedding import Embedding, embedding_of
from engine.kernels.embedding.per_layer import LayerInput, input_of, without_input
from engine.kernels.exchange.exchange import ExpertShape
from engine.kernels.experts.mixture import Moe, mixture_beside, mixture_of, norm_in
from engine.kernels.lowering.buffers import Needs
from engine.kernels.lowering.layer_order import Order, order_of
from engine.kernels.lowering.parts import FeedForward, LayerPart, Mixer, PartPlace
from engine.kernels.lowering.scratch import all_scratch
from engine.kernels.mlp.mlp import mlp_of
from engine.kernels.norms.norm import Norm, norm_of
from engine.kernels.products.packing import PACK
from engine.kernels.registry import mixer_of
from engine.kernels.states.side_by_side import side_by_side
from engine.model.quantization.attached import reader_of


@dataclass(frozen=True)
class Layer:
    """One layer: a mixer, a feed-forward part, or both, each added to the stream."""

    norm: Norm | None
    """Before the mixer."""
    mixer: Mixer | None
    """None in a layer that has a feed-forward part alone."""
    last_norm: Norm | None
    """Norm of what the mixer gives."""
    second_norm: Norm | None
    """Before the feed-forward part."""
    mlp: FeedForward | None
    """None in a layer that has a mixer alone."""
    mlp_last_norm: Norm | None
    """Norm of what the feed-forward part gives."""
    is_parallel: bool
    """Whether the feed-forward part sees the stream as the mixer does, without what that adds."""
    factor: float
    """Factor on what both add."""
    stream_factor: float = 1.0
    """Factor on the stream behind all parts."""
    stream_norms: tuple[Norm, Norm] | None = None
    """Norms of the stream itself, behind each part, as encoders have them."""
    input: LayerInput | None = None
    """Use of an input beside the stream, behind the feed-forward part."""

    @property
    def places(self) -> tuple[PartPlace, PartPlace]:
        """Norms and factors around the mixer, and around the feed-forward part."""
        return (
            PartPlace(self.norm, self.last_norm, self.factor),
            PartPlace(self.second_norm, self.mlp_last_norm, self.factor),
        )

    @property
    def parts(self) -> tuple[LayerPart, ...]:
        """The mixer and the feed-forward part, of those that it has."""
        return tuple(part for part in (self.mixer, self.mlp) if part is not None)

    def matrices(self) -> list[torch.Tensor]:
        """The matrices of a layer, experts that are here among them."""
        own = [] if self.input is None else self.input.matrices()
        return [*(weight for part in self.parts for weight in part.matrices()), *own]


@dataclass(frozen=True)
class DecoderModel:
    """All parts of a model that a step needs."""

    embedding: Embedding | None
    """None where a stage before has it."""
    layers: tuple[Layer, ...]
    output: Output | None
    """None where a later stage has it."""
    hidden: int
    rotaries: tuple[Rotary, ...]
    """Rotary embeddings by kind of layer."""
    dtype: torch.dtype

    @property
    def mixers(self) -> list[Mixer]:
        """Mixers of the layers that have one."""
        return [layer.mixer for layer in self.layers if layer.mixer is not None]

    @property
    def cached(self) -> tuple[LayerShape, ...]:
        """Shapes of what the layers cache of a token, of those that do."""
        return tuple(mixer.cached for mixer in self.mixers if mixer.cached is not None)

    @property
    def states(self) -> tuple[StateShape, ...]:
        """Shapes of the layers' recurrent states, of those that have one."""
        return tuple(mixer.state for mixer in self.mixers if mixer.state is not None)

    @property
    def sparse(self) -> list[Moe]:
        """Mixtures of the layers that have one."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, Moe)]

    @property
    def exchanged(self) -> ExpertShape | None:
        """Sizes that all expert layers share; None without any."""
        first = next(iter(self.sparse), None)
        return None if first is None else ExpertShape(self.hidden, first.top_k, first.num_experts, self.dtype)

    @property
    def needs(self) -> Needs:
        """Sizes of the buffers that a step needs."""
        inputs = [layer.input for layer in self.layers if layer.input is not None]
        scratch = all_scratch([*(part for layer in self.layers for part in layer.parts), *inputs])
        vocab = 0 if self.output is None else self.output.vocab
        return Needs(self.hidden, vocab, self.dtype, scratch, self.exchanged, self.rounds_inputs)

    @property
    def sums_width(self) -> int:
        """Numbers of a row that are added up over the ranks, at most."""
        rows = [layer.mlp.sums_per_token for layer in self.layers if layer.mlp is not None]
        return self.hidden * max(rows, default=1)

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks in one step."""
        partial = sum(part.num_sums for layer in self.layers for part in layer.parts)
        return partial + (self.embedding is not None and self.embedding.is_partial)

    def inputs_of_sums(self, ranks: int) -> set[int]:
        """Numbers of inputs, of all ranks, of products that the ranks add up."""
        parts = (part for layer in self.layers for part in layer.parts)
        return {inputs * ranks for part in parts for inputs in part.cut_inputs()}

    def matrices(self) -> list[torch.Tensor]:
        """All matrices that are laid out."""
        output = [] if self.output is None else [self.output.head]
        embedding = [] if self.embedding is None else self.embedding.matrices()
        return [*output, *embedding, *(weight for layer in self.layers for weight in layer.matrices())]

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights when laid out without compression; spread experts that are here count."""
        return int(sum(weight.numel() * weight.itemsize for weight in self.matrices()))

    @property
    def rounds_inputs(self) -> bool:
        """Whether some weights are multiplied by inputs in 8 bits."""
        readers = map(reader_of, self.matrices())
        return any(reader.rounds for reader in readers if reader is not None)


def recognise(module: Any, shapes: Sequence[LayerShape], dtype: torch.dtype) -> DecoderModel:
    """Recognise a model, and return its parts as a decoder.

    ``shapes``: of its attention layers; of a stage, of those that are computed there.

    Raises:
        NotRecognised: the model has other parts.
    """
    if dtype not in PACK:
        raise NotRecognised(f"no kernels for {dtype}: --dtype bfloat16 and float32 have some")
    _only(module, {module.base_model_prefix, "lm_head"})
    hidden = int(module.config.get_text_config().hidden_size)
    base = BaseModel(getattr(module, module.base_model_prefix, None), hidden, dtype)
    if hidden % 2:
        raise NotRecognised("an odd hidden size")
    with torch.inference_mode():
        layers = layers_of(base, shapes)
        embedding = embedding_of(base.module, base.names, hidden, dtype)
        output = output_of(module, getattr(base.module, base.names["norm"]), hidden)
    decoder = DecoderModel(embedding, layers, output, hidden, tuple(base.rotaries.values()), dtype)
    if len(decoder.cached) != len(shapes):
        raise NotRecognised("attention in other places than its layers")
    if decoder.states and any(mixer.source is not None for mixer in decoder.mixers):
        raise NotRecognised("keys and values of another layer beside recurrent states")
    if len({(mlp.num_experts, mlp.top_k) for mlp in decoder.sparse}) > 1:
        raise NotRecognised("another number of experts in another layer")
    return decoder


def layers_of(base: BaseModel, shapes: Sequence[LayerShape]) -> tuple[Layer, ...]:
    """Layers of a base model, as :func:`recognise` has them."""
    return tuple(_layer(layer, shapes, base) for layer in base.layers)


def _layer(layer: Any, shapes: Sequence[LayerShape], base: BaseModel) -> Layer:
    order, hidden, stack = order_of(without_input(layer), base.hidden), base.hidden, base.all_layers

    def norm(name: str | None) -> Norm | None:
        return None if name is None else norm_of(getattr(layer, name), hidden)

    mlp, behind = _feed_forward(layer, order, norm(order.behind_mlp), base)
    return Layer(
        norm=norm(order.before_attention),
        mixer=_mixers(layer, order, shapes, base),
        last_norm=norm(order.behind_attention),
        second_norm=norm(order.before_mlp),
        mlp=mlp,
        mlp_last_norm=behind,
        is_parallel=order.is_parallel,
        factor=order.factor,
        stream_factor=order.stream_factor,
        input=input_of(layer, hidden, stack.index(layer), len(stack)),
    )


def _mixers(layer: Any, order: Order, shapes: Sequence[LayerShape], base: BaseModel) -> Mixer | None:
    """The mixer of a layer, or both as one."""
    if order.attention is None:
        return None
    mixer, side = _mixer(getattr(layer, order.attention), shapes, base), order.side
    if side is None:
        return mixer
    if order.is_parallel or order.factor != 1.0 or order.behind_attention is not None:
        raise NotRecognised("attention beside a recurrence in another order")
    return side_by_side(mixer, _mixer(getattr(layer, side.attention), shapes, base), side)


def _mixer(module: Any, shapes: Sequence[LayerShape], base: BaseModel) -> Mixer:
    """The mixer of a module; attention has the shape of its number."""
    number = getattr(module, LAYER_ATTRIBUTE, None)
    if isinstance(number, LayersInTurn):
        raise NotRecognised(f"{type(module).__name__} attends several times per token")
    return mixer_of(module, None if number is None else shapes[number], base)


def _feed_forward(
    layer: Any, order: Order, behind: Norm | None, base: BaseModel
) -> tuple[FeedForward | None, Norm | None]:
    """The MLP or the mixture of a layer, and the norm behind it.

    The norm may be one of the mixture's own parts.
    """
    if order.mlp is None:
        return None, behind
    block, hidden = getattr(layer, order.mlp), base.hidden
    beside = None if order.beside is None else getattr(layer, order.beside)
    if not hasattr(block, "experts"):
        mlp: FeedForward = mlp_of(block)
    else:
        mlp = mixture_of(block, beside, hidden, base.dtype)
        if (own := norm_in(block)) is not None:
            if behind is not None or order.factor != 1.0:
                raise NotRecognised("experts with norms in another place")
            behind = norm_of(own, hidden)
    if order.inside is not None:
        if order.factor != 1.0 or order.is_parallel or behind is None:
            raise NotRecognised("an MLP beside experts in another order")
        mlp = mixture_beside(layer, order.inside, mlp, hidden, base.dtype)
    if isinstance(mlp, Moe):
        if mlp.shared_gate is not None and behind is not None:
            raise NotRecognised("a norm behind a shared expert with a gate")
        mlp = replace(mlp, has_last_norm=behind is not None)
    return mlp, behind


def _only(module: Any, names: set[str], optional: frozenset[str] | set[str] = frozenset()) -> None:
    """Check that a module has no other parts, and no weights of its own."""
    if module is None:
        raise NotRecognised("no base model of the usual name")
    found = {name for name, _ in module.named_children()}
    if not names <= found <= names | optional or any(True for _ in module.named_parameters(recurse=False)):
        raise NotRecognised(f"{type(module).__name__} has the parts {', '.join(sorted(found))}")
