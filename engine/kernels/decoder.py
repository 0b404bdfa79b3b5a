"""Recognises a transformers model whose layers are of the usual kind, and finds its weights.

Usual: attention, then an MLP or a mixture of experts, each added to the residual stream, with norms before or
behind them. Which of the known operations the model's code makes of its parts is seen in what that code gives
for made-up inputs (:mod:`engine.kernels.core.stand_ins`). Whether that is all it does is tried by running both
(:mod:`engine.kernels.trial`). So a family that differs in a detail is computed by torch, not served wrong.

A model may be a shard: a stage without the embedding or the output layer, or a tensor-parallel rank's part,
whose attention and MLPs give partial sums (:mod:`parallel.tensor_plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from engine.attention.base import LAYER_ATTRIBUTE, LayerShape
from engine.kernels.attention.latent import Latents, is_latent, latent_parts, noted_latent
from engine.kernels.attention.rotary import (
    TOKENS,
    Noted,
    QueryFactors,
    Rotary,
    noted,
    order_of_pairs,
    rotary_of,
)
from engine.kernels.core.stand_ins import NotUsual
from engine.kernels.embedding.ends import embedding_factor, of_logits
from engine.kernels.embedding.per_layer import (
    PROJECTION,
    TABLE,
    TABLE_NORM,
    LayerInput,
    LayerInputs,
    input_of,
    inputs_of,
    without_input,
    without_inputs,
)
from engine.kernels.experts.form import ExpertForm, form_of
from engine.kernels.experts.routing import (
    Routing,
    router_of,
    routing_of,
    scaled_routing_of,
    weights_of,
)
from engine.kernels.norms.norm import Norm, norm_of
from engine.kernels.order import Inside, order_of
from engine.kernels.products.activations import Activation, activation_of
from engine.kernels.products.packing import LANES, PACK
from engine.kernels.products.projections import (
    QUERIES_ALONE,
    VALUES_OF_KEYS,
    Linear,
    attention_projections,
    is_joined,
    linear_of,
    mlp_projections,
    whole,
)
from engine.model.quantization.attached import reader_of, rows_of
from engine.model.shard import PassThrough
from parallel.tensor_parallel import SummedExperts, VocabularyParallel

SHARED = {"shared_expert", "shared_experts", "shared_mlp"}
"""Names of an expert of all tokens in a mixture."""
SHARED_GATE = "shared_expert_gate"

__all__ = ["Attention", "Decoder", "Embedding", "Layer", "Mlp", "Moe", "NotUsual", "Output", "recognise"]


@dataclass(frozen=True)
class Attention:
    """The weights of an attention layer."""

    qkv: tuple[torch.Tensor, ...]
    """Weights of queries [heads * dim, hidden], keys and values [kv_heads * dim, hidden].

    With latents it is queries alone: their weights know how to make keys and values.
    """
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    is_partial: bool
    """Whether its result, without the bias, is a sum over the tensor-parallel ranks."""
    head_norms: Norm | None
    """Norm of each head: weights [heads + kv_heads, dim] of queries, then of keys."""
    wide_norms: tuple[Norm, Norm] | None
    """Norms of all queries together, and of all keys."""
    is_norm_last: bool
    """Whether the norms of heads come behind the rotation."""
    rotary: int | None
    """Which of the decoder's rotary embeddings turns queries and keys; None: none does."""
    places: torch.Tensor | None
    """[dim]: order in which the numbers of a head are computed; None: as they are.

    It puts those of a pair half a head apart.
    """
    heads: int
    kv_heads: int
    dim: int
    """Numbers of a query, and of a key."""
    scale: float
    window: int
    value_dim: int
    cap: float = 0.0
    """Scores are ``cap * tanh(score / cap)``; 0 for none."""
    sinks: torch.Tensor | None = None
    """[heads] float32: a logit of each query head that joins the sum of its softmax."""
    factors: QueryFactors | None = None
    """What the queries of a position are multiplied by."""
    value_norm: Norm | None = None
    """Norm of the values of each head: weights [value_dim]."""
    source: int | None = None
    """Number of the layer, among those here, whose keys and values it reads.

    It has queries alone then. None: it has its own.
    """
    latents: Latents | None = None
    """What the heads are made from; None: from the hidden numbers.

    They lie between queries and keys. Last come the numbers that all keys of a token begin with.
    """
    keeps_latents: bool = False
    """Whether the latents of keys are cached instead of keys and values.

    Queries are multiplied by what would make keys of them, and sums of latents by what would make values.
    """

    @property
    def shared(self) -> int:
        """Numbers that all keys of a token begin with."""
        return 0 if self.latents is None else self.latents.num_shared

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks."""
        return self.is_partial + (self.wide_norms is not None and self.wide_norms[0].over is not None)

    @property
    def cached(self) -> LayerShape:
        """What is cached of a token, and looked at."""
        window = self.window or None
        if self.latents is None or not self.keeps_latents:
            return LayerShape(self.kv_heads, self.dim, self.value_dim, window)
        size = self.latents.keys.size
        return LayerShape(1, self.shared + size, size, window, apart=self.shared)

    @property
    def projected_width(self) -> int:
        """Numbers of a token's queries, keys and values, and of what they are made from."""
        if self.source is not None:
            return self.heads * self.dim
        latents = 0 if self.latents is None else self.latents.width
        queries = self.heads * self.cached.key_dim
        if self.keeps_latents:
            return queries + latents
        return queries + latents + self.kv_heads * (self.dim - self.shared + self.value_dim)

    @property
    def attended_width(self) -> int:
        """Numbers that are summed up over the keys of a token, for all heads."""
        return self.heads * self.cached.value_dim

    @property
    def width(self) -> int:
        """Numbers that attention gives for a token."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class Mlp:
    """An MLP, gated or not."""

    gate: torch.Tensor | None
    """[width, hidden], like ``up``"""
    up: torch.Tensor
    down: torch.Tensor
    is_partial: bool
    """As in :class:`Attention`."""
    width: int
    activation: Activation
    bias: torch.Tensor | None
    """float32, of gate, then of up."""
    down_bias: torch.Tensor | None

    @property
    def has_parts(self) -> bool:
        """Whether ranks have some inputs each of the last product."""
        return self.is_partial

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks."""
        return int(self.is_partial)


