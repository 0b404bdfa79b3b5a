"""Mixtures in a step: their weights laid out, and the operations that they write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.kernels.adapters.sites import EXPERT_NUMBERS, PackedSite
from engine.kernels.core.operations import ADD, AS_FLOAT, WIDE, OperationKind
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.exchange.exchange import ExpertExchange, LocalExchange
from engine.kernels.exchange.linked import LinkedExchange
from engine.kernels.exchange.sums import Area
from engine.kernels.experts.mixture import (
    EXPERT_MIDDLE,
    IDS,
    MIXED,
    ROUTER_LOGITS,
    SCORES,
    SHARED_LOGITS,
    WIDENED,
    Moe,
    MoeNorms,
)
from engine.kernels.experts.packed_experts import NativeExperts, PackedExperts
from engine.kernels.lowering.parts import Packing, PartPlace
from engine.kernels.lowering.product import Rows
from engine.kernels.lowering.writer import Writer, factor_field
from engine.kernels.mlp.mlp import PackedMlp


class _To(NamedTuple):
    """Destination of a mixture's result: rows, flags and factor."""

    out: torch.Tensor
    flags: int
    """ADD if it is added to what is there."""
    factor: float


@dataclass(frozen=True)
class ExchangedLayer:
    """A layer's experts, which are computed through Python where a list is cut."""

    moe: Moe
    factor: float
    """Factor on what they give."""
    out: torch.Tensor
    """Rows that it is written to."""
    adds: bool
    """Whether it is added to what is there."""
    ids: torch.Tensor
    """[tokens, experts of each]"""
    scores: torch.Tensor
    """[tokens, experts of each] float32"""


