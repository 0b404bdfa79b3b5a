"""Expert layers on a GPU through grouped products, checked before use.

torch's grouped product is one kernel on compute capability 9 and 10 in bfloat16 only. Elsewhere torch reads
the counts back to the host and launches a product for each expert, which no CUDA graph can capture. There a
Triton product computes, checked against torch when the model is loaded; without Triton small steps copy the
weights of their pairs (``batched_mm`` of transformers), and only prompts wait.

The function has the signature of transformers' experts interface, under which it is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.gpu.coded_parameter import coded_of
from engine.gpu.fused_layers import FusedGate
from engine.gpu.product_choice import Product, product_here
from parallel.expert_products import has_post_norm

NAME = "lockstep_grouped"
"""Name of :func:`grouped_forward` in transformers' experts registry."""
FIXED_NAME = "lockstep_fixed"
"""Name of :func:`fixed_forward` there."""
FEW_NAME = "lockstep_few"
"""Name of :func:`few_or_many_forward` there."""

FEW_TOKENS = 8
"""Tokens up to which experts are multiplied pair by pair.

More would read matrices several times.
"""
FEW_ATTRIBUTE = "lockstep_few"
"""Attribute of expert layers: whether few tokens are computed by :mod:`engine.gpu.few_experts`."""
FEW_BYTES = 256 << 20
"""Bytes of copied weights up to which a step copies those of each pair."""
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference of a checked row, relative to the rows' size."""
CHECKED_TOKENS = (1, 5, 70)
"""Tokens of the steps that are checked: one tile of an expert, and several."""

ExpertsFunction = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def register(registry: Any) -> None:
    """Register both expert functions with transformers."""
    registry.register(NAME, grouped_forward)
    registry.register(FIXED_NAME, fixed_forward)
    few = _Few(registry["batched_mm"], registry["grouped_mm"])
    registry.register(FEW_NAME, few.forward)


