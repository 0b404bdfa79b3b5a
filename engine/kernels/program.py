"""A decoder as a list of operations for ``step.cpp``, written once, run every step.

The layers' weights are laid out anew; the model that they came from is not run any more. Where experts are
spread over instances that share memory, the exchange is part of the list (:mod:`engine.kernels.exchange`).
Over other transports the list is cut at each expert layer, and
:class:`~parallel.expert_parallel.ExpertParallel` does the exchange between two pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.base import AttentionUse, Int64s, PackedRows
from engine.kernels import operations
from engine.kernels.cache import NativeCache, NativePlan
from engine.kernels.decoder import Attention, Decoder, Layer, Mlp, Moe
from engine.kernels.exchange import Alone, Exchange, Joined, Shape
from engine.kernels.experts import NativeExperts, PackedExperts
from engine.kernels.library import Library
from engine.kernels.operations import ADD, AS_FLOAT, SELECTED, Kind, Operations, StepArguments
from engine.kernels.packing import SLACK, gate_and_up, panels
from parallel.communicators.base import Communicator
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.expert_parallel import ExpertParallel
from parallel.placement import Placement

MIN_TOKENS = 64
"""Room that is made at first; it doubles as steps grow."""
MIN_POSITIONS = 1024
OPERATIONS_PER_LAYER = 18

Seconds = npt.NDArray[np.float64]
_Mlp = TypeVar("_Mlp", Mlp, Moe)


class _Weights:
    """A layer's weights as the kernels want them."""

    def __init__(self, layer: Layer, *, spread: bool) -> None:
        attention = layer.attention
        self.layer = layer
        self.qkv = panels(attention.qkv.data, 32)
        self.out = panels(attention.out.data, 32)
        self.gate_up = self.down = self.router = None
        self.experts: PackedExperts | None = None
        if isinstance(layer.mlp, Mlp):
            self.gate_up, self.down = gate_and_up(layer.mlp.gate_up.data), panels(layer.mlp.down.data, 32)
        else:
            self.router = panels(layer.mlp.router.data, 32)
            if not spread:
                module = layer.mlp.experts
                self.experts = PackedExperts.of(module.gate_up_proj.data, module.down_proj.data)


@dataclass
class _List:
    """The operations of a step, and where they are cut for an exchange through Python."""

    operations: Operations
    cuts: list[tuple[int, Moe | None]]


