"""Pauses between torch's functions in the thread that prepares new weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode


class Resting(TorchFunctionMode):  # type: ignore[misc]
    """Context in which each of torch's functions is followed by a pause, in one thread."""

    def __init__(self, rest: Callable[[], None]) -> None:
        super().__init__()
        self._rest = rest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._rest()
        return result
