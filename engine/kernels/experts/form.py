"""Form of experts: activation between their two products, and layout of their weights.

The module's own gate runs on made-up numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.core.stand_ins import NotRecognised, distance, made_up
from engine.kernels.products.activations import CLOSE, KNOWN, Activation, ActivationKind, activation_of
from engine.model.quantization.attached import outputs_of

ROWS, LARGE = 8, 6.0
"""Made-up rows, and their size: beyond where gates are clipped."""


@dataclass(frozen=True)
class ExpertForm:
    """Properties that all experts of a module share."""

    hidden: int
    width: int
    activation: Activation
    is_interleaved: bool
    """Whether outputs of gate and up lie side by side; the gate's come first otherwise."""
    is_transposed: bool
    """Whether weights are [experts, inputs, outputs]."""
    has_bias: bool
    has_gate: bool = True
    """Whether gate and up are two products; else they are one and the same."""

    @property
    def first(self) -> str:
        """Name of the weights of the first product."""
        return first_of(has_gate=self.has_gate)

    def halves(self, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate and up [..., width] of [..., 2 * width]."""
        if self.is_interleaved:
            return gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate_up.chunk(2, dim=-1)
        return gate, up

    def joined(self, width: int, columns: list[int]) -> list[int]:
        """Where these columns of gate and up are in [..., 2 * width]."""
        if not self.has_gate:
            return columns
        if self.is_interleaved:
            return [2 * column + which for column in columns for which in (0, 1)]
        return [*columns, *(width + column for column in columns)]

    def weights(self, module: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate and up [experts, width, hidden], down [experts, hidden, width]."""
        inward, down = getattr(module, self.first), module.down_proj.data
        if self.is_transposed:
            down = down.mT
        wide = inward.data if self.is_transposed else inward.data.mT
        first, second = slice(0, self.width), slice(self.width, None)
        if self.is_interleaved:
            first, second = slice(0, None, 2), slice(1, None, 2)
        gate, up = (
            outputs_of(inward, half.mT, rows)
            for half, rows in zip(self.halves(wide), (first, second), strict=True)
        )
        return gate, up, outputs_of(module.down_proj, down, slice(None))

    def biases(self, module: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Biases of gate and up [experts, 2, width], and of down [experts, hidden]."""
        if not self.has_bias:
            return None
        inward = torch.stack(self.halves(module.gate_up_proj_bias.data), dim=1)
        return inward.float().contiguous(), module.down_proj_bias.data.float().contiguous()


def first_of(*, has_gate: bool) -> str:
    """Name of the weights of the first product of experts."""
    return "gate_up_proj" if has_gate else "up_proj"


def form_of(module: Any) -> ExpertForm:
    """The form of a module of fused experts.

    Raises:
        NotRecognised: the kernels do not know it.
    """
    own = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    has_bias, is_transposed, has_gate = map(bool, (module.has_bias, module.is_transposed, module.has_gate))
    first = first_of(has_gate=has_gate)
    names = {first, "down_proj"}
    if own.keys() != names | ({f"{name}_bias" for name in names} if has_bias else set()):
        raise NotRecognised(f"experts with {', '.join(sorted(own))}")
    hidden, width = own["down_proj"][1:][:: -1 if is_transposed else 1]
    inward = ((1 + has_gate) * width, hidden)
    if own[first][1:] != inward[:: -1 if is_transposed else 1]:
        raise NotRecognised("experts laid out the other way round")
    if width % 2 or hidden % 2:
        raise NotRecognised("experts of an odd width")
    if not has_gate:
        if has_bias or is_transposed:
            raise NotRecognised(
                "experts without a gate that have biases, or are laid out the other way round"
            )
        return ExpertForm(hidden, width, _own_gate(module), False, False, False, has_gate=False)
    activation, is_interleaved = _gate_of(module, width)
    return ExpertForm(hidden, width, activation, is_interleaved, is_transposed, has_bias)


def _own_gate(module: Any) -> Activation:
    """The activation whose product with its own input is that of experts without a gate."""
    squared = activation_of(module)
    if squared.kind is not ActivationKind.RELU_SQUARED:
        raise NotRecognised(f"experts without a gate whose activation is {squared.kind.name}")
    return Activation(ActivationKind.RELU)


def _gate_of(module: Any, width: int) -> tuple[Activation, bool]:
    """The activation of a gate, and whether it lies between the numbers of ``up``."""
    given = made_up(ROWS, 2 * width, seed=1, dtype=torch.float32) * LARGE
    found = module._apply_gate(given.clone())
    for is_interleaved in (False, True):
        gate, up = (given[..., ::2], given[..., 1::2]) if is_interleaved else given.chunk(2, dim=-1)
        for activation, expected in _ways(module, gate, up):
            if distance(found, expected) < CLOSE:
                return activation, is_interleaved
    raise NotRecognised(f"the gate of {type(module).__name__}")


def _ways(module: Any, gate: torch.Tensor, up: torch.Tensor) -> Iterator[tuple[Activation, torch.Tensor]]:
    """Known kinds of gates, each with its result for a gate and ``up``."""
    for kind, known in KNOWN.items():
        yield Activation(kind), known(gate) * up
    slope, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    if isinstance(slope, float) and isinstance(limit, float):
        clipped = gate.clamp(max=limit)
        expected = (up.clamp(-limit, limit) + 1) * clipped * torch.sigmoid(slope * clipped)
        yield Activation(ActivationKind.CLIPPED, torch.tensor([slope, limit])), expected
