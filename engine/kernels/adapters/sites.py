"""Sites of low-rank adapters: products beside which an adapter may add something.

An adapter has two matrices for a linear layer, A [rank, inputs] and B [outputs, rank], and adds
``scaling * B (A x)`` to what the layer gives for x (Hu et al. 2021, "LoRA"). Where several layers are one
product here, so are their adapters: A is joined, and B has a block for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Int64s
from engine.kernels.products.packing import LANES, panels

LOW, EXPERT_LOW, EXPERT_NUMBERS = "adapter low", "adapter low of experts", "adapters of experts' rows"
"""Names of scratch rows: what A gives, the same of experts, numbers of adapters there."""
ADAPTER_PART = np.dtype([(name, np.int64) for name in ("a", "b", "panels", "num_low", "rank")])
"""``AdapterPart`` of ``added.hpp``."""
ADAPTER_PANEL = np.dtype([("at", np.int32), ("factor", np.float32)])
"""``AdapterPanel`` of ``added.hpp``."""
ADAPTER_SITE = np.dtype(
    [(name, np.int64) for name in ("parts", "low", "pitch", "numbers", "experts", "here")]
)
"""``AdapterSite`` of ``added.hpp``."""
TAGGED_ADAPTERS = np.dtype([(name, np.int64) for name in ("tags", "count")])
"""``TaggedAdapters`` of ``added.hpp``."""
ADAPTER_RUN = np.dtype([(name, np.int64) for name in ("adapter", "first", "count")])
"""``AdapterRun`` of ``contract.hpp``."""


SiteKey: TypeAlias = tuple[int, str]
"""``id`` of a module, and the adapted parameter's name, empty for a linear layer."""


def keys_of(model: torch.nn.Module) -> dict[str, SiteKey]:
    """Keys of all modules and their parameters, by name."""
    found: dict[str, SiteKey] = {}
    for name, module in model.named_modules():
        found[name] = id(module), ""
        found |= {f"{name}.{each}": (id(module), each) for each, _ in module.named_parameters(recurse=False)}
    return found


class AdapterRoom(NamedTuple):
    """Room for adapters: how many are computed at once, and their highest rank."""

    adapters: int
    rank: int
    held: int = 0
    """Those in memory, at most."""


class LowRank(NamedTuple):
    """Matrices of an adapter for one linear layer, or for a layer's experts."""

    a: torch.Tensor
    """[rank, inputs], or [experts, rank, inputs]"""
    b: torch.Tensor
    """[outputs, rank], or [experts, outputs, rank]"""
    scaling: float
    of_tokens: bool = False
    """Whether it is of an embedding: inputs of A are tokens."""

    @property
    def rank(self) -> int:
        return int(self.a.shape[-2])


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
    parameter: str = ""
    """Parameter of the one module, of experts."""
    experts: int = 1
    """Experts, each of which has matrices of its own."""
    times: int = 1
    """Rows of a token."""
    is_spread: bool = False
    """Whether other instances have experts, too, and rows come from there."""
    of_tokens: bool = False
    """Whether it is an embedding."""
    factor: float = 1.0
    """Factor on what the layers give, and on what adapters add to it."""

    @property
    def keys(self) -> list[SiteKey]:
        """Keys of the layers."""
        return [(id(module), self.parameter) for module in self.modules]


class PackedSite:
    """Matrices of adapters beside one product, by the adapter's number; 0 has none."""

    def __init__(self, site: Site, room: AdapterRoom, dtype: torch.dtype) -> None:
        self.site, self._dtype = site, dtype
        self.low_width = padded(room.rank) * len(site.modules)
        """Most numbers of a row of what A gives."""
        numbers = room.held if site.is_spread else room.adapters
        self.parts = np.zeros((numbers + 1, site.experts), ADAPTER_PART)
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
        self.parts[number] = 0
        self._kept.pop(number, None)
        present = [index for index, each in enumerate(parts) if each is not None]
        if not present:
            return 0
        rank = padded(max(each.rank for each in parts if each is not None))
        a, b, places = [], [], np.zeros(len(self._modules), ADAPTER_PANEL)
        for part, size in zip(parts, self.site.sizes, strict=True):
            if part is None:
                b.append(torch.zeros(size, rank))
                continue
            missing = rank - part.rank
            a.append(F.pad(part.a.float(), (0, 0, 0, missing)))
            b.append(F.pad(part.b.float(), (0, missing)))
        factor = self.site.factor
        for panel, module in enumerate(self._modules):
            part = parts[module] if module >= 0 else None
            places[panel] = (-1, 0) if part is None else (present.index(module) * rank, part.scaling * factor)
        every = F.pad(torch.cat(b, -2), (0, 0, 0, 1))[..., self._order, :]
        low, high = torch.cat(a, -2).to(self._dtype), panels(every.to(self._dtype))
        low = low.mT.contiguous() if self.site.of_tokens else panels(low)
        laid = self.parts[number]
        for name, each in (("a", low), ("b", high)):
            of_one = each.nbytes // self.site.experts
            laid[name] = each.data_ptr() + np.arange(self.site.experts) * of_one
        laid["panels"], laid["num_low"], laid["rank"] = places.ctypes.data, rank * len(a), rank
        self._kept[number] = low, high, places
        return int(low.nbytes + high.nbytes)

    def record(
        self, low: torch.Tensor, numbers: torch.Tensor | None = None, here: Int64s | None = None
    ) -> np.ndarray[Any, Any]:
        """``AdapterSite`` of this product.

        ``low``: scratch rows for what A gives; ``numbers``: of the adapters of rows that are sorted by
        expert; ``here``: the experts here, where they are spread. All must outlive the record.
        """
        of_rows = 0 if numbers is None else numbers.data_ptr()
        experts = 0 if here is None else here.ctypes.data
        fields = (self.parts.ctypes.data, low.data_ptr(), low.shape[1], of_rows, self.site.experts, experts)
        return np.array(fields, ADAPTER_SITE)


