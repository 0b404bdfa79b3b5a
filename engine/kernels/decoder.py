"""Recognises a transformers model whose layers are of the usual kind, and finds its weights.

Usual: norm, attention with rotary positions, norm, gated MLP or mixture of experts, each added to the
residual stream. Only the parts are looked at. What the model's code does with them is tried by running both
(:mod:`engine.kernels.trial`). So a family that differs in a detail is computed by torch, not served wrong.

A model may be a shard: a stage without the embedding or the output layer, or a tensor-parallel rank's part,
whose attention and MLPs give partial sums (:mod:`parallel.tensor_plan`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.base import LayerShape
from engine.kernels import NotUsual
from engine.kernels.packing import LANES, PACK
from engine.kernels.routing import Routing, router_of, routing_of, weights_of
from engine.model.shard import PassThrough
from parallel.tensor_parallel import ParallelRMSNorm, RowParallelLinear, SummedExperts, VocabularyParallel

MLPS = ("mlp", "block_sparse_moe", "feed_forward")
"""Names of what stands behind attention in a layer."""
SHARED = {"shared_expert", "shared_experts", "shared_mlp"}
"""Names of an expert of all tokens in a mixture."""
SHARED_GATE = "shared_expert_gate"


@dataclass(frozen=True)
class Attention:
    """The weights of an attention layer."""

    qkv: tuple[torch.Tensor, ...]
    """Weights of queries [heads * dim, hidden], keys and values [kv_heads * dim, hidden]."""
    qkv_bias: torch.Tensor | None
    out: torch.Tensor
    out_bias: torch.Tensor | None
    is_partial: bool
    """Whether its result, without the bias, is a sum over the tensor-parallel ranks."""
    head_norms: torch.Tensor | None
    """[2, dim], of queries and keys."""
    head_eps: float
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
    factors: torch.Tensor | None = None
    """[positions] float32: what the queries of a position are multiplied by."""

    @property
    def projected_width(self) -> int:
        """Numbers of a token's queries, keys and values."""
        return (self.heads + self.kv_heads) * self.dim + self.kv_heads * self.value_dim

    @property
    def width(self) -> int:
        """Numbers that attention gives for a token."""
        return self.heads * self.value_dim