@dataclass(frozen=True)
class MoeNorms:
    """Norms of the parts of a mixture that stands beside an MLP, its shared expert.

    The layer's norms are before the MLP, and behind the sum of both.
    """

    router: Norm
    """Before the router."""
    experts: Norm
    """Before the experts."""
    shared_last: Norm
    """Behind the MLP."""
    experts_last: Norm
    """Behind the experts."""


@dataclass(frozen=True)
class Moe:
    """A router and its experts."""

    router: torch.Tensor
    """[experts, hidden]; may be float32 in a model of another type."""
    router_bias: torch.Tensor | None
    routing: Routing
    experts: Any
    """The module with ``gate_up_proj`` and ``down_proj`` of the experts here."""
    form: ExpertForm
    is_partial: bool
    """As in :class:`Attention`."""
    num_experts: int
    first_whole: int | None = None
    """Number of the first expert here, where each tensor-parallel rank has whole ones."""
    shared: Mlp | None = None
    """An expert of all tokens, whose result is added."""
    shared_gate: torch.Tensor | None = None
    """[1, hidden]: the sigmoid of its product is a factor on the shared expert's result."""
    norms: MoeNorms | None = None
    """None: the layer's norms are those of all parts."""

    @property
    def width(self) -> int:
        return self.form.width

    @property
    def top_k(self) -> int:
        return self.routing.top_k

    @property
    def has_parts(self) -> bool:
        """Whether ranks have some inputs each of the experts' last product."""
        return self.is_partial and self.first_whole is None

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks."""
        return self.is_partial + (self.shared is not None and self.shared.is_partial)


@dataclass(frozen=True)
class Layer:
    """Two parts, each of which adds to the stream."""

    norm: Norm | None
    """Before attention."""
    attention: Attention
    last_norm: Norm | None
    """Norm of what attention gives."""
    second_norm: Norm | None
    """Before the MLP."""
    mlp: Mlp | Moe
    mlp_last_norm: Norm | None
    """Norm of what the MLP gives."""
    is_parallel: bool
    """Whether the MLP sees the stream as attention does, without what that adds."""
    factor: float
    """Factor on what both add."""
    stream_factor: float = 1.0
    """Factor on the stream behind all parts."""
    input: LayerInput | None = None
    """What is done, behind the MLP, with an input beside the stream."""


@dataclass(frozen=True)
class Embedding:
    weight: torch.Tensor
    """[tokens here, hidden]"""
    first: int
    """Number of the first token here."""
    is_partial: bool
    """Whether other ranks have other tokens."""
    factor: float
    positions: torch.Tensor | None
    """[positions, hidden]: learned vectors that are added, by the rank that has the first token."""
    inputs: LayerInputs | None = None
    """What makes inputs that layers have beside the stream."""


@dataclass(frozen=True)
class Output:
    """The last norm, and the output layer."""

    norm: Norm
    head: torch.Tensor
    """[tokens here, hidden]"""
    bias: torch.Tensor | None
    """[tokens here] float32"""
    vocab: int
    """Tokens here."""
    first: int
    """Number of the first of them."""
    is_partial: bool
    """Whether other ranks have other tokens."""
    factor: float
    """Factor on the logits."""
    cap: float
    """Cap of the logits: they become cap * tanh(logits / cap); 0 for none."""


@dataclass(frozen=True)
class Decoder:
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
    def cached(self) -> tuple[LayerShape, ...]:
        """What the layers cache."""
        return tuple(layer.attention.cached for layer in self.layers)

    @property
    def vocab(self) -> int:
        """Width of the logits that are computed here."""
        return 0 if self.output is None else self.output.vocab

    @property
    def sums_width(self) -> int:
        """Numbers of a row that are added up over the ranks, at most."""
        cut = [
            layer.mlp.top_k for layer in self.layers if isinstance(layer.mlp, Moe) and layer.mlp.is_partial
        ]
        return self.hidden * max(cut, default=1)

    def inputs_of_sums(self, ranks: int) -> set[int]:
        """Numbers of inputs, of all ranks, of products that the ranks add up."""
        attentions = [layer.attention for layer in self.layers if layer.attention.is_partial]
        here = {each.width for each in attentions}
        here |= {mlp.width for layer in self.layers for mlp in _mlps(layer.mlp) if mlp.has_parts}
        return {inputs * ranks for inputs in here}

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks in one step."""
        partial = [layer.attention.num_sums + layer.mlp.num_sums for layer in self.layers]
        return sum(partial) + (self.embedding is not None and self.embedding.is_partial)


