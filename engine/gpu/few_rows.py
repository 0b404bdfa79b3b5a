"""Decoder layers of few rows on a GPU, with norms and residuals inside of products.

A layer keeps transformers' code, which computes it with more rows. Whether it is one of the usual form is
read from its source: attention and feed-forward, each behind a norm and beside a residual. Its products are
compared with what they replace before they are used.
"""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from typing import Any

import torch
import torch.nn.functional as F

from engine.gpu import fused_layers
from engine.gpu.few_routers import FewRouter, fuse_routers
from engine.gpu.fused_layers import FusedNorm, GatedLayer, MergedLinear, are_alike, random_rows
from engine.gpu.grouped_experts import use_few_experts
from engine.gpu.late_rotary import LateNorm

logger = logging.getLogger(__name__)

LAYER = (
    "residual = hidden_states",
    "hidden_states = self.input_layernorm(hidden_states)",
    "hidden_states, _ = self.self_attn(hidden_states=hidden_states",
    "hidden_states = residual + hidden_states",
    "residual = hidden_states",
    "hidden_states = self.post_attention_layernorm(hidden_states)",
    "hidden_states = self.mlp(hidden_states)",
    "hidden_states = residual + hidden_states",
    "return hidden_states",
)
"""Statements of a usual layer; that of attention goes on."""
ATTENTION_USES = (
    "hidden_states.shape",
    "self.q_proj(hidden_states)",
    "self.k_proj(hidden_states)",
    "self.v_proj(hidden_states)",
)
"""What attention does with its inputs."""
ATTENTION_END = ("attn_output = self.o_proj(attn_output)", "return (attn_output, attn_weights)")


def fuse_few_rows(model: Any, merged: dict[int, MergedLinear], *, experts: bool = True) -> int:
    """Fuse the usual layers of a model for steps of few rows; returns how many.

    ``merged``: products by the id of their first layer. ``experts``: fuse those, too.
    """
    count, seen = 0, dict[type, bool]()
    for layer in model.modules():
        parts = _parts_of(layer, merged)
        if parts is None:
            continue
        if type(layer) not in seen:
            seen[type(layer)] = is_usual(type(layer), type(layer.self_attn)) and parts.agree()
        if seen[type(layer)]:
            parts.put_in_place()
            layer.forward = FewRowsLayer(layer, parts)
            count += 1
    mixtures = 0
    if experts:
        mixtures = use_few_experts(model)
        fuse_routers(model)
    logger.info("fused for few rows: %d layers, experts of %d", count, mixtures)
    return count


def leave_layers(model: Any) -> None:
    """Let layers compute any number of rows as they compute many."""
    for layer in model.modules():
        if isinstance(forward := vars(layer).get("forward"), FewRowsLayer | FewRouter):
            forward.most_rows = 0


def is_usual(layer: type, attention: type) -> bool:
    """Whether a layer and its attention have the usual form, read from their sources."""
    try:
        whole, inner = _statements(layer), _statements(attention)
    except (AttributeError, OSError, SyntaxError, TypeError):
        return False
    found = [ast.unparse(each) for each in whole]
    if len(found) != len(LAYER) or not all(map(str.startswith, found, LAYER)):
        return False
    if any(one != other for one, other in zip(found, LAYER, strict=True) if "self_attn" not in other):
        return False
    text = "\n".join(ast.unparse(each) for each in inner)
    uses = text.count("hidden_states")
    return (
        sum(text.count(each) for each in ATTENTION_USES) == uses
        and all(text.count(each) == 1 for each in ATTENTION_USES[1:])
        and tuple(ast.unparse(each) for each in inner[-2:]) == ATTENTION_END
        and text.count("self.o_proj") == 1
    )


def _statements(kind: type) -> list[ast.stmt]:
    """Statements of a module's ``forward``, without its docstring."""
    forward: Any = kind.forward  # type: ignore[attr-defined]
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return [
        each
        for each in function.body
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]


