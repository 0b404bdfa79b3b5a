"""Fusion of a loaded model's norms, rotary embeddings, gates and products on GPUs.

A decode step on a GPU takes as long as its launches where there are few requests. transformers' code stays as
it is. A norm gets another ``forward``, and so does a feed-forward layer. The projections of one input compute
together when the first is called. A family's function for rotary embeddings is replaced by one that takes
ours where it fits. What is replaced is compared first, norms with the model's own weights, and is left as it
was where it differs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from engine.gpu.coded_parameter import coded_of
from engine.gpu.late_rotary import LATE, LateNorm, LateRotation, hands_norms_over, hands_over

logger = logging.getLogger(__name__)

DEVICES = {"cuda"}
"""Kinds of devices on which rotary embeddings are ours."""
ROTARY = "apply_rotary_pos_emb"
"""Names of families' rotary function, in the module of their layers."""
MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linear layers that have one input, by the names that families give them."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 3e-3}
CHECKED_ROWS = 5

Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class FusedLayers:
    """Layers of a model that were fused."""

    counts: dict[str, int]
    """How many of each kind."""
    merged: dict[int, MergedLinear]
    """Products, by the id of their first layer."""


def fuse_layers(model: Any, already: Sequence[MergedLinear] = ()) -> FusedLayers:
    """Fuse layers of a loaded model.

    ``already``: products that were merged before.
    """
    norms, seen = 0, dict[tuple[type, int], bool | None]()
    dtype = getattr(model, "dtype", None)
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and getattr(module, "weight", None) is not None:
            norms += _fuse_norm(module, dtype or module.weight.dtype, seen)
    merged = [each for module in model.modules() for names in MERGED if (each := _merge(module, names))]
    merged += already
    gates = _fuse_gates(model, {id(each.layers[0]): each for each in merged})
    rotary = sum(_fuse_rotary(sys.modules[name], layers) for name, layers in _attention_layers(model).items())
    _normalise_late(model)
    found = {
        "norms": norms,
        "merged products": len(merged),
        "gates": gates,
        "rotary embeddings": rotary,
    }
    logger.info("fused: %s", ", ".join(f"{count} {name}" for name, count in found.items()))
    return FusedLayers(found, {id(each.layers[0]): each for each in merged})


# ---- norms


def _fuse_norm(module: Any, dtype: torch.dtype, seen: dict[tuple[type, int], bool | None]) -> bool:
    """Replace a norm by our kernel if that computes the same; returns whether.

    ``dtype`` is the model's, and its inputs'. ``seen``: by kind, whether its weight is one less than the
    factor; None: the kernel does not fit.
    """
    kind = (type(module), module.weight.numel())
    if kind not in seen:
        found = (plus_one for plus_one in (False, True) if _norms_alike(module, dtype, plus_one))
        seen[kind] = next(found, None)
    plus_one = seen[kind]
    if plus_one is None:
        return False
    module.forward = FusedNorm(module, plus_one)
    return True


