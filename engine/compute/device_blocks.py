"""Batch-invariant operators on a GPU: Triton kernels with fixed tiles.

torch's products choose how they sum by the number of rows, and so do its sums. What it computes number by
number has the bits of that number alone, and so have those of its kernels that give each row threads of its
own. Operators of which that is not known are refused while a model is tried, as on a CPU.

On a CPU, which has Triton's interpreter for tests, all but the products is that of :class:`.FixedBlocks`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from engine.compute.fixed_blocks import ELEMENTWISE, EXACT, FixedBlocks
from engine.gpu import fixed_products

BY_ROW = frozenset((
    "_fused_rms_norm", "_log_softmax", "_softmax", "amax", "amin", "aminmax", "argmax", "argmin",
    "argsort", "layer_norm", "log_softmax", "max", "min", "native_layer_norm", "rms_norm", "softmax",
    "sort", "topk",
))  # fmt: skip
"""Operators that compute each row by itself, or whose order does not count."""
SHARED_OUT = frozenset((
    "cummax", "cumprod", "cumsum", "linalg_vector_norm", "logsumexp", "norm", "prod", "std", "std_mean",
    "var", "var_mean",
))  # fmt: skip
"""Operators that share the sum of a row out by the number of rows."""
SOFTMAXES = frozenset(("_log_softmax", "_softmax", "log_softmax", "softmax"))
WARP_WIDTH, VECTOR_WIDTH = 1024, 16
"""Width up to which one warp computes softmax of a row.

Wider rows have to be whole vectors. Otherwise the kernel sums by the address at which a row begins.
"""


class DeviceBlocks(FixedBlocks):
    """Context in which this thread's operators on a GPU compute each row by itself."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(fixed_products.linear)
        self._device = device

    def __repr__(self) -> str:
        return f"DeviceBlocks({self._device})"

    def _rule(self, func: Any) -> Callable[..., Any]:
        space, _, name = str(func.overloadpacket).partition(".")
        if name == "set_":  # the interpreter's way to the memory of a kernel's tensors
            return func  # type: ignore[no-any-return]
        if self._device.type == "cuda" and space == "aten":
            if name in ("sum", "mean"):
                return partial(self._summed, func, name)
            if name in SOFTMAXES:
                return partial(self._softmax, func)
            if name.removesuffix("_") in ELEMENTWISE or name in BY_ROW or name in EXACT:
                return func  # type: ignore[no-any-return]
            if name in SHARED_OUT:
                return lambda *args, **kwargs: self._unknown(func, args, kwargs)
        return super()._rule(func)

    def _summed(
        self,
        func: Any,
        name: str,
        numbers: torch.Tensor,
        dim: int | Sequence[int] | None = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Sum or mean along some dimensions, each result by a program of its own."""
        if not numbers.is_floating_point() or numbers.dtype == torch.float64:
            return func(numbers, dim, keepdim, dtype=dtype) if dim is not None else func(numbers, dtype=dtype)
        wanted = range(numbers.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
        dims = sorted(each % numbers.dim() for each in wanted) or list(range(numbers.dim()))
        last = numbers.movedim(dims, list(range(-len(dims), 0))).flatten(-len(dims))
        found = fixed_products.sum_of_rows(last)
        if name == "mean":
            found = found / last.shape[-1]
        found = found.to(dtype or numbers.dtype)
        if keepdim:
            for each in dims:
                found = found.unsqueeze(each)
        return found

    def _softmax(self, func: Any, numbers: torch.Tensor, dim: int, *rest: Any, **more: Any) -> torch.Tensor:
        width, is_last = numbers.shape[dim], dim in (-1, numbers.dim() - 1)
        if is_last and (width <= WARP_WIDTH or width % VECTOR_WIDTH == 0):
            return func(numbers, dim, *rest, **more)
        return self._unknown(func, (numbers, dim, *rest), more)
