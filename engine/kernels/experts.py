"""The expert layers of a spread model: rows that came from anywhere, through the experts held here."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.kernels.library import Library
from engine.kernels.operations import Kind, Operations, StepArguments
from engine.kernels.packing import gate_and_up, panels


@dataclass(frozen=True)
class PackedExperts:
    """The experts of a layer, laid out for the kernels."""

    up: torch.Tensor
    down: torch.Tensor
    count: int
    hidden: int
    width: int

    @classmethod
    def of(cls, gate_up: torch.Tensor, down: torch.Tensor) -> PackedExperts:
        """From gate_up [experts, 2 * width, hidden] and down [experts, hidden, width]."""
        count, hidden, width = down.shape
        return cls(gate_and_up(gate_up), panels(down, 32), count, hidden, width)


class NativeExperts:
    """In place of :class:`parallel.expert_products.ExpertProducts`."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._packed: dict[int, tuple[weakref.ref[torch.Tensor], PackedExperts]] = {}

    def packed(self, module: Any) -> PackedExperts:
        """The module's weights, packed when they are seen for the first time."""
        weight = module.gate_up_proj
        known = self._packed.get(id(module))
        if known is not None and known[0]() is weight:
            return known[1]
        packed = PackedExperts.of(weight.data, module.down_proj.data)
        self._packed[id(module)] = (weakref.ref(weight), packed)
        return packed

    def compute(self, module: Any, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Outputs [n, H] of rows [n, H], of which the first ``counts[0]`` go through the module's expert 0,
        and so on."""
        packed = self.packed(module)
        rows = rows.contiguous()
        begins = np.zeros(packed.count + 1 + len(rows), dtype=np.int64)
        np.cumsum(counts, out=begins[1 : packed.count + 1])
        begins[packed.count + 1 :] = np.arange(len(rows))  # they are in order
        middle = rows.new_empty(len(rows), packed.width)
        result = rows.new_empty(len(rows), packed.hidden)
        operations = Operations(2)
        operations.add(
            Kind.EXPERTS_UP,
            into=rows,
            out=middle,
            weights=packed.up,
            extra=begins,
            n=packed.width,
            k=packed.hidden,
            a=packed.count,
            b=1,
        )
        operations.add(
            Kind.EXPERTS_DOWN,
            into=middle,
            out=result,
            weights=packed.down,
            extra=begins,
            n=packed.hidden,
            k=packed.width,
            a=packed.count,
            b=1,
        )
        operations.run(self._library, StepArguments(), rows.dtype)
        return result
