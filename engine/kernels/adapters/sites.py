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

from engine.attention.base import Int64s
from engine.kernels.products.packing import LANES, panels

LOW = "adapter low"
"""Name of scratch rows: what A gives."""
ADAPTER_PART = np.dtype([(name, np.int64) for name in ("a", "b", "panels", "num_low", "rank")])
"""``AdapterPart`` of ``added.hpp``."""
ADAPTER_PANEL = np.dtype([("at", np.int32), ("factor", np.float32)])
"""``AdapterPanel`` of ``added.hpp``."""
ADAPTER_SITE = np.dtype([(name, np.int64) for name in ("parts", "low", "pitch")])
"""``AdapterSite`` of ``added.hpp``."""
ADAPTER_RUN = np.dtype([(name, np.int64) for name in ("adapter", "first", "count")])
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
    """Index of each output of the product among the layers', -1 for none.

    None: as they stand. 16 neighbours are of one layer.
    """


class PackedSite:
    """Matrices of adapters beside one product, by the adapter's number; 0 has none."""

    def __init__(self, site: Site, room: AdapterRoom, dtype: torch.dtype) -> None:
        self.site, self._dtype = site, dtype
        self.low_width = padded(room.rank) * len(site.modules)
        """Most numbers of a row of what A gives."""
        self.parts = np.zeros(room.adapters + 1, ADAPTER_PART)
        order = torch.arange(sum(site.sizes)) if site.order is None else site.order
        self._order = F.pad(order, (0, -len(order) % (2 * LANES)), value=-1)
        ends = torch.tensor(site.sizes).cumsum(0)
        modules = torch.bucketize(self._order, ends, right=True).masked_fill(self._order < 0, -1)
        self._modules = modules.view(-1, LANES).amax(1).tolist()
        """Number of the layer that each panel of outputs is of; -1 for none."""
        self._kept: dict[int, tuple[Any, ...]] = {}

    def put(self, number: int, parts: Sequence[LowRank | None]) -> int:
        """Lay out an adapter's matrices for each of the layers, in place of earlier ones.

        No step may run meanwhile.

        Returns:
            Their bytes.
        """
        self.parts[number] = (0, 0, 0, 0, 0)
        self._kept.pop(number, None)
        present = [index for index, each in enumerate(parts) if each is not None]
        if not present:
            return 0
        ranks = {len(each.a) for each in parts if each is not None}
        rank = padded(max(ranks))
        a, b, places = [], [], np.zeros(len(self._modules), ADAPTER_PANEL)
        for part, size in zip(parts, self.site.sizes, strict=True):
            if part is None:
                b.append(torch.zeros(size, rank))
                continue
            missing = rank - len(part.a)
            a.append(F.pad(part.a.float(), (0, 0, 0, missing)))
            b.append(F.pad(part.b.float(), (0, missing)))
        for panel, module in enumerate(self._modules):
            part = parts[module] if module >= 0 else None
            places[panel] = (-1, 0) if part is None else (present.index(module) * rank, part.scaling)
        every = torch.cat([*b, torch.zeros(1, rank)])[self._order]
        low, high = (panels(each.to(self._dtype)) for each in (torch.cat(a), every))
        self.parts[number] = (low.data_ptr(), high.data_ptr(), places.ctypes.data, rank * len(a), rank)
        self._kept[number] = low, high, places
        return int(low.nbytes + high.nbytes)

    def record(self, low: torch.Tensor) -> np.ndarray[Any, Any]:
        """``AdapterSite`` of this product; ``low``: scratch rows for what A gives."""
        return np.array((self.parts.ctypes.data, low.data_ptr(), low.shape[1]), ADAPTER_SITE)


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
    def low_width(self) -> int:
        """Most numbers of a row of what A gives."""
        return max((packed.low_width for packed in self._packed), default=0)

    def put(self, number: int, parts: Mapping[int, LowRank]) -> int:
        """Lay out an adapter; returns its bytes. ``parts`` are by the ``id`` of their layer."""
        return sum(
            packed.put(number, [parts.get(id(module)) for module in packed.site.modules])
            for packed in self._packed
        )


def padded(rank: int) -> int:
    """Rank of matrices as they are laid out: it fills whole panels."""
    return -(-rank // LANES) * LANES


MOST_ROWS = 32
"""Rows of a run, so that threads share long prompts."""


class AdapterRows(NamedTuple):
    """Rows of a step, sorted by their adapters."""

    numbers: Int64s
    """[rows] number of each one's adapter, 0 for none"""
    order: Int64s
    """Indices of those that have one, sorted by it."""
    runs: np.ndarray[Any, Any]
    """:data:`ADAPTER_RUN` of each few rows of one adapter."""


def sorted_rows(numbers: Int64s) -> AdapterRows:
    """Rows sorted by their adapters; ``numbers`` [rows]: the adapter of each, 0 for none."""
    order = np.argsort(numbers, kind="stable")
    order = order[np.count_nonzero(numbers == 0) :]
    ends = np.flatnonzero(np.diff(numbers[order], append=-1)) + 1
    found, begin = [], 0
    for end in ends.tolist():
        number = int(numbers[order[begin]])
        found += [(number, first, min(MOST_ROWS, end - first)) for first in range(begin, end, MOST_ROWS)]
        begin = end
    return AdapterRows(numbers, order, np.array(found, ADAPTER_RUN))