@dataclass(frozen=True)
class Mlp:
    """A gated MLP."""

    gate: torch.Tensor
    """[width, hidden], like ``up``"""
    up: torch.Tensor
    down: torch.Tensor
    is_partial: bool
    """As in :class:`Attention`."""
    width: int

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks."""
        return int(self.is_partial)


@dataclass(frozen=True)
class Moe:
    """A router and its experts."""

    router: torch.Tensor
    """[experts, hidden]; may be float32 in a model of another type."""
    router_bias: torch.Tensor | None
    routing: Routing
    experts: Any
    """The module with ``gate_up_proj`` [local experts, 2 * width, hidden] and ``down_proj``."""
    is_partial: bool
    """As in :class:`Attention`."""
    num_experts: int
    width: int
    shared: Mlp | None = None
    """An expert of all tokens, whose result is added."""
    shared_gate: torch.Tensor | None = None
    """[1, hidden]: the sigmoid of its product is a factor on the shared expert's result."""

    @property
    def top_k(self) -> int:
        return self.routing.top_k

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks."""
        return self.is_partial + (self.shared is not None and self.shared.is_partial)


@dataclass(frozen=True)
class Layer:
    norm: torch.Tensor
    eps: float
    attention: Attention
    second_norm: torch.Tensor
    mlp: Mlp | Moe


@dataclass(frozen=True)
class Embedding:
    weight: torch.Tensor
    """[tokens here, hidden]"""
    first: int
    """Number of the first token here."""
    is_partial: bool
    """Whether other ranks have other tokens."""


@dataclass(frozen=True)
class Output:
    """The last norm, and the output layer."""

    norm: torch.Tensor
    eps: float
    head: torch.Tensor
    """[tokens here, hidden]"""
    vocab: int
    """Tokens here."""
    first: int
    """Number of the first of them."""
    is_partial: bool
    """Whether other ranks have other tokens."""


@dataclass(frozen=True)
class Decoder:
    """All parts of a model that a step needs."""

    embedding: Embedding | None
    """None where a stage before has it."""
    layers: tuple[Layer, ...]
    output: Output | None
    """None where a later stage has it."""
    hidden: int
    rotary: Any
    dtype: torch.dtype

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
        here |= {mlp.width for layer in self.layers for mlp in _mlps(layer.mlp) if mlp.is_partial}
        return {inputs * ranks for inputs in here}

    @property
    def num_sums(self) -> int:
        """Sums over the tensor-parallel ranks in one step."""
        partial = [layer.attention.is_partial + layer.mlp.num_sums for layer in self.layers]
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
        raise NotUsual(f"weights in {dtype}")
    base: Any = getattr(module, module.base_model_prefix, None)
    _only(module, {module.base_model_prefix, "lm_head"})
    _only(base, {"embed_tokens", "layers", "norm", "rotary_emb"})
    parts = [layer for layer in base.layers if not isinstance(layer, PassThrough)]
    hidden = int(module.config.get_text_config().hidden_size)
    if hidden % 2 or len(parts) != len(shapes):
        raise NotUsual("an odd width")
    layers = tuple(_layer(layer, shape, hidden, dtype) for layer, shape in zip(parts, shapes, strict=True))
    kinds = {(mlp.num_experts, mlp.top_k) for mlp in (layer.mlp for layer in layers) if isinstance(mlp, Moe)}
    if len(kinds) > 1:
        raise NotUsual("another number of experts in another layer")
    embedding, output = _embedding(base.embed_tokens, hidden), _output(base.norm, module.lm_head, hidden)
    return Decoder(embedding, layers, output, hidden, base.rotary_emb, dtype)


def _embedding(module: Any, hidden: int) -> Embedding | None:
    if isinstance(module, PassThrough):
        return None
    if module.weight.shape[1] != hidden:
        raise NotUsual("an embedding of another width")
    is_partial = isinstance(module, VocabularyParallel)
    return Embedding(module.weight, module.first if is_partial else 0, is_partial)


def _output(norm: Any, head: Any, hidden: int) -> Output | None:
    if isinstance(head, PassThrough):
        return None
    if head.bias is not None:
        raise NotUsual("an output layer with a bias")
    first = getattr(head, "first", None)
    return Output(*_norm(norm, hidden), head.weight, head.weight.shape[0], first or 0, first is not None)


def _layer(layer: Any, shape: LayerShape, hidden: int, dtype: torch.dtype) -> Layer:
    mlp = next((name for name in MLPS if hasattr(layer, name)), MLPS[0])
    _only(layer, {"self_attn", mlp, "input_layernorm", "post_attention_layernorm"})
    norm, eps = _norm(layer.input_layernorm, hidden)
    second_norm, second_eps = _norm(layer.post_attention_layernorm, hidden)
    if eps != second_eps:
        raise NotUsual("norms of different precision")
    block = getattr(layer, mlp)
    computes = _mixture(block, hidden, dtype) if hasattr(block, "experts") else _mlp(block)
    return Layer(norm, eps, _attention(layer.self_attn, shape), second_norm, computes)


def _attention(module: Any, shape: LayerShape) -> Attention:
    _only(module, {"q_proj", "k_proj", "v_proj", "o_proj"}, optional={"q_norm", "k_norm"})
    dim, value_dim, kv_heads = shape.key_dim, shape.value_dim, shape.kv_heads
    if dim % LANES or value_dim % LANES:
        raise NotUsual(f"heads of {dim} and {value_dim}")
    projections = [_whole(getattr(module, name)) for name in ("q_proj", "k_proj", "v_proj")]
    heads = projections[0][0].shape[0] // dim
    sizes = heads * dim, kv_heads * dim, kv_heads * value_dim
    for (weight, _), size in zip(projections, sizes, strict=True):
        if weight.shape[0] != size:
            raise NotUsual("projections of another size than its heads")
    biases = [bias for _, bias in projections if bias is not None]
    if len(biases) not in (0, 3):
        raise NotUsual("a bias in some projections only")
    norms, head_eps = None, 0.0
    if hasattr(module, "q_norm"):
        (query, head_eps), (key, _) = _norm(module.q_norm, dim), _norm(module.k_norm, dim)
        norms = torch.cat([query, key])
    out, out_bias, is_partial = _linear(module.o_proj)
    return Attention(
        qkv=tuple(weight for weight, _ in projections),
        qkv_bias=_copy(torch.cat(biases)) if biases else None,
        out=out,
        out_bias=None if out_bias is None else _copy(out_bias),
        is_partial=is_partial,
        head_norms=norms,
        head_eps=head_eps,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        scale=float(module.scaling),
        window=shape.window or 0,
        value_dim=value_dim,
    )


def _mlp(module: Any) -> Mlp:
    children = {name for name, _ in module.named_children()} - {"act_fn"}
    if children != {"gate_proj", "up_proj", "down_proj"}:
        raise NotUsual(f"{type(module).__name__} has the parts {', '.join(sorted(children))}")
    _silu(module)
    gate, gate_bias = _whole(module.gate_proj)
    up, up_bias = _whole(module.up_proj)
    down, down_bias, is_partial = _linear(module.down_proj)
    if any(bias is not None for bias in (gate_bias, up_bias, down_bias)):
        raise NotUsual("an MLP with biases")
    return Mlp(gate, up, down, is_partial, gate.shape[0])


def _mixture(block: Any, hidden: int, dtype: torch.dtype) -> Moe:
    """A block with a router, experts, and maybe one that all tokens share."""
    children = {name for name, _ in block.named_children()} - {"experts", "gate", "router", "act_fn"}
    shared = children & SHARED
    if children - SHARED - {SHARED_GATE} or len(shared) > 1 or (SHARED_GATE in children and not shared):
        raise NotUsual(f"{type(block).__name__} has the parts {', '.join(sorted(children))}")
    experts = block.experts
    own = {name: tuple(weight.shape) for name, weight in experts.named_parameters()}
    if own.keys() != {"gate_up_proj", "down_proj"}:
        raise NotUsual(f"experts with {', '.join(sorted(own))}")
    _silu(experts)
    width = own["gate_up_proj"][1] // 2
    if own["gate_up_proj"][2] != hidden or own["down_proj"][1:] != (hidden, width):
        raise NotUsual("experts laid out the other way round")
    if width % 2:
        raise NotUsual("an odd width")
    router, bias = weights_of(router_of(block))
    return Moe(
        router=router,
        router_bias=None if bias is None else _copy(bias),
        routing=routing_of(block, dtype),
        experts=experts,
        is_partial=isinstance(experts, SummedExperts),
        num_experts=router.shape[0],
        width=width,
        shared=_mlp(getattr(block, shared.pop())) if shared else None,
        shared_gate=_whole(getattr(block, SHARED_GATE))[0] if SHARED_GATE in children else None,
    )


def _copy(vector: torch.Tensor) -> torch.Tensor:
    """A copy in float32, since the model's own tensor is emptied."""
    return vector.detach().to(torch.float32, copy=True)