def _mlps(mlp: Mlp | Moe) -> Iterator[Mlp | Moe]:
    """It and its shared expert."""
    yield mlp
    if isinstance(mlp, Moe) and mlp.shared is not None:
        yield mlp.shared


def recognise(module: Any, shapes: Sequence[LayerShape], dtype: torch.dtype) -> Decoder:
    """The parts of a model.

    ``shapes``: of its layers; of a stage, those that are computed there.

    Raises:
        NotUsual: the model has other parts.
    """
    if dtype not in PACK:
        raise NotUsual(f"no kernels for {dtype}: --dtype bfloat16 and float32 have some")
    base: Any = getattr(module, module.base_model_prefix, None)
    _only(module, {module.base_model_prefix, "lm_head"})
    names = base_parts(base)
    parts = [layer for layer in getattr(base, names["layers"]) if not isinstance(layer, PassThrough)]
    hidden = int(module.config.get_text_config().hidden_size)
    if hidden % 2 or len(parts) != len(shapes):
        raise NotUsual("an odd width")
    rotaries: dict[tuple[str, ...], Rotary] = {}
    with torch.inference_mode():
        layers = tuple(
            _layer(layer, shape, hidden, base, rotaries, dtype)
            for layer, shape in zip(parts, shapes, strict=True)
        )
        embedding = _embedding(base, names, hidden, dtype)
        output = _output(module, getattr(base, names["norm"]), hidden)
    kinds = {(mlp.num_experts, mlp.top_k) for mlp in (layer.mlp for layer in layers) if isinstance(mlp, Moe)}
    if len(kinds) > 1:
        raise NotUsual("another number of experts in another layer")
    return Decoder(embedding, layers, output, hidden, tuple(rotaries.values()), dtype)


