"""A pretended device other than the CPU, on which the CPU computes.

Under :class:`OtherDevice` tensors that are made on, or moved to, :data:`DEVICE` are wrappers. Nothing takes
them for tensors of the CPU, and an operator that is given both kinds raises, as it would with a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

DEVICE = torch.device("meta")
"""A type that every build of torch has."""

aten = torch.ops.aten


class Elsewhere(torch.Tensor):
    """A tensor of the device, with the CPU tensor that holds its numbers."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inside: torch.Tensor):
        made = torch.Tensor._make_wrapper_subclass(
            cls, inside.size(), strides=inside.stride(), dtype=inside.dtype, device=DEVICE
        )
        made.inside = inside
        return made

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"Elsewhere({self.inside!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


class OtherDevice(TorchDispatchMode):
    """While it lasts, in this thread, there is such a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
    is_elsewhere = [isinstance(each, Elsewhere) for each in tensors]
    copies = func in (aten._to_copy.default, aten.copy_.default)
    if any(is_elsewhere) and not copies:
        alien = [t for t, other in zip(tensors, is_elsewhere, strict=True) if not other and t.dim()]
        assert not alien, f"{func} with tensors on different devices"
    wanted = kwargs.get("device")
    goes_there = any(is_elsewhere) if wanted is None else torch.device(wanted) == DEVICE
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    args, kwargs = tree_map_only(Elsewhere, lambda tensor: tensor.inside, (args, kwargs))
    result = func(*args, **kwargs)
    return tree_map_only(torch.Tensor, Elsewhere, result) if goes_there else result
