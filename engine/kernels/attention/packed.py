"""Attention in a step: its weights laid out, and the operations that it writes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from engine.kernels.adapters.sites import Site
from engine.kernels.attention.attention import APART, ATTENDED, LATENT, PROJECTED, Attention
from engine.kernels.attention.latent import Latents
from engine.kernels.core.operations import CENTRED, NORM_LAST, QUERIES_ONLY, SEES_ALL, WITHIN, OperationKind
from engine.kernels.exchange.sums import norm_parts
from engine.kernels.lowering.parts import KeptNumbers, Packing
from engine.kernels.lowering.product import Product, Rows
from engine.kernels.lowering.writer import Writer
from engine.kernels.norms.norm import Norm, OverRanks
from engine.kernels.products.activations import ActivationKind
from engine.kernels.products.packing import PackedWeights
from engine.model.quantization.attached import in_a_row, rows_of
from parallel.parts import parts_here

LEAST_QUERIES = 8
"""Least queries of a task, where a KV head has more.

Fewer would go through its keys no faster.
"""


class _Projection(Protocol):
    """Contract of an attention layer's projections, before and behind its heads."""

    def project(self, writer: Writer, into: Rows) -> None:
        """Write queries, keys and values, or what is cached instead."""

    def values(self, writer: Writer, attended: torch.Tensor) -> torch.Tensor:
        """Write operations that turn sums over the cache into values; returns their rows."""


class PackedAttention:
    """Attention in a step: its weights laid out, and the operations that it writes."""

    def __init__(self, attention: Attention, packing: Packing) -> None:
        self.attention = attention
        self.projection: _Projection
        if attention.latents is None:
            self.projection = PackedHeads(attention, packing)
        elif attention.keeps_latents:
            self.projection = PackedKept(attention, attention.latents, packing)
        else:
            self.projection = PackedLatents(attention, attention.latents, packing)
        parts = parts_here(attention.width, packing.ranks if attention.is_partial else 1)
        self.out = packing.packer.panels(attention.out, multiple=32, parts=parts)
        self.site = packing.site(_site_behind(attention))

    def project(self, writer: Writer, into: Rows, kept: KeptNumbers) -> None:
        """Write queries, keys and values."""
        self.projection.project(writer, into)

    def mix(self, writer: Writer, kept: KeptNumbers) -> Product:
        """Write the cache's new entries, and attention up to its last product."""
        buffers, attention, norms = writer.buffers, self.attention, self.attention.head_norms
        stored = kept.cache if attention.source is None else attention.source
        keys, values = writer.cache.keys[stored], writer.cache.values[stored]
        alone = 0 if attention.source is None else QUERIES_ONLY
        within = WITHIN if attention.keeps_latents else 0
        cached, groups = attention.cached, _groups(attention)
        shape = {
            "a": attention.heads,
            "c": cached.key_dim,
            "d": attention.window,
            "n": cached.value_dim,
            "scales": writer.cache.scales[stored],
            "codes": writer.cache.codes,
            "width": attention.projected_width,
        }
        centred = CENTRED if norms is not None and norms.is_centred else 0
        of_values = attention.value_norm
        writer.add(
            OperationKind.QKV,
            into=buffers[PROJECTED],
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
        writer.add(
            OperationKind.ATTEND,
            into=buffers[PROJECTED],
            out=buffers[ATTENDED],
            weights=values,
            extra=keys,
            more=attention.sinks,
            number=attention.scale,
            cap=attention.cap,
            factors=None if attention.factors is None else writer.facts.tables[attention.factors],
            flags=writer.rows | alone | within | (SEES_ALL if attention.sees_all else 0),
            b=cached.kv_heads * groups,
            groups=groups,
            **shape,
        )
        given = self.projection.values(writer, buffers[ATTENDED])
        product = Product(given, self.out, attention.width, attention.out_bias, attention.is_partial)
        return product._replace(site=self.site)


class PackedHeads:
    """Projections from the hidden numbers to queries, keys and values."""

    def __init__(self, attention: Attention, packing: Packing) -> None:
        self._attention = attention
        self.qkv = packing.packer.panels(*_projections(attention), multiple=32)
        self.site = packing.site(_site_before(attention))

    def project(self, writer: Writer, into: Rows) -> None:
        """Write queries, keys and values."""
        attention = self._attention
        added = writer.adapted(self.site, into)
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(into, self.qkv, writer.hidden),
            added=added,
            out=writer.buffers[PROJECTED],
            weights=self.qkv,
            more=attention.qkv_bias,
            n=attention.projected_width,
            k=writer.hidden,
        )
        if attention.wide_norms is not None:
            self._normalise_all_heads(writer, attention.wide_norms)

    def values(self, writer: Writer, attended: torch.Tensor) -> torch.Tensor:
        """The sums over the cache, which are values already, behind their gates."""
        attention, projected = self._attention, writer.buffers[PROJECTED]
        if attention.gates_width:
            writer.add(
                OperationKind.TIMES,
                into=projected.data_ptr() + attention.heads * attention.dim * projected.element_size(),
                out=attended,
                a=ActivationKind.SIGMOID,
                n=attention.projected_width,
                k=attention.gates_width,
                flags=writer.rows,
            )
        return attended

    def _normalise_all_heads(self, writer: Writer, norms: tuple[Norm, Norm]) -> None:
        """Norms over all queries together, and over all keys, maybe of several ranks."""
        attention, projected = self._attention, writer.buffers[PROJECTED]
        width = attention.projected_width
        widths = [number * attention.dim for number in (attention.heads, attention.kv_heads)]
        begins = [projected.data_ptr(), projected.data_ptr() + widths[0] * projected.element_size()]
        over = [
            OverRanks(here, True) if norm.over is None else norm.over
            for norm, here in zip(norms, widths, strict=True)
        ]
        parts = [norm_parts(each.width, here) for each, here in zip(over, widths, strict=True)]
        if norms[0].over is None:
            for norm, begin, here, some in zip(norms, begins, widths, parts, strict=True):
                writer.normalise(norm, begin, begin, here, n=width, width=width, b=some)
            return
        area = writer.area()
        for number, (begin, here, some, each) in enumerate(zip(begins, widths, parts, over, strict=True)):
            writer.add(
                OperationKind.SQUARES,
                into=begin,
                out=area.address,
                n=width,
                k=here,
                b=some,
                c=number,
                d=each.width if each.is_first else 0,
            )
        record = writer.meet_for(area, len(norms))
        for number, (norm, begin, here, each) in enumerate(zip(norms, begins, widths, over, strict=True)):
            sums = {"extra": record, "a": area.begin, "c": number, "d": each.width}
            writer.normalise(norm, begin, begin, here, n=width, width=width, **sums)