PER_LAYER = {"table": (TABLE,), "projection": (PROJECTION,), "table_norm": (TABLE_NORM,)}
BASE = {
    "embedding": ("embed_tokens", "wte"),
    "layers": ("layers", "h"),
    "norm": ("norm", "ln_f", "final_layernorm"),
    "rotary": ("rotary_emb",),
    "positions": ("wpe",),
    **PER_LAYER,
}
"""Names of the parts of a base model, by role."""


def base_parts(base: Any) -> dict[str, str]:
    """Names of the parts of a base model, by role."""
    if base is None:
        raise NotUsual("another structure")
    found = [name for name, part in base.named_children() if not isinstance(part, torch.nn.Dropout)]
    names = {role: name for role, each in BASE.items() for name in each if name in found}
    is_known = len(names) == len(found) and names.keys() >= {"embedding", "layers", "norm"}
    if not is_known or any(True for _ in base.named_parameters(recurse=False)):
        raise NotUsual(f"{type(base).__name__} has the parts {', '.join(sorted(found))}")
    return names


def _embedding(base: Any, names: dict[str, str], hidden: int, dtype: torch.dtype) -> Embedding | None:
    module = getattr(base, names["embedding"])
    if isinstance(module, PassThrough):
        return None
    if module.weight.shape[1] != hidden:
        raise NotUsual("an embedding of another width")
    is_partial = isinstance(module, VocabularyParallel)
    positions = getattr(base, names["positions"]).weight if "positions" in names else None
    factor = embedding_factor(without_inputs(base), names, hidden, dtype)
    first = module.first if is_partial else 0
    return Embedding(module.weight, first, is_partial, factor, positions, inputs_of(base, dtype))


def _output(module: Any, norm: Any, hidden: int) -> Output | None:
    head = module.lm_head
    if isinstance(head, PassThrough):
        return None
    first = getattr(head, "first", None)
    return Output(
        norm_of(norm, hidden),
        head.weight,
        None if head.bias is None else _copy(head.bias),
        head.weight.shape[0],
        first or 0,
        first is not None,
        *of_logits(module, hidden),
    )


def _layer(
    layer: Any,
    shape: LayerShape,
    hidden: int,
    base: Any,
    rotaries: dict[tuple[str, ...], Rotary],
    dtype: torch.dtype,
) -> Layer:
    order = order_of(without_input(layer), hidden)
    stack = getattr(base, base_parts(base)["layers"])

    def norm(name: str | None) -> Norm | None:
        return None if name is None else norm_of(getattr(layer, name), hidden)

    block, beside = getattr(layer, order.mlp), None if order.beside is None else getattr(layer, order.beside)
    behind, has_experts = norm(order.behind_mlp), hasattr(block, "experts")
    mlp = _mixture(block, beside, hidden, dtype) if has_experts else _mlp(block)
    if has_experts and (own := _norm_in(block)) is not None:
        if behind is not None or order.factor != 1.0:
            raise NotUsual("experts with norms in another place")
        behind = norm_of(own, hidden)
    if order.inside is not None:
        if order.factor != 1.0 or order.is_parallel or behind is None:
            raise NotUsual("an MLP beside experts in another order")
        mlp = _mixture_beside(layer, order.inside, mlp, hidden)
    elif isinstance(mlp, Moe) and mlp.shared_gate is not None and behind is not None:
        raise NotUsual("a norm behind a shared expert with a gate")
    return Layer(
        norm=norm(order.before_attention),
        attention=_attention(getattr(layer, order.attention), shape, base, rotaries),
        last_norm=norm(order.behind_attention),
        second_norm=norm(order.before_mlp),
        mlp=mlp,
        mlp_last_norm=behind,
        is_parallel=order.is_parallel,
        factor=order.factor,
        stream_factor=order.stream_factor,
        input=input_of(layer, hidden, [*stack].index(layer), len(stack)),
    )


