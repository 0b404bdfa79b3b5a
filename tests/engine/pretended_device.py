"""A pretended CUDA device: torch's fake tensors, made indexable without a CUDA build.

Fake tensors have shapes and no numbers, so an operation that would wait for a GPU's numbers (``item``,
``nonzero``, masks as indices, ``tolist``) raises. Copies between host and device raise, too: they must go
through ``engine.attention.transfer``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Indexing(TorchFunctionMode):
    """``tensor[...]`` by operators: Python's own way to them asks for a CUDA build of torch."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.Tensor.__getitem__:
            return _get(*args)
        if func is torch.Tensor.__setitem__:
            return _set(*args)
        if func is torch.Tensor.bool:
            return aten._to_copy.default(args[0], dtype=torch.bool)
        if func is torch.Tensor.__invert__:
            return aten.bitwise_not.default(args[0])
        if func is torch.Tensor.copy_:
            return aten.copy_.default(*args, **(kwargs or {}))
        if func is torch.Tensor.to:  # where it stays on its device
            args = (args[0], *(each for each in args[1:] if str(each) not in ("cuda", "cuda:0")))
            if len(args) == 1 and not kwargs:
                return args[0]
            kwargs = {name: value for name, value in (kwargs or {}).items() if name != "device"}
        return func(*args, **(kwargs or {}))


class Launches(TorchDispatchMode):
    """Records launches, and raises where a tensor moves between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        result = func(*args, **(kwargs or {}))
        if func in (aten._to_copy.default, aten.copy_.default):
            other = args[1] if func is aten.copy_.default else result
            assert args[0].device == other.device or args[0].dim() == 0, f"{func} between devices"
        return result


def _split(tensor: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """A view for all but tensors, and the tensors by dimension."""
    items = list(index) if isinstance(index, tuple) else [index]
    places = [i for i, item in enumerate(items) if item is Ellipsis]
    used = sum(item is not None and item is not Ellipsis for item in items)
    for place in places:
        items[place : place + 1] = [slice(None)] * (tensor.dim() - used)
    dim, tensors = 0, []
    for item in items:
        if isinstance(item, int):
            tensor = tensor.select(dim, item)
            continue
        if item is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(item, slice) and item != slice(None):
            tensor = aten.slice.Tensor(tensor, dim, item.start, item.stop, item.step or 1)
        tensors.append(item if isinstance(item, torch.Tensor) else None)
        dim += 1
    return tensor, tensors


def _get(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    view, tensors = _split(tensor, index)
    return aten.index.Tensor(view, tensors) if any(t is not None for t in tensors) else view


def _set(tensor: torch.Tensor, index: Any, value: Any) -> None:
    view, tensors = _split(tensor, index)
    if not isinstance(value, torch.Tensor):
        value = torch.full((), value, dtype=tensor.dtype, device=tensor.device)
    if any(t is not None for t in tensors):
        aten.index_put_(view, tensors, value)
    else:
        view.copy_(value)