class PackedLatents:
    """Projections to latents, then from latents to heads."""

    def __init__(self, attention: Attention, latents: Latents, packing: Packing) -> None:
        packer = packing.packer
        self._attention, self._latents = attention, latents
        queries, (kept, shared) = _ordered(attention.qkv[0], attention), _kept_and_shared(attention, latents)
        before = queries
        self.queries: PackedWeights | None = None
        """Weights from latents to queries; None where queries are made with the latents."""
        if latents.queries is not None:
            before = latents.queries.weight
            self.queries = packer.panels(queries, multiple=32)
        self.inward = packer.panels(in_a_row([before, kept, shared]), multiple=32)
        """Weights from the hidden numbers to latents, and to queries without one."""
        self.expand = packer.panels(in_a_row(_keys_and_values(attention, latents)), multiple=32)
        """Weights from a latent to keys and values."""

    def project(self, writer: Writer, into: Rows) -> None:
        """Write latents, then the heads that are made from them.

        In the row of a token are queries, latents, what all keys share, keys and values.
        """
        attention, latents = self._attention, self._latents
        projected, latent_rows, wide = (
            writer.buffers[PROJECTED],
            writer.buffers[LATENT],
            attention.projected_width,
        )
        row, itemsize = projected.data_ptr(), projected.element_size()
        num_queries = attention.heads * attention.dim
        behind = num_queries + latents.width
        begin = num_queries if self.queries is not None else 0
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(into, self.inward, writer.hidden),
            out=row + begin * itemsize,
            weights=self.inward,
            more=_behind_zeros(latents.bias, num_queries - begin),
            n=behind - begin,
            k=writer.hidden,
            width=wide,
        )
        at = num_queries
        made = [(self.expand, behind, wide - behind)]
        if self.queries is not None:
            made.insert(0, (self.queries, 0, num_queries))
        for latent, (weights, place, outputs) in zip(latents.normed, made, strict=True):
            writer.normalise(latent.norm, row + at * itemsize, latent_rows, latent.size, n=wide)
            writer.add(
                OperationKind.LINEAR,
                into=writer.rounded(latent_rows, weights, latent.size),
                out=row + place * itemsize,
                weights=weights,
                n=outputs,
                k=latent.size,
                width=wide,
            )
            at += latent.size

    def values(self, writer: Writer, attended: torch.Tensor) -> torch.Tensor:
        """The sums over the cache, which are values already."""
        return attended


