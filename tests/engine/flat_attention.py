"""Attention in plain torch whose decode steps have fixed shapes, for captured steps.

It replaces Triton in tests.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.attention.base import LayerShape, PackedRows
from engine.attention.torch_paged import TorchPagedAttention


class FlatAttention(TorchPagedAttention):
    """The torch backend with one spare block, and buffers for decode steps."""

    def __init__(self, layers: tuple[LayerShape, ...], num_blocks: int, block_size: int) -> None:
        super().__init__(
            layers,
            num_blocks=num_blocks + 1,
            block_size=block_size,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        self.layers = layers
        self.null_block = num_blocks

    def decode_buffers(self, max_rows: int, max_tokens: int, most_chosen: int = 0) -> FlatBuffers:
        return FlatBuffers(self, max_rows, -(-max_tokens // self.block_size), most_chosen)


class FlatBuffers:
    def __init__(self, cache: FlatAttention, max_rows: int, width: int, most_chosen: int) -> None:
        self.cache = cache
        self.inputs = torch.zeros(2, max_rows, dtype=torch.int64)
        self.positions = self.inputs[1]
        self.sources = torch.full((max_rows,), -1)
        self.chosen = torch.zeros(max(max_rows, most_chosen), dtype=torch.int64)
        self.tables = torch.full((max_rows, width), cache.null_block)

    def fill(self, rows: PackedRows, size: int, input_ids=None, sources=None) -> None:
        count = len(rows.starts)
        self.inputs[:, :size] = 0
        self.inputs[0, :count] = torch.from_numpy(input_ids)
        self.sources[:size] = -1
        if sources is not None:
            self.sources[:count] = torch.from_numpy(sources)
        self.tables[:size, 0] = self.cache.null_block
        self.positions[:count] = torch.from_numpy(rows.starts)
        self.tables[:count, : rows.block_tables.shape[1]] = torch.from_numpy(
            rows.block_tables.astype(np.int64)
        )

    def plan(self, size: int) -> FlatPlan:
        ids, sources = self.inputs[0, :size], self.sources[:size]
        ids.copy_(torch.where(sources >= 0, self.chosen[sources.clamp(min=0)], ids))
        return FlatPlan(self.cache, self.positions[:size], self.tables[:size])


class FlatPlan:
    def __init__(self, cache: FlatAttention, positions: torch.Tensor, tables: torch.Tensor) -> None:
        self.cache, self.positions, self.tables = cache, positions, tables
        self.use = cache.use

    def attend(self, layer, query, key, value, scoring):
        scale, softcap, sinks, chosen = scoring
        assert chosen is None
        assert softcap is None
        assert sinks is None
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        size, block_size = self.cache.block_size * self.tables.shape[1], self.cache.block_size
        slots = (self.tables[:, :, None] * block_size + torch.arange(block_size)).flatten(1)
        own = slots.gather(1, self.positions[:, None])[:, 0]
        keys.index_copy_(0, own, key.transpose(0, 1))
        values.index_copy_(0, own, value.transpose(0, 1))
        group = query.shape[0] // key.shape[0]
        context = keys[slots].repeat_interleave(group, dim=2)
        scores = torch.einsum("hrd,rkhd->rhk", query, context) * scale
        places = torch.arange(size)
        unseen = places > self.positions[:, None]
        window = self.cache.layers[layer].window
        if window is not None:
            unseen |= places <= self.positions[:, None] - window
        weights = torch.softmax(scores.masked_fill(unseen[:, None], float("-inf")), dim=-1)
        return torch.einsum("rhk,rkhd->rhd", weights, values[slots].repeat_interleave(group, dim=2))