class LayerParts:
    """Products and norms of a usual layer."""

    def __init__(
        self,
        norms: tuple[LateNorm, LateNorm],
        query: MergedLinear,
        output: Any,
        feed_forward: GatedLayer | None,
    ) -> None:
        """``query``: of queries, keys and values; ``feed_forward``: None if it is no gated one."""
        self.norms, self.query, self.feed_forward = norms, query, feed_forward
        self.output = OutputProduct(output)

    def put_in_place(self) -> None:
        """Let the product behind attention take residuals."""
        self.output.module.forward = self.output

    def give(self, hidden: torch.Tensor) -> None:
        """Give attention's products what they take in: the norm of its inputs, and the residual."""
        self.query.norm, self.output.residual = self.norms[0], hidden

    def check_taken(self) -> None:
        """Raise RuntimeError if they did not take it."""
        left = self.query.norm, self.output.residual
        self.query.norm = self.output.residual = None
        if left != (None, None):
            raise RuntimeError("attention did not call its first or its last product")

    def agree(self) -> bool:
        """Whether the products give what they replace gives."""
        from engine.gpu.fused_launches import gated, rms_norm
        from engine.gpu.layer_products import layer_product

        weight, bias = self.query.weights
        norm = self.norms[0]
        rows = random_rows(weight, weight.shape[1])

        def normed() -> torch.Tensor:
            return F.linear(rms_norm(rows, norm.weight, norm.epsilon, plus_one=norm.plus_one), weight, bias)

        last = self.output.module
        inner, residual = (
            random_rows(last.weight, last.in_features),
            random_rows(last.weight, last.out_features),
        )
        found = are_alike(lambda: layer_product(rows, weight, bias, norm=norm), normed) and are_alike(
            lambda: layer_product(inner, last.weight, last.bias, residual=residual),
            lambda: F.linear(inner, last.weight, last.bias) + residual,
        )
        if self.feed_forward is None or not found:
            return found
        down, gate = self.feed_forward.down, self.feed_forward.tanh
        both = random_rows(down.weight, 2 * down.in_features)
        return are_alike(
            lambda: layer_product(both, down.weight, down.bias, gate=gate, residual=residual),
            lambda: F.linear(gated(both, tanh=gate), down.weight, down.bias) + residual,
        )


class OutputProduct:
    """``forward`` of the product behind attention, which adds a residual if it has got one."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.residual: torch.Tensor | None = None
        """What the next call adds."""

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        residual, self.residual = self.residual, None
        if residual is None:
            return F.linear(inputs, self.module.weight, self.module.bias)
        from engine.gpu.layer_products import layer_product

        return layer_product(inputs, self.module.weight, self.module.bias, residual=residual)


class FewRowsLayer:
    """``forward`` of a usual layer."""

    def __init__(self, layer: Any, parts: LayerParts) -> None:
        from engine.gpu.layer_products import MOST_ROWS

        self._layer, self._parts = layer, parts
        self.most_rows = MOST_ROWS
        """Rows up to which products take everything in."""

    def __call__(self, hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        layer, parts = self._layer, self._parts
        few = hidden_states.shape[0] == 1 and hidden_states.shape[1] <= self.most_rows
        if rest or not few or hidden_states.device.type not in fused_layers.DEVICES:
            return type(layer).forward(layer, hidden_states, *rest, **options)
        from engine.gpu.layer_products import layer_product

        parts.give(hidden_states)
        attended, _ = layer.self_attn(hidden_states=hidden_states, **options)
        parts.check_taken()
        if parts.feed_forward is None:
            return attended + layer.mlp(layer.post_attention_layernorm(attended))
        down = parts.feed_forward.down
        inner = layer_product(attended, *parts.feed_forward.product.weights, norm=parts.norms[1])
        return layer_product(inner, down.weight, down.bias, gate=parts.feed_forward.tanh, residual=attended)


def _parts_of(layer: Any, merged: dict[int, MergedLinear]) -> LayerParts | None:
    """Parts of a layer that has all of them, as plain as they must be."""
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    norms = [
        getattr(getattr(layer, name, None), "forward", None)
        for name in ("input_layernorm", "post_attention_layernorm")
    ]
    query = merged.get(id(getattr(attention, "q_proj", None)))
    output: Any = getattr(attention, "o_proj", None)
    if mlp is None or query is None or not query.is_plain or not _is_plain(output):
        return None
    if not all(isinstance(each, FusedNorm) for each in norms) or "forward" in vars(layer):
        return None
    feed_forward = vars(mlp).get("forward")
    if not isinstance(feed_forward, GatedLayer) or not (
        feed_forward.product.is_plain and _is_plain(feed_forward.down)
    ):
        feed_forward = None
    first, second = (each.late_norm for each in norms if isinstance(each, FusedNorm))
    if first.weight.dtype != query.weights[0].dtype or output.weight.dtype != first.weight.dtype:
        return None
    return LayerParts((first, second), query, output, feed_forward)


def _is_plain(module: Any) -> bool:
    """Whether it is a linear layer that nothing else computes."""
    return (
        type(module) is torch.nn.Linear
        and "forward" not in vars(module)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and module.weight.stride(1) == 1
    )
