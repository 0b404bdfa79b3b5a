"""Made-up weights, with which a narrow copy of a model computes (:mod:`engine.kernels.narrow`)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.kernels.products.projections import linear_of

LOUD = 32.0
"""Factor on loud rows of projections, far beyond where models clip or soften.

A power of two, so that it can be taken back.
"""


def random_numbers(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Normal numbers in float32.

    Not torch's own, whose generator needs libraries that instances do not load (:mod:`engine.host.deferred`).
    """
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(tuple(shape), dtype=np.float32))


@dataclass(frozen=True)
class _Made:
    """A made-up weight."""

    weight: torch.nn.Parameter
    loud_rows: tuple[int, ...]
    quiet_columns: tuple[int, ...]
    """Columns that make up for loud inputs, so that these weigh as much as others."""
    power: int
    """Loud factors of such an input."""
    is_turned: bool
    is_float: bool
    """Whether it stands for a weight in float32 of a model in another type."""

    def scale(self, factor: float) -> None:
        data = self.weight.data.mT if self.is_turned else self.weight.data
        if self.loud_rows:
            data[..., list(self.loud_rows), :] *= factor
        if self.quiet_columns:
            data[..., list(self.quiet_columns)] /= factor**self.power


class MadeUpWeights:
    """Made-up weights of a copy, by the identity of those that they stand for."""

    def __init__(self, model_dtype: torch.dtype) -> None:
        self._made: dict[tuple[Any, ...], _Made] = {}
        """Made-up weights by shape and role, shared by layers of equal shape.

        So a deep copy takes no more memory than a shallow one.
        """
        self._buffers: list[torch.Tensor] = []
        self._model_dtype = model_dtype
        self.memo: dict[int, Any] = {}
        """Memo of ``deepcopy``."""

    def quieten(self) -> None:
        for made in self._made.values():
            made.scale(1 / LOUD)

    def convert(self, dtype: torch.dtype) -> None:
        """Compute in another data type, but for weights that are float32 in any model."""
        for made in self._made.values():
            if not made.is_float:
                made.weight.data = made.weight.data.to(dtype)
        for buffer in self._buffers:
            buffer.data = buffer.data.to(dtype)

    def keep_buffer(self, buffer: torch.Tensor, columns: torch.Tensor | None = None) -> None:
        """Keep a copy of a buffer, or of some columns, converted like weights."""
        some = buffer if columns is None else buffer[..., columns]
        self.memo[id(buffer)] = some.to(torch.float32, copy=True)
        self._buffers.append(self.memo[id(buffer)])

    def linear(
        self,
        module: Any,
        rows: int,
        columns: int,
        role: str = "",
        *,
        loud_rows: Sequence[int] = (),
        quiet_columns: Sequence[int] = (),
        power: int = 1,
    ) -> None:
        """Weight and bias of a linear layer. Biases are as loud as their rows."""
        linear = linear_of(module)
        self.put(
            module.weight,
            (rows, columns),
            role,
            loud_rows=loud_rows,
            quiet_columns=quiet_columns,
            power=power,
            is_turned=linear.is_turned,
        )
        if module.bias is not None:
            self.put(module.bias, (rows,), role, size=0.2)

    def put(
        self,
        stands_for: torch.Tensor,
        shape: tuple[int, ...],
        role: str = "",
        *,
        size: float | None = None,
        mean: float = 0.0,
        loud_rows: Sequence[int] = (),
        quiet_columns: Sequence[int] = (),
        power: int = 1,
        is_turned: bool = False,
    ) -> None:
        """``role``: distinguishes weights of one shape.

        ``is_turned``: the module keeps the weight the other way round. ``size``: of a number; by default
        such that a product keeps the size of its input.
        """
        is_float = stands_for.dtype != self._model_dtype
        key = (shape, role, size, mean, tuple(loud_rows), tuple(quiet_columns), is_turned, is_float)
        if key not in self._made:
            made = random_numbers(shape, zlib.crc32(repr(key).encode()))
            made = (
                made.mul_(shape[-1] ** -0.5 if size is None else size).add_(mean).to(torch.bfloat16).float()
            )
            weight = torch.nn.Parameter(made.mT.contiguous() if is_turned else made, requires_grad=False)
            self._made[key] = _Made(weight, key[4], key[5], power, is_turned, is_float)
            self._made[key].scale(LOUD)
        self.memo[id(stands_for)] = self._made[key].weight