class FusedNorm:
    """``forward`` of a norm."""

    def __init__(self, module: Any, plus_one: bool) -> None:
        self._module, self._weight = module, module.weight
        self._epsilon = float(getattr(module, "variance_epsilon", getattr(module, "eps", 0.0)))
        self._plus_one = plus_one
        self.rotary: FusedRotary | None = None
        """Rotary embeddings that take this norm of each head over, where they are computed late."""

    @property
    def late_norm(self) -> LateNorm:
        """The same as a norm that another kernel computes on its way."""
        return LateNorm(self._weight, self._epsilon, self._plus_one)

    def __call__(self, hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if rest or more:
            return type(self._module).forward(self._module, hidden, *rest, **more)
        if self.rotary is not None and self.rotary.is_late_for(hidden):
            LATE.keep_norm(self.late_norm)
            return hidden
        from engine.gpu import fused_launches

        return fused_launches.rms_norm(hidden, self._weight, self._epsilon, plus_one=self._plus_one)


def _norms_alike(module: Any, dtype: torch.dtype, plus_one: bool) -> bool:
    """Whether our kernel computes the same as a norm.

    Rows become smaller and smaller, so that its epsilon counts.
    """
    weight = module.weight
    rows = torch.randn(1, CHECKED_ROWS, 2, weight.numel(), generator=torch.Generator().manual_seed(1))
    rows *= torch.logspace(0, -4, CHECKED_ROWS)[:, None, None]
    rows = rows.to(weight.device, dtype)
    return are_alike(lambda: FusedNorm(module, plus_one)(rows), lambda: module(rows))


# ---- products with one input


def plain_layers(module: Any, names: Sequence[str]) -> list[torch.nn.Linear] | None:
    """These linear layers of a module, if all are there, plain, and of one kind.

    One that rounds its inputs has a ``forward`` of its own, and is not.
    """
    layers: list[Any] = [getattr(module, name, None) for name in names]
    if not all(type(layer) is torch.nn.Linear and "forward" not in vars(layer) for layer in layers):
        return None
    if len({(layer.in_features, layer.bias is None, layer.weight.dtype) for layer in layers}) != 1:
        return None
    return layers


def _merge(module: Any, names: Sequence[str]) -> MergedLinear | None:
    """Merge these linear layers of a module, if they can be."""
    layers = plain_layers(module, names)
    if layers is None:
        return None
    weight = torch.cat([layer.weight.data for layer in layers])
    sizes = [layer.out_features for layer in layers]
    for layer, part in zip(layers, weight.split(sizes), strict=True):
        layer.weight = torch.nn.Parameter(part, requires_grad=False)  # frees the one before
    return MergedLinear(layers, partial(F.linear, weight=weight, bias=biases_of(layers)))


def biases_of(layers: Sequence[torch.nn.Linear]) -> torch.Tensor | None:
    """Biases of layers in a row; None if they have none."""
    if layers[0].bias is None:
        return None
    return torch.cat([layer.bias.data for layer in layers])


class MergedLinear:
    """Linear layers whose weights stand below each other, as one product.

    The first that is called computes for all; the others take their parts if they get the same input.
    """

    def __init__(
        self, layers: Sequence[torch.nn.Linear], product: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """``product``: of inputs [..., in], with the outputs of all layers in a row."""
        self.layers, self.product = layers, product
        self._sizes = [layer.out_features for layer in layers]
        self.norm: LateNorm | None = None
        """Norm of the inputs of the next call, which have few rows."""
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()
        for index, layer in enumerate(layers):
            layer.forward = self.part(index)

    @property
    def is_plain(self) -> bool:
        """Whether the product is torch's, with weights that are not packed."""
        return isinstance(self.product, partial) and self.product.func is F.linear

    @property
    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights and bias of a plain product."""
        assert isinstance(self.product, partial)
        return self.product.keywords["weight"], self.product.keywords["bias"]

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """Outputs of all merged layers, beside each other."""
        norm, self.norm = self.norm, None
        if norm is None:
            return self.product(inputs)
        from engine.gpu.layer_products import layer_product

        return layer_product(inputs, *self.weights, norm=norm)

    def part(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """``forward`` of one of the layers."""

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if index == 0:
                self._input = inputs
                self._parts = self(inputs).split(self._sizes, dim=-1)
                return self._parts[0]
            if inputs is not self._input:
                return self(inputs).split(self._sizes, dim=-1)[index]
            found = self._parts[index]
            if index == len(self._sizes) - 1:
                self._input, self._parts = None, ()
            return found

        return forward


# ---- gates


def _fuse_gates(model: Any, merged: dict[int, MergedLinear]) -> int:
    """Replace gates of experts and merged products by a kernel; returns how many.

    ``merged``: by the id of the first layer of each.
    """
    count, seen = 0, dict[tuple[type, type], bool | None]()
    for module in list(model.modules()):
        kind = (type(module), type(getattr(module, "act_fn", None)))
        product = merged.get(id(getattr(module, "gate_proj", None)))
        if product is not None and hasattr(module, "down_proj"):
            if kind not in seen:
                seen[kind] = _gate_of(partial(_gated_alike, module, product))
            if (tanh := seen[kind]) is not None:
                module.forward = GatedLayer(module, product, FusedGate(tanh))
                count += 1
        elif getattr(module, "has_gate", False) and hasattr(module, "_apply_gate"):
            if kind not in seen:
                seen[kind] = _gate_of(partial(_experts_alike, module))
            if (tanh := seen[kind]) is not None:
                module._apply_gate = FusedGate(tanh)
                count += 1
    return count


def _gate_of(is_alike: Callable[[bool], bool]) -> bool | None:
    """Whether a gate is GELU; None if it is neither GELU nor SiLU."""
    return next((tanh for tanh in (False, True) if is_alike(tanh)), None)


@dataclass(frozen=True)
class FusedGate:
    """Activations of the first half of each row, times the second half."""

    tanh: bool
    """GELU by its tanh, else SiLU."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        from engine.gpu import fused_launches

        return fused_launches.gated(rows, tanh=self.tanh)


class GatedLayer:
    """``forward`` of a feed-forward layer."""

    def __init__(self, module: Any, product: MergedLinear, gate: FusedGate) -> None:
        self._module, self.product, self._gate = module, product, gate

    @property
    def down(self) -> Any:
        """The last product."""
        return self._module.down_proj

    @property
    def tanh(self) -> bool:
        """Whether the activation is GELU by its tanh, else SiLU."""
        return self._gate.tanh

    def __call__(self, hidden: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if rest or more:
            return type(self._module).forward(self._module, hidden, *rest, **more)
        return self._module.down_proj(self._gate(self.product(hidden)))


def _gated_alike(module: Any, product: MergedLinear, tanh: bool) -> bool:
    """Whether a layer computes this before its last product, which workers may share."""
    first = product.layers[0]
    rows = random_rows(first.weight, first.in_features)
    last = module._modules["down_proj"]
    module._modules["down_proj"] = torch.nn.Identity()
    try:
        return are_alike(lambda: FusedGate(tanh)(product(rows)), lambda: module(rows))
    finally:
        module._modules["down_proj"] = last


def _experts_alike(module: Any, tanh: bool) -> bool:
    weight = module.gate_up_proj
    codes = coded_of(weight)
    width = weight.shape[2 if module.is_transposed else 1] if codes is None else codes.outputs
    rows = random_rows(weight, width)[0]
    return are_alike(lambda: FusedGate(tanh)(rows), lambda: module._apply_gate(rows))


def random_rows(like: torch.Tensor, width: int) -> torch.Tensor:
    """[1, rows, width] on the device of a weight, of its type."""
    rows = torch.randn(1, CHECKED_ROWS, width, generator=torch.Generator().manual_seed(3))
    return rows.to(like.device, like.dtype)


# ---- rotary embeddings


def _attention_layers(model: Any) -> dict[str, set[type]]:
    """Kinds of attention layers of a model, by the Python module that defines them."""
    kinds = {type(module) for module in model.modules() if hasattr(module, "o_proj")}
    found: dict[str, set[type]] = {}
    for kind in kinds:
        if hasattr(sys.modules[kind.__module__], ROTARY):
            found.setdefault(kind.__module__, set()).add(kind)
    return found


def _fuse_rotary(family: Any, layers: set[type]) -> int:
    """Replace a family's rotary function, if our kernel computes the same."""
    before = getattr(family, ROTARY)
    late = all(hands_over(layer, ROTARY) for layer in layers)
    if isinstance(before, FusedRotary):
        before.late = before.late and late
        return 1
    fused = FusedRotary(before, late=late and stores_alike())
    if not fused.agrees():
        return 0
    setattr(family, ROTARY, fused)
    return 1


def _normalise_late(model: Any) -> None:
    """Let attention normalise queries and keys where it turns them."""
    seen: dict[tuple[Any, ...], bool] = {}
    for module in model.modules():
        norms: list[Any] = [
            getattr(getattr(module, name, None), "forward", None) for name in ("q_norm", "k_norm")
        ]
        rotary = getattr(sys.modules[type(module).__module__], ROTARY, None)
        if not (isinstance(rotary, FusedRotary) and rotary.late) or not all(
            type(each) is FusedNorm for each in norms
        ):
            continue
        query, key = (each.late_norm for each in norms)
        kind = type(module), query.weight.dtype, query.epsilon, query.plus_one
        if kind not in seen:
            seen[kind] = hands_norms_over(kind[0], ROTARY) and stores_alike((query, key))
        width = getattr(module, "head_dim", None)
        alike = (query.epsilon, query.plus_one) == (key.epsilon, key.plus_one)
        if seen[kind] and alike and query.weight.numel() == key.weight.numel() == width:
            for each in norms:
                each.rotary = rotary


class FusedRotary:
    """A family's function for rotary embeddings, and ours where a GPU computes."""

    def __init__(self, plain: Rotary, *, late: bool = False) -> None:
        """``late``: layers give attention what they get from here, which can turn it then."""
        self.plain = plain
        self.late = late

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *rest: Any,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys [1, heads, tokens, dim], turned by angles [1, tokens, dim]."""
        if query.device.type not in DEVICES or rest or more or not fits(query, key, cos):
            LATE.check()
            return self.plain(query, key, cos, sin, *rest, **more)
        if self.late and LATE.on:
            return LATE.put(query, key, LateRotation(cos, sin, LATE.take_norms()))
        from engine.gpu import fused_launches

        return fused_launches.rotate(query, key, cos, sin)

    def is_late_for(self, hidden: torch.Tensor) -> bool:
        """Whether attention turns queries and keys of the model's present call."""
        return self.late and LATE.on and hidden.device.type in DEVICES

    def agrees(self) -> bool:
        """Whether our kernel agrees with the family's function."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        generator = torch.Generator().manual_seed(2)
        query, key = (torch.randn(1, heads, 3, 8, generator=generator).to(device) for heads in (4, 2))
        cos, sin = torch.randn(2, 1, 3, 8, generator=generator).to(device)

        def ours() -> torch.Tensor:
            from engine.gpu import fused_launches

            return torch.cat(fused_launches.rotate(query, key, cos, sin), dim=1)

        return are_alike(ours, lambda: torch.cat(self.plain(query, key, cos, sin), dim=1))


def stores_alike(norms: tuple[LateNorm, LateNorm] | None = None) -> bool:
    """Whether one kernel normalises, turns and writes queries, keys and values as several do."""
    generator = torch.Generator().manual_seed(4)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dim, dtype = (8, torch.float32) if norms is None else (norms[0].weight.numel(), norms[0].weight.dtype)
    query, key, value = (
        torch.randn(1, heads, 3, dim, generator=generator).to(device, dtype) for heads in (4, 2, 2)
    )
    cos, sin = torch.randn(2, 1, 3, dim, generator=generator).to(device, dtype)
    slots = torch.tensor([4, 0, 3], device=device)

    def ours() -> torch.Tensor:
        from engine.gpu import fused_launches

        keys, values = query.new_zeros(2, 5, 2, dim)
        found = fused_launches.rotate_and_store(
            LateRotation(cos, sin, norms), query[0], key[0], value[0], keys, values, slots
        )
        return torch.cat([found, keys[slots].transpose(0, 1), values[slots].transpose(0, 1)])

    def one_by_one() -> torch.Tensor:
        from engine.gpu import fused_launches

        normed = [query, key]
        if norms is not None:
            normed = [
                fused_launches.rms_norm(each, norm.weight, norm.epsilon, plus_one=norm.plus_one)
                for each, norm in zip(normed, norms, strict=True)
            ]
        return torch.cat([*fused_launches.rotate(normed[0], normed[1], cos, sin), value], dim=1)[0]

    return are_alike(ours, one_by_one)


def fits(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether all of each vector is turned, by one angle per token and dimension."""
    tokens, dim = query.shape[-2:]
    return (
        query.dim() == 4
        and query.shape[0] == 1
        and tuple(cos.shape) == (1, tokens, dim)
        and key.shape[-1] == dim
        and dim % 2 == 0
        and query.dtype == key.dtype == cos.dtype
        and query.stride(-1) == key.stride(-1) == cos.stride(-1) == 1
    )


def are_alike(
    ours: Callable[[], torch.Tensor], theirs: Callable[[], torch.Tensor], *, dtype: torch.dtype | None = None
) -> bool:
    """Whether a kernel gives what it replaces gives, but for rounding."""
    try:
        with torch.inference_mode():
            found, expected = ours(), theirs()
    except Exception as error:  # noqa: BLE001 (a compiler of kernels may raise anything, and families take other arguments)
        logger.debug("not fused: %s: %s", type(error).__name__, error)
        return False
    if not isinstance(expected, torch.Tensor):
        return False
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    difference = (found.double() - expected.double()).norm()
    limit = TOLERANCE.get(dtype or found.dtype, 2e-2) * expected.double().norm()
    return bool(difference <= limit)