class PackedMoe:
    """Mixtures in a step: their weights laid out, and the operations that they write."""

    exchanges = True

    def __init__(self, moe: Moe, packing: Packing) -> None:
        """With ``packing.spread``, experts come and go, so they are packed when they are used."""
        packer = packing.packer
        self.moe = moe
        self.router = packer.panels(moe.router, multiple=32)
        self.routing = moe.routing.record(packing.dtype)
        self.shared = None if moe.shared is None else PackedMlp(moe.shared, packing)
        self.shared_gate = None if moe.shared_gate is None else packer.panels(moe.shared_gate, multiple=32)
        self._spread: NativeExperts | None = packing.spread
        self._experts: PackedExperts | None = None
        if self._spread is None:
            ranks = packing.ranks if moe.has_parts else 1
            self._experts = PackedExperts.of(moe.experts, moe.form, packer, ranks)
        is_spread = self._spread is not None
        self.sites = [packing.site(site) for site in moe.sites(is_spread=is_spread)]
        """Adapters of the experts' two products."""
        if self._spread is not None and packing.sites is not None:
            self._spread.adapt(moe.experts, self.sites, packing.sites.tagged)

    def read(self, writer: Writer, place: PartPlace) -> Rows:
        """Write the norm before it; returns the rows that it reads.

        They lie where they are exchanged.
        """
        exchange = writer.exchange
        norm = place.norm if self.moe.norms is None else self.moe.norms.experts
        rows = writer.buffers.normed if exchange is None else exchange.own + exchange.layout.rows_at
        if writer.norm(norm, rows) is writer.stream:
            writer.scale(1.0, rows)
        return rows

    def add(self, writer: Writer, place: PartPlace, rows: Rows) -> None:
        """Write the mixture of these rows.

        Without an exchange, the list is cut at its experts.
        """
        buffers, norms, exchange = writer.buffers, self.moe.norms, writer.exchange
        to = _To(writer.stream, ADD, place.factor)
        if place.last_norm is not None:
            to = _To(buffers[MIXED], 0, place.factor)
            if place.factor != 1.0:
                raise NotRecognised("a factor on what a norm gives")
        ids = buffers[IDS] if exchange is None else exchange.own + exchange.layout.ids_at
        if norms is not None:
            self._mlp_beside(writer, place, norms)
        self._route(writer, rows if norms is None else writer.norm(norms.router, buffers[MIXED]), ids)
        if exchange is None:
            beside = self.shared is not None and norms is None
            if beside:
                self._shared(writer, rows, to)
            adds = beside or to.out is writer.stream
            scores = buffers[SCORES]
            writer.cut(ExchangedLayer(self.moe, place.factor, to.out, adds, buffers[IDS], scores))
        else:
            self._add_experts(writer, exchange, to)
        if norms is not None:
            writer.normalise(norms.experts_last, buffers[MIXED], buffers.branch, writer.hidden, flags=ADD)
        if place.last_norm is not None:
            added = buffers[MIXED] if norms is None else buffers.branch
            writer.normalise(place.last_norm, added, writer.stream, writer.hidden, flags=ADD)

    def _route(self, writer: Writer, into: Rows, ids: Rows) -> None:
        """Choose experts, and their weights."""
        buffers, moe, wide = writer.buffers, self.moe, 0
        if moe.router.dtype != writer.facts.dtype:
            widened = buffers[WIDENED]
            writer.add(OperationKind.WIDEN, into=into, out=widened, k=writer.hidden, flags=writer.rows)
            into, wide = widened, WIDE
        writer.add(
            OperationKind.LINEAR,
            into=into,
            out=buffers[ROUTER_LOGITS],
            weights=self.router,
            more=moe.router_bias,
            n=moe.num_experts,
            k=writer.hidden,
            flags=writer.rows | AS_FLOAT | wide,
        )
        writer.add(
            OperationKind.ROUTE,
            into=buffers[ROUTER_LOGITS],
            out=buffers[SCORES],
            extra=ids,
            more=self.routing,
            added=writer.tags(self.sites[0]),
            n=moe.num_experts,
            k=moe.top_k,
            flags=writer.rows,
        )

    def _shared(self, writer: Writer, rows: Rows, to: _To) -> None:
        """Write what the expert of all tokens gives."""
        assert self.shared is not None
        logits = None
        if self.shared_gate is not None:
            if not to.flags & ADD:
                raise NotRecognised("a gate on what a norm is given with other experts' results")
            logits = writer.buffers[SHARED_LOGITS]
            writer.add(
                OperationKind.LINEAR,
                into=rows,
                out=logits,
                weights=self.shared_gate,
                n=1,
                k=writer.hidden,
                flags=writer.rows | AS_FLOAT,
            )
        writer.multiply(self.shared.product(writer, rows, logits), *to)

    def _mlp_beside(self, writer: Writer, place: PartPlace, norms: MoeNorms) -> None:
        """Write what the MLP beside a mixture gives, behind its norm."""
        assert self.shared is not None
        into, branch = writer.norm(place.norm, writer.buffers[MIXED]), writer.buffers.branch
        writer.multiply(self.shared.product(writer, into), branch)
        writer.normalise(norms.shared_last, branch, branch, writer.hidden)

    def _add_experts(self, writer: Writer, exchange: ExpertExchange, to: _To) -> None:
        """Write the experts' results, summed up."""
        moe, alone, linked = (
            self.moe,
            isinstance(exchange, LocalExchange),
            isinstance(exchange, LinkedExchange),
        )
        record, flags = writer.next_exchange(), to.flags
        if not alone:
            writer.add(OperationKind.OFFER, extra=record, flags=writer.rows)
        if self.shared is not None and moe.norms is None:  # while the others' rows come
            self._shared(writer, exchange.own + exchange.layout.rows_at, to)
            flags = ADD
        area = writer.area() if moe.is_partial else None
        if linked:  # what is here first, the others' rows when they have come
            writer.add(OperationKind.LOOK, extra=record, flags=writer.rows)
            self._products(writer, exchange, record, area, number=1)
        if not alone:
            writer.add(OperationKind.MEET, extra=record)
        self._products(writer, exchange, record, area, number=2 if linked else 0)
        if not alone:
            writer.add(OperationKind.HOME, extra=record)
        of_ranks: dict[str, Any] = {}
        if area is not None:
            of_ranks = {"more": writer.meet_for(area, writer.hidden * moe.top_k), "a": area.begin}
        writer.add(
            OperationKind.COMBINE,
            into=writer.buffers[SCORES],
            out=to.out,
            extra=record,
            n=writer.hidden,
            k=moe.top_k,
            number=factor_field(to.factor),
            flags=writer.rows | flags,
            **of_ranks,
        )

    def _products(
        self,
        writer: Writer,
        exchange: ExpertExchange,
        record: np.ndarray[Any, Any],
        area: Area | None,
        number: int,
    ) -> None:
        """Write the results of the experts here; ``record``: of the layer, ``number``: see SORT."""
        buffers, moe, experts = writer.buffers, self.moe, self._packed_experts()
        results = exchange.own + exchange.layout.results_at if area is None else area.address
        numbers = buffers[EXPERT_NUMBERS] if writer.adapts_experts(self.sites[0]) else None
        tagged = None if self._spread is None else self._spread.tagged
        added = None if tagged is None or numbers is None else tagged.record
        writer.add(OperationKind.SORT, extra=record, a=number, out=numbers, added=added, flags=writer.rows)
        writer.add(OperationKind.GATHER, extra=record)
        begins, first = exchange.begins, moe.first_whole

        here = None if self._spread is None else exchange.held(record)

        def adapted(site: PackedSite | None) -> Callable[[Any], Any]:
            return lambda rows: writer.adapted_experts(site, rows, begins, experts.count, here)

        if area is not None and first is not None:  # all rows have a place, and others' experts give 0
            begins = begins[first : first + experts.count + 1]
            fields = {"extra": exchange.begins, "a": first, "b": first + experts.count, "c": moe.num_experts}
            writer.add(OperationKind.CLEAR, out=results, n=writer.hidden, **fields)
        experts.write(
            writer.operations,
            buffers.gathered,
            buffers[EXPERT_MIDDLE],
            results,
            begins,
            writer.facts.ranks if moe.is_partial and first is None else 1,
            as_float=moe.is_partial,
            rounded=buffers.rounded,
            adapted=(adapted(self.sites[0]), adapted(self.sites[1])),
        )
        if not isinstance(exchange, LocalExchange):
            writer.add(OperationKind.RETURN, extra=record, a=number)

    def _packed_experts(self) -> PackedExperts:
        """The experts that are here now."""
        if self._experts is not None:
            return self._experts
        assert self._spread is not None
        return self._spread.packed(self.moe.experts)
