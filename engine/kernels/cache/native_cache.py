"""The KV cache that ``step.cpp`` reads, in panels of 16 keys or values.

Per layer, keys are [block, kv_head, block_size / 16, dim / pack, 16] words and values [block, kv_head,
block_size / 16, 16 / pack, dim] words, so that attention is the same inner loop as a matrix product. Codes
(:mod:`engine.attention.kv_codes`) lie in the order of the numbers that they stand for. Beside them are scales
[block, kv_head, block_size / 16, 2, 16] of keys and of values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.attention.base import Int32s, Int64s, LayerShape, PackedRows
from engine.attention.kv_codes import SCALE_TYPE, KVCodes
from engine.kernels.core.pages import Allocator, Arena
from engine.kernels.products.packing import LANES

CODES: dict[KVCodes | None, int] = {None: 0, "int8": 1, "fp8": 2}
"""Numbers of the kinds of cache codes in ``kv_codes.hpp``."""
QUERIES_PER_TASK = 96, 48, 24, 12
"""Sizes of the tasks of attention, in tokens of a prompt.

A task is these and one KV head. It reads all keys before it, so the more the better, as long as threads end
together.
"""
TASKS_PER_THREAD = 8
"""Tasks of this number keep the threads from waiting long for the last one."""
SPARE_BLOCKS = 16
"""Spare columns in the tables of a decode step, for consecutive steps."""


@dataclass(frozen=True)
class NativePlan:
    """Cache slots and attention tasks of one step (host arrays)."""

    slots: Int64s
    """[tokens] block * block_size + offset."""
    offsets: Int64s
    """[rows] index of each row's first token."""
    tasks: Int32s
    """[tasks, 4] row, first query, queries, where the result of the first one goes."""
    chosen_tasks: Int32s
    """``tasks`` of the last layer, which computes attention for tokens with wanted logits only."""
    tables: Int32s
    """[rows, width], contiguous."""