class PackedKept:
    """Projections of latent attention that caches latents instead of keys and values."""

    def __init__(self, attention: Attention, latents: Latents, packing: Packing) -> None:
        packer = packing.packer
        self._attention, self._latents = attention, latents
        (query,), (kept, shared) = attention.qkv, _kept_and_shared(attention, latents)
        before = [] if latents.queries is None else [latents.queries.weight]
        self.inward = packer.panels(in_a_row([*before, shared, kept]), multiple=32)
        """Weights to the latents of queries and keys, and to shared key numbers."""
        assert attention.places is not None
        first, last = attention.places.split([attention.shared, attention.dim - attention.shared])
        self.shared = packer.panels(_of_each_head(query, attention.dim, first), multiple=32)
        """Weights of each query's numbers that meet the shared key numbers."""
        self.own = packer.panels(_of_each_head(query, attention.dim, last), multiple=32)
        """Weights of each query's numbers that meet a key's own numbers."""
        keys, values = _keys_and_values(attention, latents)
        by_head = keys.unflatten(0, (attention.heads, -1))
        self.to_latent = packer.panels(by_head.mT.flatten(0, 1), multiple=32)
        """Weights [heads * latent, own] that make queries of keys into queries of latents.

        Its inputs are outputs of the model's matrix, whose codes have other groups: it has none.
        """
        self.from_latent = packer.panels(values, multiple=32)
        """Weights [heads * value_dim, latent] from a sum of latents to values."""

    def project(self, writer: Writer, into: Rows) -> None:
        """Write queries that meet latents, what all keys share, and the latent of keys.

        They are in one row of a token. The latent of queries, if they have one, is behind them.
        """
        attention, latents, buffers = self._attention, self._latents, writer.buffers
        wide, cached, apart = attention.projected_width, attention.cached, buffers[APART]
        row, itemsize = buffers[PROJECTED].data_ptr(), buffers[PROJECTED].element_size()
        begin, own = attention.heads * cached.key_dim, attention.dim - attention.shared
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(into, self.inward, writer.hidden),
            out=row + begin * itemsize,
            weights=self.inward,
            more=_with_latent_last(latents),
            n=latents.width,
            k=writer.hidden,
            width=wide,
        )
        source, size = into, writer.hidden
        if latents.queries is not None:
            source, size = buffers[LATENT], latents.queries.size
            writer.normalise(latents.queries.norm, row + begin * itemsize, source, size, n=wide)
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(source, self.own, size),
            out=apart,
            weights=self.own,
            n=attention.heads * own,
            k=size,
        )
        heads = {"groups": attention.heads, "step_out": cached.key_dim, "width": wide}
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(source, self.shared, size),
            out=row,
            weights=self.shared,
            n=attention.shared,
            k=size,
            **heads,
        )
        writer.add(
            OperationKind.LINEAR,
            into=apart,
            out=row + attention.shared * itemsize,
            weights=self.to_latent,
            n=cached.value_dim,
            k=own,
            step_in=own,
            **heads,
        )
        kept = row + (wide - cached.value_dim) * itemsize
        writer.normalise(latents.keys.norm, kept, kept, cached.value_dim, n=wide, width=wide)

    def values(self, writer: Writer, attended: torch.Tensor) -> torch.Tensor:
        """Write operations that turn sums of latents into values; returns their rows."""
        attention, latent, apart = self._attention, self._attention.cached.value_dim, writer.buffers[APART]
        writer.add(
            OperationKind.LINEAR,
            into=attended,
            out=apart,
            weights=self.from_latent,
            n=attention.value_dim,
            k=latent,
            groups=attention.heads,
            step_in=latent,
            step_out=attention.value_dim,
            flags=writer.rows,
        )
        return apart


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


