"""A decoder as a list of operations for ``step.cpp``, for buffers of one size.

Where experts are spread over instances that share memory, the exchange is part of the list
(:mod:`engine.kernels.exchange.exchange`). Over other transports the list is cut at each expert layer. The same goes
for the partial sums of tensor-parallel ranks (:mod:`engine.kernels.exchange.sums`).

What the last layer gives for a token is read only to find the token behind it. So once the keys and values
of all tokens are in the cache, that layer goes on with those alone whose logits are wanted: of a prompt, one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.kernels.attention.latent import Latents
from engine.kernels.attention.rotary import QueryFactors
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core.operations import (
    ADD,
    AS_FLOAT,
    CENTRED,
    NORM_LAST,
    QUERIES_ONLY,
    SELECTED,
    TO_CHOOSE,
    WIDE,
    WITHIN,
    OperationKind,
    Operations,
)
from engine.kernels.decoder import Attention, Embedding, Layer, Moe, MoeNorms, NotUsual, Output
from engine.kernels.embedding.per_layer import LayerInputs
from engine.kernels.exchange.exchange import Alone, Exchange
from engine.kernels.exchange.linked import Linked
from engine.kernels.exchange.sums import Area, OwnSums, Sums, norm_parts
from engine.kernels.experts.packed_experts import NativeExperts, add_rounding
from engine.kernels.lowering.buffers import Buffers
from engine.kernels.norms.norm import Norm, OverRanks
from engine.kernels.products.packing import PackedWeights
from engine.kernels.weights import (
    PackedDecoder,
    PackedInput,
    PackedKept,
    PackedLatents,
    PackedLayer,
    PackedMlp,
    PackedMoe,
)
from parallel.parts import parts_here

OPERATIONS_PER_LAYER = 55
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


class _Product(NamedTuple):
    """A product of rows and weights that is added to the stream."""

    into: torch.Tensor
    weights: PackedWeights | None
    width: int
    bias: torch.Tensor | None
    is_partial: bool
    row_factors: torch.Tensor | None = None
    """Logits [rows] in float32, whose sigmoids are factors on the result."""


def _factor(factor: float) -> float:
    """A factor as operations have it: 0 for none."""
    return 0.0 if factor == 1.0 else factor


def _behind_zeros(bias: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """A bias of the last outputs of a product, of which these many come before."""
    return None if bias is None else torch.cat([torch.zeros(count), bias])


def _with_latent_last(latents: Latents) -> torch.Tensor | None:
    """Biases of latents, those of what all keys share before those of the keys' latent."""
    if latents.bias is None:
        return None
    *before, kept = [each.size for each in latents.normed]
    parts = latents.bias.split([*before, kept, latents.num_shared])
    return torch.cat([*parts[:-2], parts[-1], parts[-2]])


LEAST_QUERIES = 8
"""Least queries of a task, where a KV head has more.

Fewer would go through its keys no faster.
"""


