"""Stand-ins for parts of a module, with which its own code runs by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


class NotRecognised(Exception):
    """Refusal of a model that does something unknown to the kernels; the message names it."""


class Gives(torch.nn.Module):  # type: ignore[misc]
    """Stand-in module that records its inputs and returns a chosen result."""

    def __init__(self, gives: Any) -> None:
        """``gives``: the result, or a function of the input that makes it."""
        super().__init__()
        self._gives = gives
        self.given: list[torch.Tensor] = []

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self.given.append(inputs[0] if inputs else next(iter(named.values())))
        return self._gives(self.given[-1]) if isinstance(self._gives, Callable) else self._gives  # type: ignore[arg-type]


def with_parts(module: Any, parts: Mapping[str, Any]) -> Any:
    """A shallow copy of a module in which some parts are others."""
    made = copy.copy(module)
    made.__dict__ = dict(module.__dict__)
    made._modules = {**module._modules, **parts}
    return made


def made_up(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Made-up inputs: normally distributed numbers from a seed."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Distance from the expected tensor, relative to that tensor's norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