def _attention(
    module: Any, shape: LayerShape, base: Any, rotaries: dict[tuple[str, ...], Rotary]
) -> Attention:
    dim, value_dim, kv_heads = shape.key_dim, shape.value_dim, shape.kv_heads
    if dim % LANES or value_dim % LANES:
        raise NotUsual(f"heads of {dim} and {value_dim}")
    if is_latent(module):
        return _latent_attention(module, shape, base, rotaries)
    inward, out_name = attention_projections(module)
    projections, source = [whole(each) for each in inward.values()], _source(module, base)
    if (source is not None) != (tuple(inward) == QUERIES_ALONE):
        raise NotUsual("attention that has no keys of its own, nor another layer's")
    if len(projections) == len(VALUES_OF_KEYS):
        projections.append(projections[1])
    of_keys = 0 if source is not None else kv_heads * (dim + value_dim)
    heads = (sum(each.outputs for each in projections) - of_keys) // dim
    sizes = (heads * dim, kv_heads * dim, kv_heads * value_dim)[: 1 if source is not None else 3]
    weights = [each.weight for each in projections]
    if is_joined(inward):
        ends = list(accumulate(sizes, initial=0))
        weights = [rows_of(weights[0], slice(begin, end)) for begin, end in pairwise(ends)]
    if tuple(map(len, weights)) != sizes:
        raise NotUsual("projections of another size than its heads")
    rotary = rotary_of(base, module)
    seen = noted(module, rotary, shape, heads, _telling(module.config))
    turning, out = seen.turning, linear_of(getattr(module, out_name))
    number, places = _rotary_number(seen, rotary, rotaries, dim)
    norms, qkv_bias = turning.norms, _joined_bias(projections)
    if places is not None:
        everywhere = _everywhere(places, heads + (kv_heads if source is None else 0), dim)
        if norms is not None:
            norms = Norm(norms.weights[everywhere], norms.eps, norms.is_centred)
        if turning.wide_norms is not None:
            raise NotUsual("a norm over all heads whose numbers are turned in neighbouring pairs")
        if qkv_bias is not None:
            qkv_bias[: len(everywhere)] = qkv_bias[everywhere]
    return Attention(
        qkv=tuple(weights),
        qkv_bias=qkv_bias,
        out=out.weight,
        out_bias=None if out.bias is None else _copy(out.bias),
        is_partial=out.is_partial,
        head_norms=norms,
        wide_norms=turning.wide_norms,
        is_norm_last=turning.is_norm_last,
        rotary=number,
        places=places,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        scale=seen.scale * _constant(seen.factors),
        window=shape.window or 0,
        value_dim=value_dim,
        cap=seen.cap,
        sinks=None if seen.sinks is None else _copy(seen.sinks),
        factors=_factors(module.config, seen.factors),
        value_norm=seen.value_norm,
        source=source,
    )


def _source(module: Any, base: Any) -> int | None:
    """See :attr:`Attention.source`."""
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    stack = getattr(base, base_parts(base)["layers"])
    here = [attention_of(layer) for layer in stack if not isinstance(layer, PassThrough)]
    for number, other in enumerate(here):
        if other.store_full_length_kv and other.layer_type == module.layer_type:
            return number
    raise NotUsual("keys and values of a layer that is not here")


def attention_of(layer: Any) -> Any:
    """The attention of a layer."""
    return next(part for _, part in layer.named_children() if hasattr(part, LAYER_ATTRIBUTE))


def _latent_attention(
    module: Any, shape: LayerShape, base: Any, rotaries: dict[tuple[str, ...], Rotary]
) -> Attention:
    heads, dim, value_dim = shape.kv_heads, shape.key_dim, shape.value_dim
    parts = latent_parts(module, shape)
    rotary = rotary_of(base, module)
    seen = noted_latent(module, parts, rotary, shape, _telling(module.config))
    shared = parts.latents.num_shared
    number, places = _rotary_number(seen, rotary, rotaries, shared)
    if places is None:
        places = torch.arange(shared)
    latents = parts.latents.with_shared_in(places)
    out = linear_of(getattr(module, parts.out))
    return Attention(
        qkv=(parts.heads.weight,),
        qkv_bias=None,
        out=out.weight,
        out_bias=None if out.bias is None else _copy(out.bias),
        is_partial=out.is_partial,
        head_norms=None,
        wide_norms=None,
        is_norm_last=False,
        rotary=number,
        places=torch.cat([dim - shared + places, torch.arange(dim - shared)]),
        heads=heads,
        kv_heads=heads,
        dim=dim,
        scale=seen.scale * _constant(seen.factors),
        window=shape.window or 0,
        value_dim=value_dim,
        cap=seen.cap,
        sinks=None if seen.sinks is None else _copy(seen.sinks),
        factors=_factors(module.config, seen.factors),
        latents=latents,
        keeps_latents=_can_keep(latents, dim, value_dim),
    )