def _groups(attention: Attention) -> int:
    """Groups of the queries of a KV head, each of which is a task.

    A KV head of all queries would leave most threads without a task.
    """
    if not attention.keeps_latents:
        return 1
    return next(
        groups
        for groups in range(max(1, attention.heads // LEAST_QUERIES), 0, -1)
        if attention.heads % groups == 0
    )


@dataclass
class StepList:
    """The operations of a step, and where they are cut for an exchange through Python."""

    operations: Operations
    cuts: list[tuple[int, Layer | PartialSums | None]]
    """Ends of pieces, rising, and what comes after each.

    That is a layer with its experts, a sum over ranks, or, at the end of the list, nothing.
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
        factors: Mapping[QueryFactors, torch.Tensor],
    ) -> None:
        """``products``: of expert layers that the packed decoder leaves out. ``factors``: on queries.

        ``exchange``: None if there are no expert layers. ``sums``: over tensor-parallel ranks, None if there
        is one. ``ranks``: how many there are.
        """
        self._packed = packed
        self._hidden = packed.decoder.hidden
        self._products = products
        self._cache = cache
        self._buffers = buffers
        self._exchange = exchange
        self._sums, self._ranks, self._factors = sums, ranks, factors
        self._num_sums = 0
        """Sums written so far."""
        self._num_sparse = 0
        """Layers with experts whose exchange was written so far."""
        self._cuts: list[tuple[int, Layer | PartialSums | None]] = []
        self._list = Operations(OPERATIONS_PER_LAYER * len(packed.layers) + OTHER_OPERATIONS)
        self._stream, self._rows = buffers.stream, 0
        """What the layers add to, and the flag that says which rows it has."""

    def write(self, *, exchanges: bool) -> StepList:
        """Write the list, once; ``exchanges``: with the exchange of experts."""
        decoder, buffers = self._packed.decoder, self._buffers
        if decoder.embedding is not None:
            self._embed(decoder.embedding)
            if decoder.embedding.inputs is not None:
                self._make_inputs(decoder.embedding.inputs)
        for number, packed in enumerate(self._packed.layers):
            layer = packed.layer
            cut = isinstance(layer.mlp, Moe) and not exchanges
            into = self._norm(layer.norm, buffers.normed)
            self._project(packed, layer.attention, into)
            if number == len(self._packed.layers) - 1 and not cut and decoder.output is not None:
                self._select()
            exchange = None if cut else self._exchange
            seen = self._seen(packed, layer, exchange) if layer.is_parallel else None
            self._attention(number, packed, layer)
            if seen is None:
                seen = self._seen(packed, layer, exchange)
            if isinstance(packed.mlp, PackedMlp):
                self._mlp(packed.mlp, layer, seen)
            else:
                self._mixture(packed.mlp, layer, seen, exchange)
            if packed.input is not None:
                self._add_input(packed.input)
            if layer.stream_factor != 1.0:
                self._scale(layer.stream_factor)
        if self._num_sums == 1:
            self._meet(0, 0)  # or what was given for this step's sum could be gone before all have read it
        if decoder.output is not None:
            self._choose(decoder.output)
        return StepList(self._list, [*self._cuts, (len(self._list), None)])

    def _embed(self, embedding: Embedding) -> None:
        weights = {"into": embedding.weight.data, "k": self._hidden}
        weights["number"] = _factor(embedding.factor)
        if not embedding.is_partial:
            positions = None if embedding.positions is None else embedding.positions.data
            self._list.add(OperationKind.EMBED, out=self._buffers.stream, more=positions, **weights)
            return
        area = self._area()
        positions = embedding.positions if embedding.first == 0 else None
        self._list.add(
            OperationKind.EMBED,
            out=area.address,
            more=None if positions is None else positions.data,
            n=len(embedding.weight),
            a=embedding.first,
            flags=AS_FLOAT,
            **weights,
        )
        self._sum(area, None, 0, self._buffers.stream)

    def _choose(self, output: Output) -> None:
        """Logits of the selected rows, and the tokens that have the greatest."""
        buffers = self._buffers
        if not self._rows:
            self._select()
        self._norm(output.norm, buffers.last)
        self._list.add(
            OperationKind.LINEAR,
            into=self._rounded(buffers.last, self._packed.head, self._hidden),
            out=buffers.logits,
            weights=self._packed.head,
            more=output.bias,
            n=output.vocab,
            k=self._hidden,
            number=_factor(output.factor),
            flags=SELECTED | AS_FLOAT,
        )
        if output.cap:
            self._list.add(OperationKind.CAP, out=buffers.logits, n=output.vocab, number=output.cap)
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

    def _make_inputs(self, inputs: LayerInputs) -> None:
        """Inputs of all layers beside the stream, from what the embedding gives."""
        total = inputs.table.shape[1]
        self._list.add(
            OperationKind.LINEAR,
            into=self._rounded(self._buffers.stream, self._packed.inputs, self._hidden),
            out=self._buffers.inputs,
            weights=self._packed.inputs,
            n=total,
            k=self._hidden,
            number=_factor(inputs.projection_factor),
        )
        self._list.add(
            OperationKind.INPUTS,
            into=inputs.table.data,
            out=self._buffers.inputs,
            more=inputs.norm.weights,
            factors=inputs.factors,
            n=total,
            k=inputs.width,
            number=inputs.norm.eps,
        )

    def _add_input(self, packed: PackedInput) -> None:
        """Add what a layer makes of its input beside the stream."""
        buffers, own = self._buffers, packed.input
        self._list.add(
            OperationKind.LINEAR,
            into=self._rounded(self._stream, packed.gate, self._hidden),
            out=buffers.middle,
            weights=packed.gate,
            extra=own.activation.numbers,
            c=own.activation.kind,
            n=own.width,
            k=self._hidden,
            flags=self._rows,
        )
        begin = buffers.inputs.data_ptr() + own.place * own.width * buffers.inputs.element_size()
        self._list.add(
            OperationKind.TIMES, into=begin, out=buffers.middle, n=own.total, k=own.width, flags=self._rows
        )
        self._add_product(_Product(buffers.middle, packed.out, own.width, None, False), own.norm, 1.0)

    def _scale(self, factor: float) -> None:
        """Multiply the stream."""
        rows = {"into": self._stream, "out": self._stream}
        self._list.add(OperationKind.SCALE, k=self._hidden, number=factor, flags=self._rows, **rows)

    def _norm(self, norm: Norm | None, out: torch.Tensor | int) -> torch.Tensor | int:
        """Where the rows are that a part reads: ``out``, behind a norm, or the stream."""
        if norm is None:
            return self._stream
        self._normalise(norm, self._stream, out, self._hidden)
        return out

    def _normalise(
        self, norm: Norm, into: torch.Tensor | int, out: torch.Tensor | int, size: int, **more: Any
    ) -> None:
        flags = self._rows | (CENTRED if norm.is_centred else 0) | more.pop("flags", 0)
        self._list.add(
            OperationKind.NORM,
            into=into,
            out=out,
            more=norm.weights,
            k=size,
            number=norm.eps,
            flags=flags,
            **more,
        )

    def _project(self, packed: PackedLayer, attention: Attention, into: torch.Tensor | int) -> None:
        """Queries, keys and values."""
        if attention.latents is not None and packed.latents is not None:
            self._project_latents(packed.latents, attention, attention.latents, into)
            return
        if attention.latents is not None and packed.kept is not None:
            self._project_to_keep(packed.kept, attention, attention.latents, into)
            return
        projected = self._buffers.projected
        self._list.add(
            OperationKind.LINEAR,
            into=self._rounded(into, packed.qkv, self._hidden),
            out=projected,
            weights=packed.qkv,
            more=attention.qkv_bias,
            n=attention.projected_width,
            k=self._hidden,
        )
        if attention.wide_norms is not None:
            self._normalise_all_heads(attention, attention.wide_norms)

    def _normalise_all_heads(self, attention: Attention, norms: tuple[Norm, Norm]) -> None:
        """Norms over all queries together, and over all keys, maybe of several ranks."""
        projected, width = self._buffers.projected, attention.projected_width
        widths = [number * attention.dim for number in (attention.heads, attention.kv_heads)]
        begins = [projected.data_ptr(), projected.data_ptr() + widths[0] * projected.element_size()]
        over = [
            OverRanks(here, True) if norm.over is None else norm.over
            for norm, here in zip(norms, widths, strict=True)
        ]
        parts = [norm_parts(each.width, here) for each, here in zip(over, widths, strict=True)]
        if norms[0].over is None:
            for norm, begin, here, some in zip(norms, begins, widths, parts, strict=True):
                self._normalise(norm, begin, begin, here, n=width, width=width, b=some)
            return
        area = self._area()
        for number, (begin, here, some, each) in enumerate(zip(begins, widths, parts, over, strict=True)):
            self._list.add(
                OperationKind.SQUARES,
                into=begin,
                out=area.address,
                n=width,
                k=here,
                b=some,
                c=number,
                d=each.width if each.is_first else 0,
            )
        record = self._meet_for(area, len(norms))
        for number, (norm, begin, here, each) in enumerate(zip(norms, begins, widths, over, strict=True)):
            self._normalise(
                norm,
                begin,
                begin,
                here,
                n=width,
                width=width,
                extra=record,
                a=area.begin,
                c=number,
                d=each.width,
            )

    def _project_latents(
        self, packed: PackedLatents, attention: Attention, latents: Latents, into: torch.Tensor | int
    ) -> None:
        """Latents, then the heads that are made from them.

        In the row of a token are queries, latents, what all keys share, keys and values.
        """
        buffers, wide = self._buffers, attention.projected_width
        row, itemsize = buffers.projected.data_ptr(), buffers.projected.element_size()
        num_queries = attention.heads * attention.dim
        behind = num_queries + latents.width
        begin = num_queries if packed.queries is not None else 0
        self._list.add(
            OperationKind.LINEAR,
            into=self._rounded(into, packed.inward, self._hidden),
            out=row + begin * itemsize,
            weights=packed.inward,
            more=_behind_zeros(latents.bias, num_queries - begin),
            n=behind - begin,
            k=self._hidden,
            width=wide,
        )
        at = num_queries
        made = [(packed.expand, behind, wide - behind)]
        if packed.queries is not None:
            made.insert(0, (packed.queries, 0, num_queries))
        for latent, (weights, place, outputs) in zip(latents.normed, made, strict=True):
            self._normalise(latent.norm, row + at * itemsize, buffers.latent, latent.size, n=wide)
            self._list.add(
                OperationKind.LINEAR,
                into=self._rounded(buffers.latent, weights, latent.size),
                out=row + place * itemsize,
                weights=weights,
                n=outputs,
                k=latent.size,
                width=wide,
            )
            at += latent.size

    def _project_to_keep(
        self, packed: PackedKept, attention: Attention, latents: Latents, into: torch.Tensor | int
    ) -> None:
        """Queries that meet latents, what all keys share, and the latent of keys.

        They are in one row of a token. The latent of queries, if they have one, is behind them.
        """
        buffers, wide, cached = self._buffers, attention.projected_width, attention.cached
        row, itemsize = buffers.projected.data_ptr(), buffers.projected.element_size()
        begin, own = attention.heads * cached.key_dim, attention.dim - attention.shared
        self._list.add(
            OperationKind.LINEAR,
            into=self._rounded(into, packed.inward, self._hidden),
            out=row + begin * itemsize,
            weights=packed.inward,
            more=_with_latent_last(latents),
            n=latents.width,
            k=self._hidden,
            width=wide,
        )
        source, size = into, self._hidden
        if latents.queries is not None:
            source, size = buffers.latent, latents.queries.size
            self._normalise(latents.queries.norm, row + begin * itemsize, source, size, n=wide)
        self._list.add(
            OperationKind.LINEAR,
            into=self._rounded(source, packed.own, size),
            out=buffers.apart,
            weights=packed.own,
            n=attention.heads * own,
            k=size,
        )
        heads = {"groups": attention.heads, "step_out": cached.key_dim, "width": wide}
        self._list.add(
            OperationKind.LINEAR,
            into=self._rounded(source, packed.shared, size),
            out=row,
            weights=packed.shared,
            n=attention.shared,
            k=size,
            **heads,
        )
        self._list.add(
            OperationKind.LINEAR,
            into=buffers.apart,
            out=row + attention.shared * itemsize,
            weights=packed.to_latent,
            n=cached.value_dim,
            k=own,
            step_in=own,
            **heads,
        )
        kept = row + (wide - cached.value_dim) * itemsize
        self._normalise(latents.keys.norm, kept, kept, cached.value_dim, n=wide, width=wide)

    def _attention(self, number: int, packed: PackedLayer, layer: Layer) -> None:
        buffers, attention, norms = self._buffers, layer.attention, layer.attention.head_norms
        stored = number if attention.source is None else attention.source
        keys, values = self._cache.keys[stored], self._cache.values[stored]
        alone = 0 if attention.source is None else QUERIES_ONLY
        within = WITHIN if attention.keeps_latents else 0
        cached, groups = attention.cached, _groups(attention)
        shape = {
            "a": attention.heads,
            "c": cached.key_dim,
            "d": attention.window,
            "n": cached.value_dim,
            "scales": self._cache.scales[stored],
            "codes": self._cache.codes,
            "width": attention.projected_width,
        }
        centred = CENTRED if norms is not None and norms.is_centred else 0
        of_values = attention.value_norm
        self._list.add(
            OperationKind.QKV,
            into=buffers.projected,
            out=values,
            extra=keys,
            more=None if norms is None else norms.weights,
            number=0.0 if norms is None else norms.eps,
            factors=None if of_values is None else of_values.weights,
            cap=0.0 if of_values is None else of_values.eps,
            k=0 if attention.rotary is None else attention.rotary + 1,
            flags=centred | (NORM_LAST if attention.is_norm_last else 0) | within | alone,
            shared=0 if attention.keeps_latents else attention.shared,
            b=cached.kv_heads,
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
            factors=None if attention.factors is None else self._factors[attention.factors],
            flags=self._rows | alone | within,
            b=cached.kv_heads * groups,
            groups=groups,
            **shape,
        )
        attended = buffers.attended
        if packed.kept is not None:
            attended = buffers.apart
            self._list.add(
                OperationKind.LINEAR,
                into=buffers.attended,
                out=attended,
                weights=packed.kept.from_latent,
                n=attention.value_dim,
                k=cached.value_dim,
                groups=attention.heads,
                step_in=cached.value_dim,
                step_out=attention.value_dim,
                flags=self._rows,
            )
        product = _Product(
            attended,
            packed.out,
            attention.width,
            attention.out_bias,
            attention.is_partial,
        )
        self._add_product(product, layer.last_norm, layer.factor)

    def _mlp(
        self,
        packed: PackedMlp,
        layer: Layer,
        into: torch.Tensor | int,
        row_factors: torch.Tensor | None = None,
    ) -> None:
        """An MLP on some rows; ``row_factors``: see :class:`_Product`."""
        self._add_product(self._middle(packed, into, row_factors), layer.mlp_last_norm, layer.factor)

    def _middle(
        self, packed: PackedMlp, into: torch.Tensor | int, row_factors: torch.Tensor | None = None
    ) -> _Product:
        """An MLP up to its last product, which is returned."""
        buffers, mlp, activation = self._buffers, packed.mlp, packed.mlp.activation
        into = self._rounded(into, packed.inward, self._hidden)
        shape = {"into": into, "out": buffers.middle, "n": mlp.width, "k": self._hidden, "flags": self._rows}
        if mlp.gate is not None:
            self._list.add(
                OperationKind.GATED, weights=packed.inward, more=mlp.bias, a=activation.kind, **shape
            )
        else:
            self._list.add(
                OperationKind.LINEAR,
                weights=packed.inward,
                more=mlp.bias,
                extra=activation.numbers,
                c=activation.kind,
                **shape,
            )
        return _Product(buffers.middle, packed.down, mlp.width, mlp.down_bias, mlp.is_partial, row_factors)

    def _add_product(self, product: _Product, norm: Norm | None, factor: float) -> None:
        """Multiply rows by weights and add the result, behind its norm, to the stream."""
        if norm is None:
            return self._multiply(product, self._stream, ADD, factor)
        if factor != 1.0:
            raise NotUsual("a factor on what a norm gives")
        self._multiply(product, self._buffers.branch)
        self._normalise(norm, self._buffers.branch, self._stream, self._hidden, flags=ADD)

    def _multiply(self, product: _Product, out: torch.Tensor, flags: int = 0, factor: float = 1.0) -> None:
        """Multiply rows by weights; a partial sum is added over all ranks first."""
        parts = parts_here(product.width, self._ranks if product.is_partial else 1)
        into = self._rounded(product.into, product.weights, product.width)
        fields = {"into": into, "weights": product.weights, "n": self._hidden, "k": product.width}
        to: dict[str, Any] = {"out": out, "number": _factor(factor), "factors": product.row_factors}
        if product.is_partial:
            area = self._area()
            self._list.add(
                OperationKind.LINEAR, out=area.address, flags=self._rows | AS_FLOAT, b=parts, **fields
            )
            self._sum(area, product.bias, flags, **to)
        else:
            self._list.add(
                OperationKind.LINEAR, more=product.bias, flags=self._rows | flags, b=parts, **fields, **to
            )

    def _rounded(self, into: Any, weights: PackedWeights | None, width: int) -> Any:
        """Where a product finds its rows: rounded to 8 bits, if its weights want that."""
        return add_rounding(self._list, weights, into, self._buffers.rounded, width, flags=self._rows)

    def _area(self) -> Area:
        """Area of the next sum."""
        assert self._sums is not None
        self._num_sums += 1
        return self._sums.area(self._num_sums - 1, self._packed.decoder.num_sums)

    def _sum(
        self,
        area: Area,
        bias: torch.Tensor | None,
        flags: int,
        out: torch.Tensor,
        number: float = 0.0,
        factors: torch.Tensor | None = None,
    ) -> None:
        """Write or add what all ranks have given."""
        record = self._meet_for(area, self._hidden)
        self._list.add(
            OperationKind.SUM,
            out=out,
            more=bias,
            extra=record,
            factors=factors,
            n=self._hidden,
            a=area.begin,
            number=number,
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

    def _seen(self, packed: PackedLayer, layer: Layer, exchange: Exchange | None) -> torch.Tensor | int:
        """Where the rows are that the MLP or the mixture reads.

        Those of a mixture lie where they are exchanged.
        """
        norm, normed = layer.second_norm, self._buffers.normed
        if isinstance(packed.mlp, PackedMlp):
            return self._norm(norm, normed)
        moe = packed.mlp.moe
        if moe.norms is not None:
            norm = moe.norms.experts
        rows = normed if exchange is None else exchange.own + exchange.layout.rows_at
        if self._norm(norm, rows) is self._stream:
            self._list.add(OperationKind.SCALE, into=self._stream, out=rows, k=self._hidden, flags=self._rows)
        return rows

    def _shared(
        self, packed: PackedMoe, rows: torch.Tensor | int, to: torch.Tensor, flags: int, factor: float
    ) -> None:
        """What the expert of all tokens gives."""
        assert packed.shared is not None
        logits = None
        if packed.shared_gate is not None:
            if not flags & ADD:
                raise NotUsual("a gate on what a norm is given with other experts' results")
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
        self._multiply(self._middle(packed.shared, rows, logits), to, flags, factor)

    def _mixture(
        self, packed: PackedMoe, layer: Layer, rows: torch.Tensor | int, exchange: Exchange | None
    ) -> None:
        """A mixture of these rows; without an ``exchange`` the list is cut at its experts."""
        buffers, norms = self._buffers, packed.moe.norms
        to, flags = (self._stream, ADD) if layer.mlp_last_norm is None else (buffers.mixed, 0)
        if to is not self._stream and layer.factor != 1.0:
            raise NotUsual("a factor on what a norm gives")
        ids = buffers.ids if exchange is None else exchange.own + exchange.layout.ids_at
        if norms is not None:
            self._mlp_beside(packed, layer, norms)
        self._router(packed, rows if norms is None else self._norm(norms.router, buffers.mixed), ids)
        if exchange is None:
            if packed.shared is not None and norms is None:
                self._shared(packed, rows, to, flags, layer.factor)
            self._cuts.append((len(self._list), layer))
        else:
            self._experts(packed, layer, exchange, to, flags)
        if norms is not None:
            self._normalise(norms.experts_last, buffers.mixed, buffers.branch, self._hidden, flags=ADD)
        if layer.mlp_last_norm is not None:
            added = buffers.mixed if norms is None else buffers.branch
            self._normalise(layer.mlp_last_norm, added, self._stream, self._hidden, flags=ADD)

    def _mlp_beside(self, packed: PackedMoe, layer: Layer, norms: MoeNorms) -> None:
        """What the MLP beside a mixture gives, behind its norm."""
        assert packed.shared is not None
        into, branch = self._norm(layer.second_norm, self._buffers.mixed), self._buffers.branch
        self._multiply(self._middle(packed.shared, into), branch)
        self._normalise(norms.shared_last, branch, branch, self._hidden)

    def _experts(
        self, packed: PackedMoe, layer: Layer, exchange: Exchange, to: torch.Tensor, flags: int
    ) -> None:
        """The experts' results, summed up in ``to``."""
        buffers, moe, alone = self._buffers, packed.moe, isinstance(exchange, Alone)
        record = exchange.of_layer(self._num_sparse)
        self._num_sparse += 1
        if not alone:
            self._list.add(OperationKind.OFFER, extra=record, flags=self._rows)
        if packed.shared is not None and moe.norms is None:  # while the others' rows come
            self._shared(packed, exchange.own + exchange.layout.rows_at, to, flags, layer.factor)
            flags = ADD
        area = self._area() if moe.is_partial else None
        if isinstance(exchange, Linked):  # what is here first, the others' rows when they have come
            self._list.add(OperationKind.LOOK, extra=record, flags=self._rows)
            self._products_of(packed, exchange, record, area, number=1)
        if not alone:
            self._list.add(OperationKind.MEET, extra=record)
        self._products_of(packed, exchange, record, area, number=2 if isinstance(exchange, Linked) else 0)
        if not alone:
            self._list.add(OperationKind.HOME, extra=record)
        self._list.add(
            OperationKind.COMBINE,
            into=buffers.scores,
            out=to,
            extra=record,
            n=self._hidden,
            k=moe.top_k,
            number=_factor(layer.factor),
            flags=self._rows | flags,
            **({} if area is None else self._of_ranks(area, moe)),
        )

    def _products_of(
        self,
        packed: PackedMoe,
        exchange: Exchange,
        record: np.ndarray[Any, Any],
        area: Area | None,
        number: int,
    ) -> None:
        """Results of the experts here; ``record``: of the layer, ``number``: see SORT."""
        buffers, moe = self._buffers, packed.moe
        experts = packed.experts or self._products.packed(moe.experts)
        results = exchange.own + exchange.layout.results_at if area is None else area.address
        self._list.add(OperationKind.SORT, extra=record, a=number, flags=self._rows)
        self._list.add(OperationKind.GATHER, extra=record)
        begins, first = exchange.begins, moe.first_whole
        if area is not None and first is not None:  # all rows have a place, and others' experts give 0
            begins = begins[first : first + experts.count + 1]
            fields = {"extra": exchange.begins, "a": first, "b": first + experts.count, "c": moe.num_experts}
            self._list.add(OperationKind.CLEAR, out=results, n=self._hidden, **fields)
        experts.write(
            self._list,
            buffers.gathered,
            buffers.expert_middle,
            results,
            begins,
            self._ranks if moe.is_partial and first is None else 1,
            as_float=moe.is_partial,
            rounded=buffers.rounded,
        )
        if not isinstance(exchange, Alone):
            self._list.add(OperationKind.RETURN, extra=record, a=number)

    def _of_ranks(self, area: Area, moe: Moe) -> dict[str, Any]:
        """Where the ranks' parts of the experts' results are, once they are there."""
        return {"more": self._meet_for(area, self._hidden * moe.top_k), "a": area.begin}