class _Few:
    """transformers' own functions, by the number of pairs."""

    def __init__(self, few: ExpertsFunction, many: ExpertsFunction) -> None:
        self._few, self._many = few, many

    def forward(
        self, module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Copies of weights for a few pairs, a product per expert for many."""
        each = _first_weight(module)
        copied = expert_ids.numel() * each.numel() // max(len(each), 1) * each.element_size()
        compute = self._few if copied <= FEW_BYTES else self._many
        return compute(module, hidden, expert_ids, weights)


def grouped_forward(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """One layer of experts: hidden [tokens, H], ids and weights [tokens, k] -> [tokens, H]."""
    if len(hidden) <= FEW_TOKENS and expert_ids.numel() and vars(module).get(FEW_ATTRIBUTE):
        from engine.gpu.few_experts import few_forward

        return few_forward(module, hidden, expert_ids, weights)
    product = product_here(hidden.device, hidden.dtype) if hidden.device.type == "cuda" else "triton"
    return _forward(module, hidden, expert_ids, weights, product)


def fixed_forward(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """:func:`grouped_forward` whose tiles do not follow the number of tokens."""
    return _forward(module, hidden, expert_ids, weights, "fixed")


def _forward(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, product: Product
) -> torch.Tensor:
    from engine.gpu.grouped_products import Pairs, grouped_linear

    if not expert_ids.numel():
        return torch.zeros_like(hidden)
    pairs = Pairs.of(expert_ids, module.num_experts)
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = grouped_linear(module, first, hidden, pairs, product, gather=True)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outputs = grouped_linear(module, "down_proj", inner, pairs, product, gather=False)
    if has_post_norm(module):
        outputs = module.post_expert_norm(outputs)
    return pairs.weighted_sum(outputs, weights, hidden.dtype)


def use_few_experts(model: Any) -> int:
    """Let experts compute few tokens pair by pair where that agrees; returns how many."""
    from engine.gpu.few_experts import few_forward

    def few(*arguments: Any) -> torch.Tensor:
        return few_forward(*arguments)

    count = 0
    for module in model.modules():
        gate, up = vars(module).get("_apply_gate"), getattr(module, "gate_up_proj", None)
        if not isinstance(gate, FusedGate) or not isinstance(up, torch.Tensor) or up.dim() != 3:
            continue
        is_plain = not (module.is_transposed or module.has_bias or has_post_norm(module) or coded_of(up))
        if (
            is_plain
            and up.stride(2) == module.down_proj.stride(2) == 1
            and check_experts([module], few) is None
        ):
            setattr(module, FEW_ATTRIBUTE, True)
            count += 1
    return count


def each_expert(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Reference for grouped experts: a plain product per expert with tokens.

    The kernels are compared with it.

    It reads the choices back to the host.
    """
    outputs = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in expert_ids.unique().tolist():
        tokens, choice = (expert_ids == expert).nonzero(as_tuple=True)
        inner = _linear_of(module, "gate_up_proj" if module.has_gate else "up_proj", expert, hidden[tokens])
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        result = _linear_of(module, "down_proj", expert, inner)
        if has_post_norm(module):
            result = module.post_expert_norm(result)
        outputs.index_add_(0, tokens, result.float() * weights[tokens, choice, None].float())
    return outputs.to(hidden.dtype)


def _linear_of(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    weight = getattr(module, name)
    if (codes := coded_of(weight)) is not None:
        outputs = codes.expected(expert, rows.to(weight.dtype)).to(weight.dtype)
    else:
        matrix = weight[expert]
        outputs = rows.to(matrix.dtype) @ (matrix if module.is_transposed else matrix.t())
    return outputs + getattr(module, f"{name}_bias")[expert] if module.has_bias else outputs


def check_experts(modules: Sequence[Any], forward: ExpertsFunction = grouped_forward) -> str | None:
    """Reason why a function on our kernels cannot serve these layers; None if it can.

    Each kind of layer is computed for a few random steps, and by a plain product for each expert.
    """
    seen = set()
    for module in modules:
        weight = _first_weight(module)
        kind = (type(module), _sizes(module), weight.dtype, coded_of(weight) is None)
        if kind in seen:
            continue
        seen.add(kind)
        try:
            difference = max(_difference(module, weight, tokens, forward) for tokens in CHECKED_TOKENS)
        except Exception as error:  # noqa: BLE001 (a compiler of kernels may raise anything)
            lines = str(error).strip().splitlines()
            return f"its kernels fail: {type(error).__name__}: {lines[-1][:200] if lines else ''}"
        if not difference <= TOLERANCE.get(weight.dtype, 3e-2):
            return f"on a few tokens of this model it differs from torch by {difference:.2g}"
    return None


def _first_weight(module: Any) -> torch.Tensor:
    weight: torch.Tensor = module.gate_up_proj if module.has_gate else module.up_proj
    return weight


def _sizes(module: Any) -> tuple[int, int]:
    """Experts of a layer, and the width of their inputs."""
    weight = _first_weight(module)
    if (codes := coded_of(weight)) is not None:
        return len(codes.codes), codes.inputs
    return weight.shape[0], weight.shape[1 if module.is_transposed else 2]


def _difference(module: Any, weight: torch.Tensor, tokens: int, forward: ExpertsFunction) -> float:
    """Largest difference of a token's output, relative to the mean of all."""
    count, width = _sizes(module)
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, width, generator=generator).to(weight.device, weight.dtype)
    chosen = torch.rand(tokens, count, generator=generator).topk(min(2, count))
    ids, shares = chosen.indices.to(weight.device), chosen.values.to(weight.device, weight.dtype)
    with torch.inference_mode():
        found = forward(module, hidden, ids, shares).double()
        expected = each_expert(module, hidden, ids, shares).double()
    size = expected.norm(dim=1).mean().clamp(min=1e-6)
    return float((found - expected).norm(dim=1).max() / size)