def _can_keep(latents: Latents, dim: int, value_dim: int) -> bool:
    """Whether latents can be cached: whether the products of each head fill whole panels.

    It does not depend on the number of heads, so ranks with fewer of them do the same. Where the latent is
    rounded to 8 bits before keys and values are made of it, they are made, and cached.
    """
    reader = reader_of(latents.expand)
    if reader is not None and reader.rounds:
        return False
    shared, pair = latents.num_shared, 2 * LANES
    return not (shared % LANES or (dim - shared) % 2 or value_dim % pair or latents.keys.size % pair)


SAME = 1e-4
"""Difference of factors that are the same."""


def _telling(config: Any) -> torch.Tensor:
    """Positions [TOKENS] at which a factor on queries would show."""
    near = int(_rope(config).get("original_max_position_embeddings") or 0)
    last = int(getattr(config, "max_position_embeddings", 1 << 12)) - 1
    near = near or last // 2
    return torch.tensor([0, 1, near - 1, near, near + 1, max(last, 3 * near)])[:TOKENS]


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or {}


def _constant(seen: torch.Tensor) -> float:
    """The factor on queries at all positions; 1 if it depends on them."""
    mean = float(seen.double().mean())
    is_one = float(seen.max() - seen.min()) >= SAME or abs(mean - 1) < SAME
    return 1.0 if is_one else mean


def _factors(config: Any, seen: torch.Tensor) -> QueryFactors | None:
    """What queries are multiplied by, from what was seen at some positions; None for nothing."""
    if float(seen.max() - seen.min()) < SAME:
        return None
    rope = _rope(config)
    growth, original = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    if growth and original:
        factors = QueryFactors(float(growth), int(original))
        if float((seen - factors.table(_telling(config))).abs().max()) < SAME:
            return factors
    raise NotUsual("queries with a factor that depends on the position")


def _rotary_number(
    seen: Noted, rotary: Rotary | None, rotaries: dict[tuple[str, ...], Rotary], dim: int
) -> tuple[int | None, torch.Tensor | None]:
    """The number of the rotary embedding, and :attr:`Attention.places`."""
    if rotary is None or seen.turning.angles is None:
        return None, None
    number = list(rotaries | {rotary.kind: rotary}).index(rotary.kind)
    rotaries.setdefault(rotary.kind, rotary)
    if seen.turning.angles == "halves":
        return number, None
    width = int(rotary(torch.zeros(1, 1, dtype=torch.int64))[0].shape[-1])
    return number, torch.cat([order_of_pairs(width, seen.turning.angles), torch.arange(width, dim)])


def _everywhere(places: torch.Tensor, heads: int, dim: int) -> torch.Tensor:
    """The same order in each head, one behind the other."""
    return (torch.arange(heads)[:, None] * dim + places).flatten()


def _joined_bias(projections: list[Linear]) -> torch.Tensor | None:
    """Biases in a row; zeros for projections that have none."""
    if all(each.bias is None for each in projections):
        return None
    return torch.cat(
        [torch.zeros(each.outputs) if each.bias is None else _copy(each.bias) for each in projections]
    )


def _mlp(module: Any) -> Mlp:
    projections = mlp_projections(module)
    if projections is None:
        children = {name for name, _ in module.named_children()}
        raise NotUsual(f"{type(module).__name__} has the parts {', '.join(sorted(children))}")
    return _dense(module, projections)