class Program:
    """Runs the steps of one model on the CPU. Not more than one at a time."""

    def __init__(self, library: Library, decoder: Decoder, experts: ExpertParallel | None = None) -> None:
        operations.check(library)
        self._library = library
        self._decoder = decoder
        self._experts = experts
        self._products = NativeExperts(library)
        self._weights = [_Weights(layer, spread=experts is not None) for layer in decoder.layers]
        self._head = panels(decoder.head.data, 32)
        self._cosines = self._sines = torch.empty(0, 0)
        self._cache: NativeCache | None = None
        self._room = self._total_room = 0
        self._selected_room = 0
        sparse = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, Moe)]
        self._num_sparse = len(sparse)
        self._shape: Shape | None = None
        if sparse:
            self._shape = Shape(decoder.hidden, sparse[0].top_k, sparse[0].num_experts, decoder.dtype)
        self._joined: Joined | None = None
        self._lists: dict[bool, _List] = {}
        """By whether the exchange is part of it."""
        self.seconds = np.zeros(len(Kind))
        """Time spent so far, by kind of operation."""
        self.attention = AttentionUse()
        """What attention has cost so far."""

    def __repr__(self) -> str:
        return f"Program({len(self._weights)} layers, {self._decoder.dtype}, room for {self._room} tokens)"

    def let_go(self) -> None:
        """Empty the weights as they came; those laid out here are used."""
        for weights in self._weights:
            attention, mlp = weights.layer.attention, weights.layer.mlp
            for weight in (
                attention.qkv,
                attention.out,
                *((mlp.gate_up, mlp.down) if isinstance(mlp, Mlp) else ()),
            ):
                weight.data = weight.data.new_empty(0)

    def use(self, cache: NativeCache) -> None:
        """Keep keys and values there from now on."""
        self._cache, self._room = cache, 0

    def spread(self) -> None:
        """Other instances hold experts, too; what is not exchanged here is computed with these kernels."""
        assert self._experts is not None
        self._experts.use_products(self._products)

    def join(self, group: Communicator, placement: Placement) -> None:
        """From the next step on, experts are spread over this group; the modules hold this member's."""
        self._joined, self._room = None, 0
        self._lists.clear()
        if isinstance(group, SharedMemoryCommunicator) and self._shape is not None:
            assert self._experts is not None
            self._joined = Joined(
                self._library,
                group,
                placement,
                self._shape,
                self._num_sparse,
                self._experts.tokens_per_expert,
            )

    def serve(self) -> bool:
        """Take part in a step of the group without rows; False if the exchange is not ours to do.

        Raises:
            parallel.communicators.base.CollectiveError: a peer is lost.
        """
        if not self._exchanges():
            return False
        self._make_room(0, 0, self._total(0))
        self._run(StepArguments(seconds=self.seconds), 0)
        return True

    def forward(self, packed: PackedRows, input_ids: Int64s, wanted: Int64s) -> torch.Tensor:
        """Logits [wanted, vocabulary] in float32. They are valid until the next call."""
        assert self._cache is not None
        plan = self._cache.plan(packed)
        tokens, selected = len(input_ids), len(wanted)
        self._make_room(tokens, selected, self._total(tokens))
        cosines, sines = self._angles(packed.positions)
        step = self._arguments(plan, packed, input_ids, np.ascontiguousarray(wanted), cosines, sines)
        self._run(step, tokens)
        self.attention.calls += len(self._weights)
        self.attention.seconds = float(self.seconds[Kind.QKV] + self.seconds[Kind.ATTEND])
        return self._logits[:selected]

    def _exchanges(self) -> bool:
        """Whether the exchange of this step is part of the list."""
        if self._experts is None:
            return self._shape is not None
        return self._joined is not None and self._joined.can(self._experts.sizes)

    def _total(self, tokens: int) -> int:
        """Rows of this step over all members."""
        return tokens if self._experts is None or not self._exchanges() else sum(self._experts.sizes)

    def _run(self, step: StepArguments, tokens: int) -> None:
        native = self._exchanges()
        written = self._lists.get(native)
        if written is None:
            written = self._lists[native] = self._write(native)
        sizes = [tokens] if self._experts is None else self._experts.sizes
        if native:
            self._exchange.begin(sizes)
        before = self.seconds.copy() if native and self._experts is not None else None
        begin = 0
        for end, layer in written.cuts:
            done = written.operations.run(self._library, step, self._decoder.dtype, begin, end)
            if not done:
                assert self._joined is not None
                raise self._joined.fail()
            if layer is not None:
                self._exchange_through_python(layer, tokens)
            begin = end
        if before is not None:
            self._note(self.seconds - before)

    def _note(self, spent: Seconds) -> None:
        """What a step's expert layers took, by part, the way other transports tell it."""
        assert self._experts is not None
        times = self._experts.times
        times.dispatch += float(spent[[Kind.ROUTE, Kind.OFFER, Kind.MEET, Kind.SORT]].sum())
        times.experts += float(spent[[Kind.EXPERTS_UP, Kind.EXPERTS_DOWN]].sum())
        times.combine += float(spent[[Kind.RETURN, Kind.HOME, Kind.COMBINE]].sum())

    def _arguments(
        self,
        plan: NativePlan,
        packed: PackedRows,
        input_ids: Int64s,
        wanted: Int64s,
        cosines: torch.Tensor,
        sines: torch.Tensor,
    ) -> StepArguments:
        assert self._cache is not None
        return StepArguments(
            tokens=len(input_ids),
            selected=len(wanted),
            num_tasks=len(plan.tasks),
            table_width=plan.tables.shape[1],
            block_size=self._cache.block_size,
            ids=input_ids,
            slots=plan.slots,
            chosen=wanted,
            cosines=cosines,
            sines=sines,
            starts=packed.starts,
            counts=packed.counts,
            offsets=plan.offsets,
            tables=plan.tables,
            tasks=plan.tasks,
            seconds=self.seconds,
        )

    def _angles(self, positions: Int64s) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines [tokens, dim / 2] of the positions, from the model's own rotary embedding."""
        longest = int(positions.max()) + 1
        if longest > len(self._cosines):
            ids = torch.arange(max(MIN_POSITIONS, 1 << (longest - 1).bit_length())).unsqueeze(0)
            cosines, sines = self._decoder.rotary(torch.zeros(1), ids)
            half = cosines.shape[-1] // 2
            self._cosines = cosines[0, :, :half].float().contiguous()
            self._sines = sines[0, :, :half].float().contiguous()
        index = torch.from_numpy(positions)
        return self._cosines.index_select(0, index), self._sines.index_select(0, index)

    def _exchange_through_python(self, layer: Moe, tokens: int) -> None:
        """The experts of a layer, wherever they are."""
        assert self._experts is not None
        ids = self._ids[: tokens * layer.top_k].view(tokens, layer.top_k)
        weights = self._scores[: tokens * layer.top_k].view(tokens, layer.top_k)
        result = self._experts.forward(
            layer.experts, self._normed[:tokens], ids, weights.to(self._decoder.dtype)
        )
        self._stream[:tokens] += result

    # ---- writing the list

    def _make_room(self, tokens: int, selected: int, total: int) -> None:
        """Buffers for that many tokens, of all members together ``total``; what was written uses others."""
        wanted = max(tokens, MIN_TOKENS), max(selected, MIN_TOKENS), max(total, MIN_TOKENS)
        rooms = self._room, self._selected_room, self._total_room
        if self._room and all(want <= room for want, room in zip(wanted, rooms, strict=True)):
            return
        self._room, self._selected_room, self._total_room = (
            max(1 << (want - 1).bit_length(), room) for want, room in zip(wanted, rooms, strict=True)
        )
        self._lists.clear()
        decoder, rows = self._decoder, self._room
        layers = [weights.layer for weights in self._weights]
        self._stream = self._buffer(rows, decoder.hidden)
        self._normed = self._buffer(rows, decoder.hidden)
        self._last = self._buffer(self._selected_room, decoder.hidden)
        self._projected = self._buffer(
            rows, max((a.heads + 2 * a.kv_heads) * a.dim for a in (layer.attention for layer in layers))
        )
        self._attended = self._buffer(
            rows, max(layer.attention.heads * layer.attention.dim for layer in layers)
        )
        self._middle = self._buffer(rows, max((mlp.width for mlp in self._mlps(Mlp)), default=0))
        self._logits = torch.empty(self._selected_room, decoder.vocab)
        if self._shape is not None:
            pairs = rows * self._shape.top_k
            self._scores = torch.empty(pairs)
            self._router_logits = torch.empty(rows * self._shape.num_experts)
            self._ids = torch.empty(pairs, dtype=torch.int64)
            self._exchange: Exchange = self._joined or Alone(self._shape, rows)
            self._gathered = self._exchange.make_room(self._total_room)
            widest = max(moe.width for moe in self._mlps(Moe))
            self._expert_middle = self._buffer(self._total_room * self._shape.top_k + SLACK, widest)

    def _mlps(self, kind: type[_Mlp]) -> list[_Mlp]:
        return [weights.layer.mlp for weights in self._weights if isinstance(weights.layer.mlp, kind)]

    def _buffer(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._decoder.dtype)

    def _write(self, native: bool) -> _List:
        """``native``: with the exchange of experts."""
        decoder = self._decoder
        write = Operations(OPERATIONS_PER_LAYER * len(self._weights) + 4)
        cuts: list[tuple[int, Moe | None]] = []
        write.add(Kind.EMBED, into=decoder.embedding.data, out=self._stream, k=decoder.hidden)
        for number, weights in enumerate(self._weights):
            layer = weights.layer
            self._norm(write, layer.norm, layer.eps, self._stream, self._normed)
            self._write_attention(write, number, weights, layer.attention)
            if isinstance(layer.mlp, Mlp):
                self._norm(write, layer.second_norm, layer.eps, self._stream, self._normed)
                self._write_mlp(write, weights, layer.mlp)
            elif native:
                own, layout = self._exchange.own, self._exchange.layout
                self._norm(write, layer.second_norm, layer.eps, self._stream, own + layout.rows_at)
                self._write_router(write, weights, layer.mlp, own + layout.rows_at, own + layout.ids_at)
                self._write_experts(write, weights, layer.mlp)
            else:
                self._norm(write, layer.second_norm, layer.eps, self._stream, self._normed)
                self._write_router(write, weights, layer.mlp, self._normed, self._ids)
                cuts.append((len(write), layer.mlp))
        write.add(Kind.SELECT, into=self._stream, out=self._last, k=decoder.hidden)
        self._norm(write, decoder.norm, decoder.eps, self._last, self._last, flags=SELECTED)
        write.add(
            Kind.LINEAR,
            into=self._last,
            out=self._logits,
            weights=self._head,
            n=decoder.vocab,
            k=decoder.hidden,
            flags=SELECTED | AS_FLOAT,
        )
        return _List(write, [*cuts, (len(write), None)])

    def _norm(
        self,
        write: Operations,
        weight: torch.Tensor,
        eps: float,
        into: torch.Tensor,
        out: torch.Tensor | int,
        flags: int = 0,
    ) -> None:
        write.add(Kind.NORM, into=into, out=out, more=weight, k=self._decoder.hidden, number=eps, flags=flags)

    def _write_attention(
        self, write: Operations, number: int, weights: _Weights, attention: Attention
    ) -> None:
        assert self._cache is not None
        hidden, keys, values = self._decoder.hidden, self._cache.keys[number], self._cache.values[number]
        wide, narrow = (
            (attention.heads + 2 * attention.kv_heads) * attention.dim,
            attention.heads * attention.dim,
        )
        shape = {"a": attention.heads, "b": attention.kv_heads, "c": attention.dim, "d": attention.window}
        write.add(
            Kind.LINEAR,
            into=self._normed,
            out=self._projected,
            weights=weights.qkv,
            more=attention.qkv_bias,
            n=wide,
            k=hidden,
        )
        write.add(
            Kind.QKV,
            into=self._projected,
            out=values,
            extra=keys,
            more=attention.head_norms,
            number=attention.head_eps,
            **shape,
        )
        write.add(
            Kind.ATTEND,
            into=self._projected,
            out=self._attended,
            weights=values,
            extra=keys,
            number=attention.scale,
            **shape,
        )
        write.add(
            Kind.LINEAR,
            into=self._attended,
            out=self._stream,
            weights=weights.out,
            more=attention.out_bias,
            n=hidden,
            k=narrow,
            flags=ADD,
        )

    def _write_mlp(self, write: Operations, weights: _Weights, mlp: Mlp) -> None:
        hidden, width = self._decoder.hidden, mlp.width
        write.add(Kind.GATED, into=self._normed, out=self._middle, weights=weights.gate_up, n=width, k=hidden)
        write.add(
            Kind.LINEAR,
            into=self._middle,
            out=self._stream,
            weights=weights.down,
            n=hidden,
            k=width,
            flags=ADD,
        )

    def _write_router(
        self,
        write: Operations,
        weights: _Weights,
        moe: Moe,
        into: torch.Tensor | int,
        ids: torch.Tensor | int,
    ) -> None:
        write.add(
            Kind.LINEAR,
            into=into,
            out=self._router_logits,
            weights=weights.router,
            n=moe.num_experts,
            k=self._decoder.hidden,
            flags=AS_FLOAT,
        )
        write.add(
            Kind.ROUTE,
            into=self._router_logits,
            out=self._scores,
            extra=ids,
            n=moe.num_experts,
            k=moe.top_k,
            flags=ADD if moe.normalised else 0,
        )

    def _write_experts(self, write: Operations, weights: _Weights, moe: Moe) -> None:
        exchange, alone = self._exchange, self._joined is None
        results = exchange.own + exchange.layout.results_at
        packed = weights.experts or self._products.packed(moe.experts)
        if not alone:
            write.add(Kind.OFFER, extra=exchange.record)
            write.add(Kind.MEET, extra=exchange.record)
        write.add(Kind.SORT, extra=exchange.record)
        packed.write(write, self._gathered, self._expert_middle, results, exchange.begins)
        if not alone:
            write.add(Kind.RETURN, extra=exchange.record)
            write.add(Kind.HOME, extra=exchange.record)
        write.add(
            Kind.COMBINE,
            into=self._scores,
            out=self._stream,
            extra=exchange.record,
            n=self._decoder.hidden,
            k=moe.top_k,
        )