EXPERT_BITS = 16
"""Bits of an expert's number in a choice, below the tag of the row's adapter."""
TAG_DIGITS = 11
"""Hexadecimal digits of an adapter's digest that are its tag."""


class TaggedAdapters:
    """Adapters laid out for spread experts, by a tag that all instances know."""

    def __init__(self, room: int) -> None:
        self.tags = np.zeros(room, np.int64)
        """Tag of each number from 1 on; 0 if it is free."""
        self.record = np.array((self.tags.ctypes.data, room), TAGGED_ADAPTERS)

    def __bool__(self) -> bool:
        return bool(self.tags.any())

    def free(self) -> int:
        """A number that no adapter has."""
        return int(np.flatnonzero(self.tags == 0)[0]) + 1

    def number_of(self, tag: int) -> int:
        """Number of a tag that is there."""
        return int(np.flatnonzero(self.tags == tag)[0]) + 1

    def numbers_of(self, tags: Int64s) -> Int64s:
        """Number of each row's adapter, 0 for none; all of them are there."""
        numbers = np.append(0, np.arange(len(self.tags)) + 1)
        order = np.argsort(known := np.append(0, self.tags), kind="stable")
        found: Int64s = numbers[order[np.searchsorted(known, tags, sorter=order)]]
        assert np.array_equal(known[found], tags), "rows of another instance have an adapter that is not here"
        return found


class Sites:
    """All products of a model beside which adapters add something."""

    def __init__(self, room: AdapterRoom, dtype: torch.dtype) -> None:
        self.room, self._dtype = room, dtype
        self._packed: list[PackedSite] = []
        self.tagged = TaggedAdapters(room.held)
        """Adapters of spread experts."""
        self.tags_in_choices = np.zeros(room.adapters + 1, np.int64)
        """Tags by number, where choices of experts have them (``EXPERT_BITS``)."""

    def packed(self, site: Site) -> PackedSite:
        """Room for the adapters of a product."""
        found = PackedSite(site, self.room, self._dtype)
        self._packed.append(found)
        return found

    @property
    def keys(self) -> set[SiteKey]:
        """Keys of all layers that may have adapters."""
        return {key for packed in self._packed for key in packed.site.keys}

    def low_width(self, *, of_experts: bool) -> int:
        """Most numbers of a row of what A gives."""
        found = (each.low_width for each in self._packed if bool(each.site.parameter) is of_experts)
        return max(found, default=0)

    @property
    def times(self) -> int:
        """Rows of a token that experts compute."""
        return max((each.site.times for each in self._packed), default=1)

    def put(self, number: int, parts: Mapping[SiteKey, LowRank], tag: int = 0) -> int:
        """Lay out an adapter; returns its bytes.

        ``tag``: names it where experts are spread: :meth:`hold` has laid out its parts there.
        """
        self.tags_in_choices[number] = tag << EXPERT_BITS
        return self._put(number, parts, is_spread=False)

    @property
    def spread_keys(self) -> set[SiteKey]:
        """Keys of those that are spread over instances."""
        return {key for packed in self._packed if packed.site.is_spread for key in packed.site.keys}

    def hold(self, tag: int, parts: Mapping[SiteKey, LowRank]) -> None:
        """Lay out an adapter's parts of spread experts, while steps run, until :meth:`let_go`."""
        number = self.tagged.free()
        self._put(number, parts, is_spread=True)
        self.tagged.tags[number - 1] = tag

    def let_go(self, tag: int) -> None:
        """Forget what was laid out of an adapter; no step may run meanwhile."""
        number = self.tagged.number_of(tag)
        self.tagged.tags[number - 1] = 0
        self._put(number, {}, is_spread=True)

    def _put(self, number: int, parts: Mapping[SiteKey, LowRank], *, is_spread: bool) -> int:
        packed = [each for each in self._packed if each.site.is_spread is is_spread]
        return sum(each.put(number, [*map(parts.get, each.site.keys)]) for each in packed)


def in_whole_panels(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Indices of outputs in a row, each part filled up to whole panels with -1."""
    return torch.cat([F.pad(each, (0, -len(each) % LANES), value=-1) for each in parts])


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