def _silu(module: Any) -> None:
    act = getattr(module, "act_fn", None)
    if type(act).__name__ not in ("SiLU", "SiLUActivation"):
        raise NotUsual(f"the activation {type(act).__name__}")


def _whole(module: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of a linear layer that has all of its inputs."""
    weight, bias, is_partial = _linear(module)
    if is_partial:
        raise NotUsual("partial sums in the middle of a layer")
    return weight, bias


def _linear(module: Any) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
    """Weight, bias, and whether other ranks have other inputs."""
    is_partial = type(module) is RowParallelLinear
    if module.splits_input if is_partial else type(module) is not torch.nn.Linear:
        raise NotUsual(f"a projection of type {type(module).__name__}")
    if module.weight.shape[1] % 2:
        raise NotUsual("an odd width")
    return module.weight, module.bias, is_partial


def _norm(module: Any, width: int) -> tuple[torch.Tensor, float]:
    if isinstance(module, ParallelRMSNorm):
        raise NotUsual("a norm over the heads of all ranks")
    parameters = dict(module.named_parameters())
    eps = getattr(module, "variance_epsilon", None)
    if parameters.keys() != {"weight"} or parameters["weight"].shape != (width,) or eps is None:
        raise NotUsual(f"a norm of type {type(module).__name__}")
    return _copy(parameters["weight"]), float(eps)


def _only(module: Any, names: set[str], optional: frozenset[str] | set[str] = frozenset()) -> None:
    """Check that a module has no other parts, and no weights of its own."""
    if module is None:
        raise NotUsual("another structure")
    found = {name for name, _ in module.named_children()}
    if not names <= found <= names | optional or any(True for _ in module.named_parameters(recurse=False)):
        raise NotUsual(f"{type(module).__name__} has the parts {', '.join(sorted(found))}")