def _behind_zeros(bias: torch.Tensor | None, count: int) -> torch.Tensor | None:
    """A bias behind ``count`` zeros, for outputs that have none."""
    return None if bias is None else torch.cat([torch.zeros(count), bias])


def _with_latent_last(latents: Latents) -> torch.Tensor | None:
    """Biases of latents, those of what all keys share before those of the keys' latent."""
    if latents.bias is None:
        return None
    *before, kept = [each.size for each in latents.normed]
    parts = latents.bias.split([*before, kept, latents.num_shared])
    return torch.cat([*parts[:-2], parts[-1], parts[-2]])


def _kept_and_shared(attention: Attention, latents: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of the latent of keys, and of what they share, in computed order."""
    assert attention.places is not None
    size, weight = latents.keys.size, latents.keys.weight
    places = attention.places[: latents.num_shared] - (attention.dim - latents.num_shared)
    return rows_of(weight, slice(0, size)), rows_of(weight, size + places)


def _keys_and_values(attention: Attention, latents: Latents) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights that make the keys' own numbers of a latent, and those that make values."""
    own, value_dim = attention.dim - attention.shared, attention.value_dim
    places = torch.arange(own + value_dim).split([own, value_dim])
    keys, values = (_of_each_head(latents.expand, own + value_dim, each) for each in places)
    return keys, values


def _projections(attention: Attention) -> list[torch.Tensor]:
    """Weights of queries, gates, keys and values, their heads in the order of computation."""
    (queries, *keys), values = attention.qkv[:2], attention.qkv[2:]
    places, gates = attention.places, []
    if attention.has_gates:
        both, every = 2 * attention.dim, torch.arange(attention.dim)
        gates = [_of_each_head(queries, both, attention.dim + every)]
        queries = _of_each_head(queries, both, every if places is None else places)
    elif places is not None:
        queries = _ordered(queries, attention)
    if attention.head_gates is not None:  # as many as a head has results
        number = torch.arange(attention.heads).repeat_interleave(attention.value_dim)
        gates = [rows_of(attention.head_gates, number)]
    if places is not None:
        keys = [_ordered(weight, attention) for weight in keys]
    return [queries, *gates, *keys, *values]


def _ordered(weight: torch.Tensor, attention: Attention) -> torch.Tensor:
    """Weights of heads in the order of computation."""
    assert attention.places is not None
    return _of_each_head(weight, attention.dim, attention.places)


def _of_each_head(weight: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """Chosen outputs of each head of ``dim`` outputs, in the given order."""
    return rows_of(weight, (torch.arange(0, len(weight), dim)[:, None] + places).flatten())


def _site_before(attention: Attention) -> Site | None:
    """Adapters of queries, keys and values; None where other layers give part of them."""
    *modules, _ = attention.modules or (None,)
    if not modules or attention.head_gates is not None:
        return None
    weights = attention.qkv[: len(modules)] if len(modules) > 1 else attention.qkv
    firsts = list(accumulate(map(len, weights), initial=0))
    numbers = [torch.arange(*each) for each in pairwise(firsts)]
    numbers += numbers[-1:] * (len(attention.qkv) - len(numbers))  # keys that are values, too
    order = torch.cat(_projections(replace(attention, qkv=tuple(each[:, None] for each in numbers))))[:, 0]
    sizes = tuple(map(len, weights)) if len(modules) > 1 else (firsts[-1],)
    is_plain = torch.equal(order, torch.arange(sum(sizes)))
    return Site(tuple(modules), sizes, weights[0].shape[1], None if is_plain else order)


def _site_behind(attention: Attention) -> Site | None:
    """Adapters of the last product."""
    if not attention.modules:
        return None
    return Site(attention.modules[-1:], (attention.out.shape[0],), attention.width)
