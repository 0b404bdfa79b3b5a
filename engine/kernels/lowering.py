"""A decoder as a list of operations for ``step.cpp``, for buffers of one size.

Where experts are spread over instances that share memory, the exchange is part of the list
(:mod:`engine.kernels.exchange`). Over other transports the list is cut at each expert layer. The same goes
for the partial sums of tensor-parallel ranks (:mod:`engine.kernels.sums`).

What the last layer gives for a token is read only to find the token behind it. So once the keys and values
of all tokens are in the cache, that layer goes on with those alone whose logits are wanted: of a prompt, one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.kernels.buffers import Buffers
from engine.kernels.cache import NativeCache
from engine.kernels.decoder import Attention, Embedding, Moe, Output
from engine.kernels.exchange import Alone, Exchange
from engine.kernels.experts import NativeExperts
from engine.kernels.linked import Linked
from engine.kernels.operations import ADD, AS_FLOAT, SELECTED, TO_CHOOSE, WIDE, OperationKind, Operations
from engine.kernels.packing import Laid
from engine.kernels.sums import Area, OwnSums, Sums, parts_here
from engine.kernels.weights import PackedDecoder, PackedLayer, PackedMlp, PackedMoe

OPERATIONS_PER_LAYER = 30
OTHER_OPERATIONS = 10
BEST_BYTES = 16
"""Bytes of what a rank finds for a row (``Best`` in ``choosing.hpp``)."""


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

    operations: Operations
    cuts: list[tuple[int, Moe | PartialSums | None]]
    """Ends of pieces, rising, and what comes after each.

    That is the experts of a layer, a sum over ranks, or, at the end of the list, nothing.
    """


class Lowering:
    """Writer of such a list.

    It points to all that it is made with, and keeps it alive.
    """

    def __init__(
        self,
        packed: PackedDecoder,
        products: NativeExperts,
        cache: NativeCache,
        buffers: Buffers,
        exchange: Exchange | None,
        sums: Sums | None,
        ranks: int,
    ) -> None:
        """``products``: of expert layers that the packed decoder leaves out.

        ``exchange``: None if there are no expert layers. ``sums``: over tensor-parallel ranks, None if there
        is one. ``ranks``: how many there are.
        """
        self._packed = packed
        self._hidden = packed.decoder.hidden
        self._products = products
        self._cache = cache
        self._buffers = buffers
        self._exchange = exchange
        self._sums, self._ranks = sums, ranks
        self._num_sums = 0
        """Sums written so far."""
        self._cuts: list[tuple[int, Moe | PartialSums | None]] = []
        self._list = Operations(OPERATIONS_PER_LAYER * len(packed.layers) + OTHER_OPERATIONS)
        self._stream, self._rows = buffers.stream, 0
        """What the layers add to, and the flag that says which rows it has."""

    def write(self, *, exchanges: bool) -> StepList:
        """Write the list, once; ``exchanges``: with the exchange of experts."""
        decoder, buffers = self._packed.decoder, self._buffers
        if decoder.embedding is not None:
            self._embed(decoder.embedding)
        for number, packed in enumerate(self._packed.layers):
            layer = packed.layer
            cut = isinstance(layer.mlp, Moe) and not exchanges
            self._norm(layer.norm, layer.eps, buffers.normed)
            self._project(packed, layer.attention)
            if number == len(self._packed.layers) - 1 and not cut and decoder.output is not None:
                self._select()
            self._attention(number, packed, layer.attention)
            if isinstance(packed.mlp, PackedMlp):
                self._norm(layer.second_norm, layer.eps, buffers.normed)
                self._mlp(packed.mlp, buffers.normed)
            elif cut:
                self._norm(layer.second_norm, layer.eps, buffers.normed)
                self._router(packed.mlp, buffers.normed, buffers.ids)
                self._shared(packed.mlp, buffers.normed)
                self._cuts.append((len(self._list), packed.mlp.moe))
            else:
                assert self._exchange is not None
                own, layout = self._exchange.own, self._exchange.layout
                self._norm(layer.second_norm, layer.eps, own + layout.rows_at)
                self._router(packed.mlp, own + layout.rows_at, own + layout.ids_at)
                self._experts(packed.mlp, self._exchange)
        if self._num_sums == 1:
            self._meet(0, 0)  # or what was given for this step's sum could be gone before all have read it
        if decoder.output is not None:
            self._choose(decoder.output)
        return StepList(self._list, [*self._cuts, (len(self._list), None)])

    def _embed(self, embedding: Embedding) -> None:
        weights = {"into": embedding.weight.data, "k": self._hidden}
        if not embedding.is_partial:
            self._list.add(OperationKind.EMBED, out=self._buffers.stream, **weights)
            return
        area = self._area()
        self._list.add(
            OperationKind.EMBED,
            out=area.address,
            n=len(embedding.weight),
            a=embedding.first,
            flags=AS_FLOAT,
            **weights,
        )
        self._sum(area, None, flags=0)

    def _choose(self, output: Output) -> None:
        """Logits of the selected rows, and the tokens that have the greatest."""
        buffers = self._buffers
        if not self._rows:
            self._select()
        self._norm(output.norm, output.eps, buffers.last)
        self._list.add(
            OperationKind.LINEAR,
            into=buffers.last,
            out=buffers.logits,
            weights=self._packed.head,
            n=output.vocab,
            k=self._hidden,
            flags=SELECTED | AS_FLOAT,
        )
        if not output.is_partial:
            self._list.add(OperationKind.CHOOSE, into=buffers.logits, out=buffers.chosen, n=output.vocab)
        elif self._sums is not None and not isinstance(self._sums, OwnSums):
            area = self._sums.area_to_choose()
            self._list.add(
                OperationKind.CHOOSE,
                into=buffers.logits,
                out=area.address,
                n=output.vocab,
                a=output.first,
                flags=AS_FLOAT,
            )
            self._meet(area.begin, BEST_BYTES, TO_CHOOSE)
            self._list.add(
                OperationKind.BEST_OF_ALL, out=buffers.chosen, extra=self._sums.record, a=area.begin
            )

    def _select(self) -> None:
        """Go on with those rows alone whose logits are wanted."""
        self._list.add(OperationKind.SELECT, into=self._stream, out=self._buffers.last, k=self._hidden)
        self._stream, self._rows = self._buffers.last, SELECTED

    def _norm(self, weight: torch.Tensor, eps: float, out: torch.Tensor | int) -> None:
        self._list.add(
            OperationKind.NORM,
            into=self._stream,
            out=out,
            more=weight,
            k=self._hidden,
            number=eps,
            flags=self._rows,
        )

    def _project(self, packed: PackedLayer, attention: Attention) -> None:
        """Queries, keys and values."""
        self._list.add(
            OperationKind.LINEAR,
            into=self._buffers.normed,
            out=self._buffers.projected,
            weights=packed.qkv,
            more=attention.qkv_bias,
            n=attention.projected_width,
            k=self._hidden,
        )

    def _attention(self, number: int, packed: PackedLayer, attention: Attention) -> None:
        buffers = self._buffers
        keys, values = self._cache.keys[number], self._cache.values[number]
        shape = {
            "a": attention.heads,
            "b": attention.kv_heads,
            "c": attention.dim,
            "d": attention.window,
            "n": attention.value_dim,
        }
        self._list.add(
            OperationKind.QKV,
            into=buffers.projected,
            out=values,
            extra=keys,
            more=attention.head_norms,
            number=attention.head_eps,
            **shape,
        )
        self._list.add(
            OperationKind.ATTEND,
            into=buffers.projected,
            out=buffers.attended,
            weights=values,
            extra=keys,
            more=attention.sinks,
            number=attention.scale,
            cap=attention.cap,
            factors=attention.factors,
            flags=self._rows,
            **shape,
        )
        self._add_product(
            buffers.attended, packed.out, attention.width, attention.out_bias, attention.is_partial
        )

    def _mlp(
        self, packed: PackedMlp, rows: torch.Tensor | int, row_factors: torch.Tensor | None = None
    ) -> None:
        """An MLP on some rows; ``row_factors``: see :meth:`_add_product`."""
        buffers, mlp = self._buffers, packed.mlp
        self._list.add(
            OperationKind.GATED,
            into=rows,
            out=buffers.middle,
            weights=packed.gate_up,
            n=mlp.width,
            k=self._hidden,
            flags=self._rows,
        )
        self._add_product(buffers.middle, packed.down, mlp.width, None, mlp.is_partial, row_factors)

    def _add_product(
        self,
        into: torch.Tensor,
        weights: Laid | None,
        width: int,
        bias: torch.Tensor | None,
        is_partial: bool,
        row_factors: torch.Tensor | None = None,
    ) -> None:
        """Multiply rows by weights and add the result to the stream.

        If it is a partial sum, it is added over all ranks first. ``row_factors``: logits [rows] in float32,
        whose sigmoids are factors on the result.
        """
        parts = parts_here(width, self._ranks if is_partial else 1)
        product = {"into": into, "weights": weights, "n": self._hidden, "k": width, "b": parts}
        if not is_partial:
            self._list.add(
                OperationKind.LINEAR,
                out=self._stream,
                more=bias,
                factors=row_factors,
                flags=self._rows | ADD,
                **product,
            )
            return
        area = self._area()
        self._list.add(OperationKind.LINEAR, out=area.address, flags=self._rows | AS_FLOAT, **product)
        self._sum(area, bias, ADD, row_factors)

    def _area(self) -> Area:
        """Area of the next sum."""
        assert self._sums is not None
        self._num_sums += 1
        return self._sums.area(self._num_sums - 1, self._packed.decoder.num_sums)

    def _sum(
        self, area: Area, bias: torch.Tensor | None, flags: int, row_factors: torch.Tensor | None = None
    ) -> None:
        """Add what all ranks have given to the stream."""
        record = self._meet_for(area, self._hidden)
        self._list.add(
            OperationKind.SUM,
            out=self._stream,
            more=bias,
            extra=record,
            factors=row_factors,
            n=self._hidden,
            a=area.begin,
            flags=self._rows | flags,
        )

    def _meet_for(self, area: Area, width: int) -> np.ndarray[Any, Any]:
        """Wait for the sums of all ranks, and return the record of where they are.

        ``width``: of a row of them.
        """
        assert self._sums is not None
        if isinstance(self._sums, OwnSums):
            self._cuts.append((len(self._list), PartialSums(area, self._rows == SELECTED, width)))
        else:
            self._meet(area.begin, 4 * width)
        return self._sums.record

    def _meet(self, begin: int, row_bytes: int, when: int = 0) -> None:
        """Wait until all ranks have come this far.

        Each offers what is from byte ``begin`` of its arena on, so many bytes for a row.
        """
        if self._sums is not None and not isinstance(self._sums, OwnSums):
            self._list.add(
                OperationKind.OFFER, extra=self._sums.record, a=begin, k=row_bytes, flags=self._rows | when
            )
            self._list.add(OperationKind.MEET, extra=self._sums.record, flags=when)

    def _router(self, packed: PackedMoe, into: torch.Tensor | int, ids: torch.Tensor | int) -> None:
        buffers, moe = self._buffers, packed.moe
        wide = 0
        if moe.router.dtype != self._packed.decoder.dtype:
            self._list.add(
                OperationKind.WIDEN, into=into, out=buffers.widened, k=self._hidden, flags=self._rows
            )
            into, wide = buffers.widened, WIDE
        self._list.add(
            OperationKind.LINEAR,
            into=into,
            out=buffers.router_logits,
            weights=packed.router,
            more=moe.router_bias,
            n=moe.num_experts,
            k=self._hidden,
            flags=self._rows | AS_FLOAT | wide,
        )
        self._list.add(
            OperationKind.ROUTE,
            into=buffers.router_logits,
            out=buffers.scores,
            extra=ids,
            more=packed.routing,
            n=moe.num_experts,
            k=moe.top_k,
            flags=self._rows,
        )

    def _shared(self, packed: PackedMoe, rows: torch.Tensor | int) -> None:
        """Add what the expert of all tokens gives, if there is one."""
        if packed.shared is None:
            return
        logits = None
        if packed.shared_gate is not None:
            logits = self._buffers.shared_logits
            self._list.add(
                OperationKind.LINEAR,
                into=rows,
                out=logits,
                weights=packed.shared_gate,
                n=1,
                k=self._hidden,
                flags=self._rows | AS_FLOAT,
            )
        self._mlp(packed.shared, rows, logits)

    def _experts(self, packed: PackedMoe, exchange: Exchange) -> None:
        buffers, moe, alone = self._buffers, packed.moe, isinstance(exchange, Alone)
        if not alone:
            self._list.add(OperationKind.OFFER, extra=exchange.record, flags=self._rows)
        self._shared(packed, exchange.own + exchange.layout.rows_at)  # while the others' rows come
        area = self._area() if moe.is_partial else None
        if isinstance(exchange, Linked):  # what is here first, the others' rows when they have come
            self._list.add(OperationKind.LOOK, extra=exchange.record, flags=self._rows)
            self._products_of(packed, exchange, area, number=1)
        if not alone:
            self._list.add(OperationKind.MEET, extra=exchange.record)
        self._products_of(packed, exchange, area, number=2 if isinstance(exchange, Linked) else 0)
        if not alone:
            self._list.add(OperationKind.HOME, extra=exchange.record)
        self._list.add(
            OperationKind.COMBINE,
            into=buffers.scores,
            out=self._stream,
            extra=exchange.record,
            n=self._hidden,
            k=moe.top_k,
            flags=self._rows,
            **({} if area is None else self._of_ranks(area, moe)),
        )

    def _products_of(self, packed: PackedMoe, exchange: Exchange, area: Area | None, number: int) -> None:
        """Results of the experts here; ``number``: see SORT."""
        buffers, moe = self._buffers, packed.moe
        experts = packed.experts or self._products.packed(moe.experts)
        results = exchange.own + exchange.layout.results_at if area is None else area.address
        self._list.add(OperationKind.SORT, extra=exchange.record, a=number, flags=self._rows)
        self._list.add(OperationKind.GATHER, extra=exchange.record)
        ranks = self._ranks if moe.is_partial else 1
        experts.write(self._list, buffers.gathered, buffers.expert_middle, results, exchange.begins, ranks)
        if not isinstance(exchange, Alone):
            self._list.add(OperationKind.RETURN, extra=exchange.record, a=number)

    def _of_ranks(self, area: Area, moe: Moe) -> dict[str, Any]:
        """Where the ranks' parts of the experts' results are, once they are there."""
        return {"more": self._meet_for(area, self._hidden * moe.top_k), "a": area.begin}
