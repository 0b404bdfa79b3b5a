"""Writer of a step's list of operations, for buffers of one size.

Where experts are spread over instances that share memory, the exchange is part of the list
(:mod:`engine.kernels.exchange.exchange`). Over other transports the list is cut at each expert layer. The
same goes for the partial sums of tensor-parallel ranks (:mod:`engine.kernels.exchange.sums`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.attention.base import Int64s
from engine.kernels.adapters.sites import EXPERT_LOW, EXPERT_NUMBERS, LOW, PackedSite
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.cache.native_states import NativeStates
from engine.kernels.core.operations import (
    ADD,
    AS_FLOAT,
    CENTRED,
    SELECTED,
    OperationKind,
    OperationList,
)
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.exchange.exchange import ExpertExchange
from engine.kernels.exchange.sums import Area, OwnSums, Sums
from engine.kernels.lowering.buffers import Buffers
from engine.kernels.lowering.product import Product, Rows
from engine.kernels.norms.norm import Norm
from engine.kernels.products.packing import PackedWeights, add_rounding
from parallel.parts import parts_here


class PartialSums(NamedTuple):
    """Partial sums of this rank, to which those of others are added at a cut."""

    area: Area
    are_selected: bool
    """Whether they are of the rows with wanted logits only."""
    width: int
    """Numbers of a row."""


@dataclass
class StepList:
    """The operations of a step, and where they are cut for an exchange through Python."""

    operations: OperationList
    cuts: list[tuple[int, Any]]
    """Ends of pieces, rising, and what comes after each.

    That is :class:`PartialSums`, what a part of a layer handed to :meth:`Writer.cut`, or, at the end of the
    list, None.
    """


class WriterFacts(NamedTuple):
    """Facts of the model that a written list depends on."""

    hidden: int
    dtype: torch.dtype
    ranks: int
    """Tensor-parallel ranks."""
    num_sums: int
    """Sums over them in one step."""
    tables: Mapping[Any, torch.Tensor]
    """Rows of each :class:`~engine.kernels.lowering.parts.PositionTable`."""
    adapts: bool = False
    """Whether some rows of the step have adapters."""
    adapts_spread: bool = False
    """Whether some rows may have adapters of spread experts, here or at other instances."""
    tags: np.ndarray[Any, Any] | None = None
    """See :attr:`engine.kernels.adapters.sites.Sites.tags_in_choices`."""
    computes_all: bool = False
    """Whether the last layer, too, computes all rows: the choices of its experts are wanted."""
    num_added: int = 0
    """First layers behind which a plane of given rows is added to the stream."""


def factor_field(factor: float) -> float:
    """A factor as operations have it: 0 for none."""
    return 0.0 if factor == 1.0 else factor


class Writer:
    """Writer of one list. The list keeps all that it points to alive."""

    def __init__(
        self,
        room: int,
        facts: WriterFacts,
        cache: NativeCache,
        buffers: Buffers,
        exchange: ExpertExchange | None,
        sums: Sums | None,
        states: NativeStates | None = None,
    ) -> None:
        """``room``: most operations.

        ``exchange``: of experts inside the list; None if the list is cut there, or has none. ``sums``: over
        tensor-parallel ranks, None if there is one.
        """
        self.facts, self.hidden = facts, facts.hidden
        self.cache, self.buffers, self.exchange = cache, buffers, exchange
        self._states = states
        self._sums = sums
        self.num_sums = 0
        """Sums written so far."""
        self._num_exchanges = 0
        self._cuts: list[tuple[int, Any]] = []
        self._list = OperationList(room)
        self.stream: torch.Tensor = buffers.stream
        """Rows of the residual stream."""
        self.rows = 0
        """Flag of operations: whether the stream has all rows or the selected ones."""

    def add(self, kind: OperationKind, **fields: Any) -> None:
        """Append an operation (:meth:`engine.kernels.core.operations.OperationList.add`)."""
        self._list.add(kind, **fields)

    @property
    def operations(self) -> OperationList:
        """The list so far."""
        return self._list

    def finish(self) -> StepList:
        """The written list."""
        return StepList(self._list, [*self._cuts, (len(self._list), None)])

    def cut(self, then: Any) -> None:
        """End a piece of the list here; ``then`` is what comes before the next one."""
        self._cuts.append((len(self._list), then))

    def next_exchange(self) -> np.ndarray[Any, Any]:
        """The record of the next layer whose rows are exchanged."""
        assert self.exchange is not None
        self._num_exchanges += 1
        return self.exchange.of_layer(self._num_exchanges - 1)

    def layer_state(self, number: int) -> np.ndarray[Any, Any]:
        """The record of a layer's recurrent state, for ``extra`` of its operations."""
        assert self._states is not None
        return self._states.records[number]

    def selected(self, rows: torch.Tensor, out: torch.Tensor, width: int) -> torch.Tensor:
        """Rows of the stream's tokens, out of those of all tokens; ``out``: where they go."""
        if not self.rows:
            return rows
        self.add(OperationKind.SELECT, into=rows, out=out, k=width)
        return out

    def select(self) -> None:
        """Go on with those rows alone whose logits are wanted."""
        self.add(OperationKind.SELECT, into=self.stream, out=self.buffers.last, k=self.hidden)
        self.stream, self.rows = self.buffers.last, SELECTED

    def scale(self, factor: float, out: Rows | None = None) -> None:
        """Multiply the stream by a factor, where it is or into other rows."""
        self.add(
            OperationKind.SCALE,
            into=self.stream,
            out=self.stream if out is None else out,
            k=self.hidden,
            number=factor_field(factor),
            flags=self.rows,
        )

    def norm(self, norm: Norm | None, out: Rows) -> Rows:
        """Rows that a part reads: the stream, or ``out`` behind a norm."""
        if norm is None:
            return self.stream
        self.normalise(norm, self.stream, out, self.hidden)
        return out

    def normalise(self, norm: Norm, into: Rows, out: Rows, size: int, **more: Any) -> None:
        """Write a norm of rows of ``size`` numbers."""
        flags = self.rows | (CENTRED if norm.is_centred else 0) | more.pop("flags", 0)
        self.add(
            OperationKind.NORM,
            into=into,
            out=out,
            more=norm.weights,
            k=size,
            number=norm.eps,
            flags=flags,
            **more,
        )

    def add_product(self, product: Product, norm: Norm | None, factor: float) -> None:
        """Multiply rows by weights and add the result, behind its norm, to the stream."""
        if norm is None:
            return self.multiply(product, self.stream, ADD, factor)
        if factor != 1.0:
            raise NotRecognised("a factor on what a norm gives")
        self.multiply(product, self.buffers.branch)
        self.normalise(norm, self.buffers.branch, self.stream, self.hidden, flags=ADD)

    def multiply(self, product: Product, out: torch.Tensor, flags: int = 0, factor: float = 1.0) -> None:
        """Multiply rows by weights; a partial sum is added over all ranks first."""
        parts = parts_here(product.width, self.facts.ranks if product.is_partial else 1)
        added = self.adapted(product.site, product.into)
        into = self.rounded(product.into, product.weights, product.width)
        factor *= product.factor
        fields = {
            "into": into,
            "added": added,
            "weights": product.weights,
            "n": self.hidden,
            "k": product.width,
        }
        to: dict[str, Any] = {"out": out, "number": factor_field(factor), "factors": product.row_factors}
        if product.is_partial:
            area = self.area()
            self.add(OperationKind.LINEAR, out=area.address, flags=self.rows | AS_FLOAT, b=parts, **fields)
            self.sum(area, product.bias, flags, **to)
        else:
            self.add(
                OperationKind.LINEAR, more=product.bias, flags=self.rows | flags, b=parts, **fields, **to
            )

    def rounded(self, into: Any, weights: PackedWeights | None, width: int) -> Any:
        """Rows for a product: rounded to 8 bits first, if its weights ask for it."""
        return add_rounding(self._list, weights, into, self.buffers.rounded, width, flags=self.rows)

    def adapted(self, site: PackedSite | None, into: Rows) -> np.ndarray[Any, Any] | None:
        """Write the first product of a site's adapters; returns their record for the second.

        None in a list for rows without any.
        """
        record = self.site_record(site)
        if site is not None and record is not None:
            shape = {"n": site.low_width, "k": site.site.inputs, "flags": self.rows}
            self.add(OperationKind.ADAPT, into=into, extra=record, **shape)
        return record

    def site_record(self, site: PackedSite | None) -> np.ndarray[Any, Any] | None:
        """Record of a site's adapters; None in a list for rows without any."""
        return None if site is None or not self.facts.adapts else site.record(self.buffers[LOW])

    def adapts_experts(self, site: PackedSite | None) -> bool:
        """Whether rows of experts may have adapters; where these are spread, those of other instances."""
        return site is not None and (self.facts.adapts_spread if site.site.is_spread else self.facts.adapts)

    def tags(self, site: PackedSite | None) -> np.ndarray[Any, Any] | None:
        """Tags by which other instances know the adapters of rows; None where they stay here."""
        is_told = site is not None and site.site.is_spread and self.facts.adapts
        return self.facts.tags if is_told else None

    def adapted_experts(
        self, site: PackedSite | None, into: Rows, begins: Any, count: int, here: Int64s | None
    ) -> np.ndarray[Any, Any] | None:
        """The same for rows that are sorted by expert.

        ``begins``: the first one of each of ``count``; ``here``: their numbers, where they are spread.
        """
        if site is None or not self.adapts_experts(site):
            return None
        record = site.record(self.buffers[EXPERT_LOW], self.buffers[EXPERT_NUMBERS], here)
        shape = {"n": site.low_width, "k": site.site.inputs, "a": count}
        self.add(OperationKind.ADAPT_EXPERTS, into=into, extra=record, more=begins, **shape)
        return record

    def area(self) -> Area:
        """Area of the next sum."""
        assert self._sums is not None
        self.num_sums += 1
        return self._sums.area(self.num_sums - 1, self.facts.num_sums)

    def sum(
        self,
        area: Area,
        bias: torch.Tensor | None,
        flags: int,
        out: torch.Tensor,
        number: float = 0.0,
        factors: torch.Tensor | None = None,
    ) -> None:
        """Write the sum over all ranks, or add it to the stream."""
        record = self.meet_for(area, self.hidden)
        self.add(
            OperationKind.SUM,
            out=out,
            more=bias,
            extra=record,
            factors=factors,
            n=self.hidden,
            a=area.begin,
            number=number,
            flags=self.rows | flags,
        )

    def meet_for(self, area: Area, width: int) -> np.ndarray[Any, Any]:
        """Wait for the sums of all ranks, and return the record of where they are.

        ``width``: of a row of them.
        """
        assert self._sums is not None
        if isinstance(self._sums, OwnSums):
            self.cut(PartialSums(area, self.rows == SELECTED, width))
        else:
            self.meet(area.begin, 4 * width)
        return self._sums.record

    def meet(self, begin: int, row_bytes: int, when: int = 0) -> None:
        """Wait until all ranks have come this far.

        Each offers what is from byte ``begin`` of its arena on, so many bytes for a row.
        """
        if (sums := self.common_sums) is not None:
            flags = self.rows | when
            self.add(OperationKind.OFFER, extra=sums.record, a=begin, k=row_bytes, flags=flags)
            self.add(OperationKind.MEET, extra=sums.record, flags=when)

    @property
    def common_sums(self) -> Any:
        """Sums that ranks make inside the list; None if there are none."""
        return None if isinstance(self._sums, OwnSums) else self._sums
