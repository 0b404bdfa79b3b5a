"""A decoder as a list of operations for ``step.cpp``, for buffers of one size.

Where experts are spread over instances that share memory, the exchange is part of the list
(:mod:`engine.kernels.exchange`). Over other transports the list is cut at each expert layer.

What the last layer gives for a token is read only to find the token behind it. So once the keys and values
of all tokens are in the cache, that layer goes on with those alone whose logits are wanted: of a prompt, one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.buffers import Buffers
from engine.kernels.cache import NativeCache
from engine.kernels.decoder import Attention, Mlp, Moe
from engine.kernels.exchange import Alone, Exchange
from engine.kernels.experts import NativeExperts
from engine.kernels.operations import ADD, AS_FLOAT, SELECTED, Kind, Operations
from engine.kernels.weights import PackedDecoder, PackedLayer

OPERATIONS_PER_LAYER = 18


@dataclass
class StepList:
    """The operations of a step, and where they are cut for an exchange through Python."""

    operations: Operations
    cuts: list[tuple[int, Moe | None]]
    """Ends of pieces, rising; the layer whose experts come after each, None at the end of the list."""


class Lowering:
    """Writes such a list. It points to all that is given here, and keeps it alive."""

    def __init__(
        self,
        packed: PackedDecoder,
        products: NativeExperts,
        cache: NativeCache,
        buffers: Buffers,
        exchange: Exchange | None,
    ) -> None:
        """``products``: of expert layers that the packed decoder leaves out. ``exchange``: None if there are
        no expert layers."""
        self._packed = packed
        self._hidden = packed.decoder.hidden
        self._products = products
        self._cache = cache
        self._buffers = buffers
        self._exchange = exchange
        self._list = Operations(OPERATIONS_PER_LAYER * len(packed.layers) + 5)
        self._stream, self._rows = buffers.stream, 0
        """What the layers add to, and the flag that says which rows it has."""

    def write(self, *, exchanges: bool) -> StepList:
        """``exchanges``: with the exchange of experts; once only."""
        decoder, buffers = self._packed.decoder, self._buffers
        cuts: list[tuple[int, Moe | None]] = []
        self._list.add(Kind.EMBED, into=decoder.embedding.data, out=buffers.stream, k=self._hidden)
        for number, packed in enumerate(self._packed.layers):
            layer = packed.layer
            cut = isinstance(layer.mlp, Moe) and not exchanges
            self._norm(layer.norm, layer.eps, buffers.normed)
            self._project(packed, layer.attention)
            if number == len(self._packed.layers) - 1 and not cut:
                self._select()
            self._attention(number, packed, layer.attention)
            if isinstance(layer.mlp, Mlp):
                self._norm(layer.second_norm, layer.eps, buffers.normed)
                self._mlp(packed, layer.mlp)
            elif cut:
                self._norm(layer.second_norm, layer.eps, buffers.normed)
                self._router(packed, layer.mlp, buffers.normed, buffers.ids)
                cuts.append((len(self._list), layer.mlp))
            else:
                assert self._exchange is not None
                own, layout = self._exchange.own, self._exchange.layout
                self._norm(layer.second_norm, layer.eps, own + layout.rows_at)
                self._router(packed, layer.mlp, own + layout.rows_at, own + layout.ids_at)
                self._experts(packed, layer.mlp, self._exchange)
        if not self._rows:
            self._select()
        self._norm(decoder.norm, decoder.eps, buffers.last)
        self._list.add(
            Kind.LINEAR,
            into=buffers.last,
            out=buffers.logits,
            weights=self._packed.head,
            n=decoder.vocab,
            k=self._hidden,
            flags=SELECTED | AS_FLOAT,
        )
        self._list.add(Kind.BEST, into=buffers.logits, out=buffers.best, n=decoder.vocab)
        return StepList(self._list, [*cuts, (len(self._list), None)])

    def _select(self) -> None:
        """From here on there are only the rows whose logits are wanted."""
        self._list.add(Kind.SELECT, into=self._stream, out=self._buffers.last, k=self._hidden)
        self._stream, self._rows = self._buffers.last, SELECTED

    def _norm(self, weight: torch.Tensor, eps: float, out: torch.Tensor | int) -> None:
        self._list.add(
            Kind.NORM,
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
            Kind.LINEAR,
            into=self._buffers.normed,
            out=self._buffers.projected,
            weights=packed.qkv,
            more=attention.qkv_bias,
            n=(attention.heads + 2 * attention.kv_heads) * attention.dim,
            k=self._hidden,
        )

    def _attention(self, number: int, packed: PackedLayer, attention: Attention) -> None:
        buffers = self._buffers
        keys, values = self._cache.keys[number], self._cache.values[number]
        shape = {"a": attention.heads, "b": attention.kv_heads, "c": attention.dim, "d": attention.window}
        self._list.add(
            Kind.QKV,
            into=buffers.projected,
            out=values,
            extra=keys,
            more=attention.head_norms,
            number=attention.head_eps,
            **shape,
        )
        self._list.add(
            Kind.ATTEND,
            into=buffers.projected,
            out=buffers.attended,
            weights=values,
            extra=keys,
            number=attention.scale,
            flags=self._rows,
            **shape,
        )
        self._list.add(
            Kind.LINEAR,
            into=buffers.attended,
            out=self._stream,
            weights=packed.out,
            more=attention.out_bias,
            n=self._hidden,
            k=attention.heads * attention.dim,
            flags=self._rows | ADD,
        )

    def _mlp(self, packed: PackedLayer, mlp: Mlp) -> None:
        buffers = self._buffers
        self._list.add(
            Kind.GATED,
            into=buffers.normed,
            out=buffers.middle,
            weights=packed.gate_up,
            n=mlp.width,
            k=self._hidden,
            flags=self._rows,
        )
        self._list.add(
            Kind.LINEAR,
            into=buffers.middle,
            out=self._stream,
            weights=packed.down,
            n=self._hidden,
            k=mlp.width,
            flags=self._rows | ADD,
        )

    def _router(
        self,
        packed: PackedLayer,
        moe: Moe,
        into: torch.Tensor | int,
        ids: torch.Tensor | int,
    ) -> None:
        buffers = self._buffers
        self._list.add(
            Kind.LINEAR,
            into=into,
            out=buffers.router_logits,
            weights=packed.router,
            n=moe.num_experts,
            k=self._hidden,
            flags=self._rows | AS_FLOAT,
        )
        self._list.add(
            Kind.ROUTE,
            into=buffers.router_logits,
            out=buffers.scores,
            extra=ids,
            n=moe.num_experts,
            k=moe.top_k,
            flags=self._rows | (ADD if moe.normalised else 0),
        )

    def _experts(self, packed: PackedLayer, moe: Moe, exchange: Exchange) -> None:
        buffers, alone = self._buffers, isinstance(exchange, Alone)
        results = exchange.own + exchange.layout.results_at
        experts = packed.experts or self._products.packed(moe.experts)
        if not alone:
            self._list.add(Kind.OFFER, extra=exchange.record, flags=self._rows)
            self._list.add(Kind.MEET, extra=exchange.record)
        self._list.add(Kind.SORT, extra=exchange.record, flags=self._rows)
        self._list.add(Kind.GATHER, extra=exchange.record)
        experts.write(self._list, buffers.gathered, buffers.expert_middle, results, exchange.begins)
        if not alone:
            self._list.add(Kind.RETURN, extra=exchange.record)
            self._list.add(Kind.HOME, extra=exchange.record)
        self._list.add(
            Kind.COMBINE,
            into=buffers.scores,
            out=self._stream,
            extra=exchange.record,
            n=self._hidden,
            k=moe.top_k,
            flags=self._rows,
        )
