"""Sites of low-rank adapters: products beside which an adapter may add something.

An adapter has two matrices for a linear layer, A [rank, inputs] and B [outputs, rank], and adds
``scaling * B (A x)`` to what the layer gives for x (Hu et al. 2021, "LoRA"). Where several layers are one
product here, so are their adapters: A is joined, and B has a block for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels.products.packing import panels

WIDTH = 32
"""Ranks fill whole pairs of panels, of so many numbers."""
LOW, ADDED = "adapter low", "adapter added"
"""Names of scratch rows: what A gives, and what is added to a product."""
ADAPTER_PART = np.dtype([("weights", np.int64), ("k", np.int64), ("n", np.int64), ("factor", np.float64)])
"""``AdapterPart`` of ``adapted.hpp``."""
ADAPTER_RUN = np.dtype([("adapter", np.int64), ("first", np.int64), ("count", np.int64)])
"""``AdapterRun`` of ``contract.hpp``."""


class AdapterRoom(NamedTuple):
    """Room for adapters: how many are computed at once, and their highest rank."""

    adapters: int
    rank: int


class LowRank(NamedTuple):
    """Matrices of an adapter for one linear layer."""

    a: torch.Tensor
    """[rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank]"""
    scaling: float


@dataclass(frozen=True)
class Site:
    """A product, and the linear layers whose adapters add to it."""

    modules: tuple[Any, ...]
    """The layers, whose outputs stand one behind the other."""
    sizes: tuple[int, ...]
    """Outputs of each."""
    inputs: int
    order: torch.Tensor | None = None
    """Index of each output of the product among the layers'; None: as they stand."""

    @property
    def outputs(self) -> int:
        """Outputs of the product."""
        return sum(self.sizes) if self.order is None else len(self.order)


class PackedSite:
    """Matrices of adapters beside one product, by the adapter's number; 0 has none."""

    def __init__(self, site: Site, room: AdapterRoom, dtype: torch.dtype) -> None:
        self.site, self._dtype = site, dtype
        self.low_width = padded(room.rank * len(site.modules))
        """Numbers of a row of what A gives."""
        self.low = np.zeros(room.adapters + 1, ADAPTER_PART)
        self.high = np.zeros(room.adapters + 1, ADAPTER_PART)
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def put(self, number: int, parts: Sequence[LowRank | None]) -> int:
        """Lay out an adapter's matrices for each of the layers, in place of earlier ones.

        No step may run meanwhile.

        Returns:
            Their bytes.
        """
        self.low[number] = self.high[number] = (0, 0, 0, 0.0)
        self._kept.pop(number, None)
        present = [each for each in parts if each is not None]
        if not present:
            return 0
        rank = padded(sum(len(each.a) for each in present))
        factor = present[0].scaling
        b = torch.zeros(sum(self.site.sizes), rank)
        begin, row = 0, 0
        for part, size in zip(parts, self.site.sizes, strict=True):
            if part is not None:
                own = part.b.float() * (part.scaling / factor)
                b[row : row + size, begin : begin + len(part.a)] = own
                begin += len(part.a)
            row += size
        if self.site.order is not None:
            b = b[self.site.order]
        a = F.pad(torch.cat([each.a.float() for each in present]), (0, 0, 0, rank - begin))
        laid = tuple(panels(each.to(self._dtype), multiple=WIDTH) for each in (a, b))
        self.low[number] = (laid[0].data_ptr(), self.site.inputs, rank, 1.0)
        self.high[number] = (laid[1].data_ptr(), rank, padded(len(b)), factor)
        self._kept[number] = laid[0], laid[1]
        return sum(each.nbytes for each in laid)


class Sites:
    """All products of a model beside which adapters add something."""

    def __init__(self, room: AdapterRoom, dtype: torch.dtype) -> None:
        self.room, self._dtype = room, dtype
        self._packed: list[PackedSite] = []

    def packed(self, site: Site) -> PackedSite:
        """Room for the adapters of a product."""
        found = PackedSite(site, self.room, self._dtype)
        self._packed.append(found)
        return found

    @property
    def modules(self) -> set[int]:
        """``id`` of each linear layer that may have adapters."""
        return {id(module) for packed in self._packed for module in packed.site.modules}

    @property
    def outputs(self) -> int:
        """Most outputs of a product."""
        return max((packed.site.outputs for packed in self._packed), default=0)

    @property
    def low_width(self) -> int:
        """Most numbers of a row of what A gives."""
        return max((packed.low_width for packed in self._packed), default=0)

    def put(self, number: int, parts: Mapping[int, LowRank]) -> int:
        """Lay out an adapter; returns its bytes. ``parts`` are by the ``id`` of their layer."""
        return sum(
            packed.put(number, [parts.get(id(module)) for module in packed.site.modules])
            for packed in self._packed
        )


def padded(number: int) -> int:
    """The next multiple of :data:`WIDTH`."""
    return -(-number // WIDTH) * WIDTH


MOST_ROWS = 64
"""Rows of a run, so that threads share long prompts."""


def runs(numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Runs of neighbouring rows [runs] of :data:`ADAPTER_RUN`; ``numbers`` [rows]: the adapter of each."""
    ends = np.flatnonzero(np.diff(numbers, append=-1)) + 1
    found = []
    begin = 0
    for end in ends.tolist():
        number = int(numbers[begin])
        found += [(number, first, min(MOST_ROWS, end - first)) for first in range(begin, end, MOST_ROWS)]
        begin = end
    return np.array(found, ADAPTER_RUN)
