"""Pauses between torch's functions in the thread that prepares new weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from engine.host.background import be_nicer
from engine.host.openmp import compute_with


class Resting(TorchFunctionMode):  # type: ignore[misc]
    """Context in which each of torch's functions is followed by a pause, in one thread."""

    def __init__(self, rest: Callable[[], None]) -> None:
        super().__init__()
        self._rest = rest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._rest()
        return result


def be_one_of_few() -> None:
    """Lower the calling thread's priority, and have it compute on one core."""
    be_nicer()
    compute_with(1)
