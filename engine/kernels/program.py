"""A decoder as a list of operations for ``step.cpp``, written once, run every step.

The layers' weights are laid out anew; the model that they came from is not run any more. Where experts are
spread over instances, the list is cut at each expert layer, and
:class:`~parallel.expert_parallel.ExpertParallel` does the exchange between two pieces.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.base import AttentionUse, Int64s, PackedRows
from engine.kernels import operations
from engine.kernels.cache import NativeCache, NativePlan
from engine.kernels.decoder import Attention, Decoder, Layer, Mlp, Moe
from engine.kernels.experts import PackedExperts
from engine.kernels.library import Library
from engine.kernels.operations import ADD, AS_FLOAT, SELECTED, Kind, Operations, StepArguments
from engine.kernels.packing import gate_and_up, panels
from parallel.expert_parallel import ExpertParallel

MIN_TOKENS = 64
"""Room that is made at first; it doubles as steps grow."""
MIN_POSITIONS = 1024
OPERATIONS_PER_LAYER = 14


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


class Program:
    """Runs the steps of one model on the CPU. Not more than one at a time."""

    def __init__(self, library: Library, decoder: Decoder, experts: ExpertParallel | None = None) -> None:
        operations.check(library)
        self._library = library
        self._decoder = decoder
        self._experts = experts
        self._weights = [_Weights(layer, spread=experts is not None) for layer in decoder.layers]
        self._head = panels(decoder.head.data, 32)
        self._cosines = self._sines = torch.empty(0, 0)
        self._cache: NativeCache | None = None
        self._room = 0
        self._selected_room = 0
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

    def forward(self, packed: PackedRows, input_ids: Int64s, wanted: Int64s) -> torch.Tensor:
        """Logits [wanted, vocabulary] in float32. They are valid until the next call."""
        assert self._cache is not None
        plan = self._cache.plan(packed)
        tokens, selected = len(input_ids), len(wanted)
        if tokens > self._room or selected > self._selected_room:
            self._make_room(max(tokens, MIN_TOKENS), max(selected, MIN_TOKENS))
        cosines, sines = self._angles(packed.positions)
        step = self._arguments(plan, packed, input_ids, np.ascontiguousarray(wanted), cosines, sines)
        begin = 0
        for end, layer in self._cuts:
            self._operations.run(self._library, step, self._decoder.dtype, begin, end)
            if layer is not None:
                self._exchange(layer, tokens)
            begin = end
        self.attention.calls += len(self._weights)
        self.attention.seconds = float(self.seconds[Kind.QKV] + self.seconds[Kind.ATTEND])
        return self._logits[:selected]

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

    def _exchange(self, layer: Moe, tokens: int) -> None:
        """The experts of a layer, wherever they are."""
        assert self._experts is not None
        ids = self._ids[: tokens * layer.top_k].view(tokens, layer.top_k)
        weights = self._scores[: tokens * layer.top_k].view(tokens, layer.top_k)
        result = self._experts.forward(
            layer.experts, self._normed[:tokens], ids, weights.to(self._decoder.dtype)
        )
        self._stream[:tokens] += result

    # ---- writing the list

    def _make_room(self, tokens: int, selected: int) -> None:
        """Buffers for that many tokens, and the operations that use them."""
        tokens, selected = 1 << (tokens - 1).bit_length(), 1 << (selected - 1).bit_length()
        self._room, self._selected_room = max(tokens, self._room), max(selected, self._selected_room)
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
        dense = [layer.mlp.width for layer in layers if isinstance(layer.mlp, Mlp)]
        sparse = [layer.mlp for layer in layers if isinstance(layer.mlp, Moe)]
        pairs = rows * max((moe.top_k for moe in sparse), default=0)
        widths = [rows * width for width in dense] + [pairs * moe.width for moe in sparse]
        self._middle = self._buffer(max(widths))
        self._returned = self._buffer(pairs, decoder.hidden)
        num_experts = max((moe.num_experts for moe in sparse), default=0)
        self._scores = torch.empty(max(pairs, rows * num_experts))
        self._router_logits = torch.empty(rows * num_experts)
        self._ids = torch.empty(pairs, dtype=torch.int64)
        self._order = torch.empty(num_experts + 1 + pairs, dtype=torch.int64)
        self._logits = torch.empty(self._selected_room, decoder.vocab)
        self._write()

    def _buffer(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=self._decoder.dtype)

    def _write(self) -> None:
        decoder = self._decoder
        write = self._operations = Operations(OPERATIONS_PER_LAYER * len(self._weights) + 4)
        self._cuts: list[tuple[int, Moe | None]] = []
        write.add(Kind.EMBED, into=decoder.embedding.data, out=self._stream, k=decoder.hidden)
        for number, weights in enumerate(self._weights):
            layer = weights.layer
            self._norm(write, layer.norm, layer.eps, self._stream, self._normed)
            self._write_attention(write, number, weights, layer.attention)
            self._norm(write, layer.second_norm, layer.eps, self._stream, self._normed)
            if isinstance(layer.mlp, Mlp):
                self._write_mlp(write, weights, layer.mlp)
            else:
                self._write_moe(write, weights, layer.mlp)
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
        self._cuts.append((len(write), None))

    def _norm(
        self,
        write: Operations,
        weight: torch.Tensor,
        eps: float,
        into: torch.Tensor,
        out: torch.Tensor,
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

    def _write_moe(self, write: Operations, weights: _Weights, moe: Moe) -> None:
        hidden = self._decoder.hidden
        write.add(
            Kind.LINEAR,
            into=self._normed,
            out=self._router_logits,
            weights=weights.router,
            n=moe.num_experts,
            k=hidden,
            flags=AS_FLOAT,
        )
        write.add(
            Kind.ROUTE,
            into=self._router_logits,
            out=self._scores,
            extra=self._ids,
            n=moe.num_experts,
            k=moe.top_k,
            flags=ADD if moe.normalised else 0,
        )
        if weights.experts is None:
            self._cuts.append((len(write), moe))
            return
        write.add(Kind.SORT, extra=self._ids, out=self._order, n=moe.num_experts, a=-moe.top_k)
        write.add(
            Kind.EXPERTS_UP,
            into=self._normed,
            out=self._middle,
            weights=weights.experts.up,
            extra=self._order,
            n=moe.width,
            k=hidden,
            a=moe.num_experts,
            b=moe.top_k,
        )
        write.add(
            Kind.EXPERTS_DOWN,
            into=self._middle,
            out=self._returned,
            weights=weights.experts.down,
            extra=self._order,
            n=hidden,
            k=moe.width,
            a=moe.num_experts,
            b=moe.top_k,
        )
        write.add(
            Kind.COMBINE,
            into=self._returned,
            out=self._stream,
            extra=self._scores,
            n=hidden,
            k=moe.top_k,
            flags=ADD,
        )