class NativeCache:
    """The KV cache of one model, in memory of this host."""

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        codes: KVCodes | None = None,
        memory: Allocator | None = None,
    ) -> None:
        """``block_size`` is a multiple of 16.

        ``codes``: what keys and values are kept as; None: as numbers of ``dtype``. ``memory``: where the
        tensors are; None: in memory of this process.
        """
        self.block_size = block_size
        self._kv_heads = min((layer.kv_heads for layer in layers), default=1)
        self.num_blocks = num_blocks
        arena, positions = memory or Arena(), num_blocks * block_size
        kept = dtype if codes is None else torch.int8
        self.codes = CODES[codes]
        widths = [layer.key_dim + (0 if codes is None else layer.apart) for layer in layers]
        self.keys = [
            arena.zeros((positions, layer.kv_heads * width), kept)
            for layer, width in zip(layers, widths, strict=True)
        ]
        self.values = [arena.zeros((positions, layer.kv_heads * layer.value_dim), kept) for layer in layers]
        self.scales: list[torch.Tensor | None] = [None for _ in layers]
        if codes is not None:
            self.scales = [arena.zeros((positions, 2 * layer.kv_heads), SCALE_TYPE) for layer in layers]
        self._numbers = np.zeros(0, dtype=np.int64)
        self._single_tasks = np.zeros((0, 4), dtype=np.int32)
        """Tasks of so many rows of one token."""

    def __repr__(self) -> str:
        return f"NativeCache(layers={len(self.keys)}, blocks={self.num_blocks}, block_size={self.block_size})"

    @property
    def stored(self) -> list[torch.Tensor]:
        """Tensors of the cache, each of ``num_blocks`` equal parts, a block each."""
        return [*self.keys, *self.values, *(each for each in self.scales if each is not None)]

    @staticmethod
    def fits(block_size: int) -> bool:
        return block_size % LANES == 0

    def plan(self, rows: PackedRows, wanted: Int64s) -> NativePlan:
        """Cache slots of a step's tokens, and its attention cut into tasks.

        ``wanted``: indices of the tokens whose logits are wanted, each once.
        """
        if rows.num_single == len(rows.starts):
            return self._plan_of_singles(rows, wanted)
        row_of_token = np.repeat(np.arange(len(rows.starts)), rows.counts)
        blocks = rows.block_tables[row_of_token, rows.positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + rows.positions % self.block_size
        offsets = np.cumsum(rows.counts) - rows.counts
        queries = _queries_per_task(len(slots) * self._kv_heads, torch.get_num_threads())
        tasks = _tasks_of_rows(rows.counts, offsets, queries)
        pairs = tasks[:, 2] * (rows.starts[tasks[:, 0]] + tasks[:, 1] + tasks[:, 2])
        return NativePlan(
            slots,
            offsets,
            np.ascontiguousarray(tasks[np.argsort(-pairs, kind="stable")]),  # long ones are begun first
            _tasks(wanted, row_of_token[wanted], offsets, queries),
            np.ascontiguousarray(rows.block_tables),
        )

    def _plan_of_singles(self, rows: PackedRows, wanted: Int64s) -> NativePlan:
        """The plan of a step whose rows have one token each, as most have."""
        number = len(rows.starts)
        if number > len(self._numbers):
            self._numbers = np.arange(2 * number)
            self._single_tasks = np.zeros((2 * number, 4), dtype=np.int32)
            self._single_tasks[:, 0] = self._single_tasks[:, 3] = self._numbers
            self._single_tasks[:, 2] = 1
        every = self._numbers[:number]
        block, within = np.divmod(rows.positions, self.block_size)
        slots = rows.block_tables[every, block] * np.int64(self.block_size) + within
        width = rows.block_tables.shape[1]
        tables = np.zeros((number, width + SPARE_BLOCKS), dtype=np.int32)
        tables[:, :width] = rows.block_tables
        tasks = self._single_tasks[:number]
        chosen = tasks if np.array_equal(wanted, every) else _tasks(wanted, wanted, every, 1)
        return NativePlan(slots, every, tasks, chosen, tables)


def _queries_per_task(queries: int, threads: int) -> int:
    """Size of tasks, for so many queries of all KV heads together."""
    enough = threads * TASKS_PER_THREAD
    return next((size for size in QUERIES_PER_TASK if queries >= size * enough), QUERIES_PER_TASK[-1])


def _tasks_of_rows(counts: Int64s, offsets: Int64s, most: int) -> Int32s:
    """Attention tasks of whole rows, made without arrays by token."""
    pieces = -(-counts // most)
    row = np.repeat(np.arange(len(counts)), pieces)
    first = (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * most
    return _table(row, first, np.minimum(counts[row] - first, most), offsets[row] + first)


def _tasks(tokens: Int64s, rows: Int64s, offsets: Int64s, most: int) -> Int32s:
    """Tasks [tasks, 4] for tokens of a step, some of each of its ``rows``.

    Rows begin at ``offsets``; up to ``most`` neighbours share a task. Results lie in the order of the tokens.
    """
    numbers = np.arange(len(tokens))
    same_row = rows[1:] == rows[:-1]
    if not same_row.any():
        return _table(rows, tokens - offsets[rows], 1, numbers)
    follows = np.zeros(len(tokens), dtype=bool)
    follows[1:] = (tokens[1:] - tokens[:-1] == 1) & same_row
    since = numbers - np.maximum.accumulate(np.where(follows, 0, numbers))
    begins = np.flatnonzero(since % most == 0)
    row = rows[begins]
    return _table(row, tokens[begins] - offsets[row], np.diff(begins, append=len(tokens)), begins)


def _table(row: Int64s, first: Int64s, queries: Int64s | int, place: Int64s) -> Int32s:
    table = np.empty((len(row), 4), dtype=np.int32)
    table[:, 0], table[:, 1], table[:, 2], table[:, 3] = row, first, queries, place
    return table
