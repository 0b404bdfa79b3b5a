"""Recognition of activations by their results."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.kernels.core.stand_ins import NotRecognised, distance


class ActivationKind(enum.IntEnum):
    """Kinds of activations, numbered as in ``activations.hpp``."""

    SILU = 1
    GELU_TANH = 2
    GELU = 3
    RELU_SQUARED = 4
    XIELU = 5
    RELU = 6
    CLIPPED = 7
    """Gates alone have it: ``(up + 1) * gate * sigmoid(slope * gate)``.

    The gate is clipped from above first, ``up`` on both sides.
    """
    SIGMOID = 8
    """Gates of heads alone have it."""


@dataclass(frozen=True)
class Activation:
    """An activation function as the kernels compute it."""

    kind: ActivationKind
    numbers: torch.Tensor | None = None
    """float32 numbers of a kind that has some.

    XIELU: its factors above and below 0, and its slope there. CLIPPED: slope and limit.
    """


SILU = Activation(ActivationKind.SILU)
KNOWN: dict[ActivationKind, Callable[[torch.Tensor], torch.Tensor]] = {
    ActivationKind.SILU: F.silu,
    ActivationKind.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    ActivationKind.GELU: F.gelu,
    ActivationKind.RELU_SQUARED: lambda x: F.relu(x).square(),
    ActivationKind.RELU: F.relu,
}
NAMES = "act_fn", "activation_fn", "act", "activation"
"""Names of an MLP's activation."""
CLOSE = 1e-5
"""Distance of two ways to compute the same."""


def activation_of(module: Any) -> Activation:
    """The activation of an MLP."""
    act = next((getattr(module, name) for name in NAMES if hasattr(module, name)), None)
    if act is None:
        raise NotRecognised(f"{type(module).__name__} without an activation")
    if hasattr(act, "alpha_p") and hasattr(act, "alpha_n"):
        slope = float(act.beta)
        factors = F.softplus(act.alpha_p.detach().float()), slope + F.softplus(act.alpha_n.detach().float())
        return Activation(ActivationKind.XIELU, torch.cat([*factors, torch.tensor([slope])]))
    return activation_by_results(act, type(act).__name__)


def activation_by_results(act: Callable[[torch.Tensor], torch.Tensor], name: str) -> Activation:
    """The activation that a function computes; ``name``: of what it is called in errors."""
    given = torch.linspace(-6, 6, 97)
    found = act(given)
    for kind, known in KNOWN.items():
        if distance(found, known(given)) < CLOSE:
            return Activation(kind)
    raise NotRecognised(f"the activation {name}")