def _mixture(block: Any, beside: Any, hidden: int, dtype: torch.dtype) -> Moe:
    """A block with a router and experts; one of all tokens may be beside it."""
    children = {name for name, part in block.named_children() if part is not _norm_in(block)}
    children -= {"experts", "gate", "router", "act_fn"}
    shared = shared_of(block)
    if beside is not None and shared is not None:
        raise NotUsual("two experts of all tokens")
    others = children - SHARED - {SHARED_GATE}
    if others or len(children & SHARED) > 1 or (SHARED_GATE in children and shared is None):
        raise NotUsual(f"{type(block).__name__} has the parts {', '.join(sorted(children))}")
    experts = block.experts
    form, is_partial = _form_of(experts, hidden)
    router, bias = weights_of(router_of(block))
    first_whole = experts.first_whole if is_partial else None
    if is_partial and form.has_bias and first_whole is None:
        raise NotUsual("experts with biases of which tensor-parallel ranks have parts")
    return Moe(
        router=router,
        router_bias=None if bias is None else _copy(bias),
        routing=routing_of(block, dtype),
        experts=experts,
        form=form,
        is_partial=is_partial,
        num_experts=router.shape[0],
        first_whole=first_whole,
        shared=next((_mlp(each) for each in (shared, beside) if each is not None), None),
        shared_gate=whole(getattr(block, SHARED_GATE)).weight if SHARED_GATE in children else None,
    )


def _form_of(experts: Any, hidden: int) -> tuple[ExpertForm, bool]:
    """The form of experts, and whether they give partial sums."""
    form = form_of(experts)
    if form.hidden != hidden:
        raise NotUsual("experts laid out the other way round")
    return form, isinstance(experts, SummedExperts)


def _mixture_beside(layer: Any, inside: Inside, mlp: Mlp | Moe, hidden: int) -> Moe:
    """A mixture that stands beside an MLP, each with norms of its own."""
    assert isinstance(mlp, Mlp)
    experts = getattr(layer, inside.experts)
    form, is_partial = _form_of(experts, hidden)
    product, norm, routing = scaled_routing_of(getattr(layer, inside.router))
    names = inside.before_experts, inside.behind_mlp, inside.behind_experts
    return Moe(
        router=whole(product).weight,
        router_bias=None,
        routing=routing,
        experts=experts,
        form=form,
        is_partial=is_partial,
        num_experts=product.weight.shape[0],
        shared=mlp,
        norms=MoeNorms(norm, *(norm_of(getattr(layer, name), hidden) for name in names)),
    )


def _norm_in(block: Any) -> Any:
    """The norm of what a mixture gives, if it is one of its parts."""
    found = [part for name, part in block.named_children() if name.endswith("norm")]
    return found[0] if len(found) == 1 else None


def shared_of(block: Any) -> Any:
    """The module of a mixture's expert of all tokens; None if it has none."""
    return next((part for name, part in block.named_children() if name in SHARED), None)


def _dense(module: Any, projections: list[Any]) -> Mlp:
    *inward, down = [*map(whole, projections[:-1]), linear_of(projections[-1])]
    width = down.weight.shape[1]
    gate, up = (inward[0].weight, inward[-1].weight) if len(inward) == 2 else (None, inward[0].weight)
    if up.shape[0] == 2 * width:
        gate, up = rows_of(up, slice(0, width)), rows_of(up, slice(width, 2 * width))
    if up.shape[0] != width:
        raise NotUsual("an MLP whose parts have different widths")
    down_bias = None if down.bias is None else _copy(down.bias)
    return Mlp(
        gate, up, down.weight, down.is_partial, width, activation_of(module), _joined_bias(inward), down_bias
    )


def _copy(vector: torch.Tensor) -> torch.Tensor:
    """A copy in float32, since the model's own tensor is emptied."""
    return vector.detach().to(torch.float32, copy=True)


def _only(module: Any, names: set[str], optional: frozenset[str] | set[str] = frozenset()) -> None:
    """Check that a module has no other parts, and no weights of its own."""
    if module is None:
        raise NotUsual("another structure")
    found = {name for name, _ in module.named_children()}
    if not names <= found <= names | optional or any(True for _ in module.named_parameters(recurse=False)):
        raise NotUsual(f"{type(module).__name__} has the parts {', '.join(sorted(found))}")
