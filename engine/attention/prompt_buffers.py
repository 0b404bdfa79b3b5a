"""Buffers of captured steps with prompts over the Triton cache.

One upload is taken apart on the device: see :mod:`engine.attention.packed_tokens`. The first kernel of a step writes what layers read: token ids,
positions, cache slots, wanted tokens, and block tables of a fixed width.
"""

from __future__ import annotations

from functools import partial

import torch

from engine.attention import triton_kernels as kernels
from engine.attention.base import Int64s, PackedRows
from engine.attention.packed_tokens import HEADER, LINE, MOST_KINDS, TILE, PromptSize, pack_tokens
from engine.attention.transfer import upload
from engine.attention.triton_paged import Tiles, TritonAttentionPlan, TritonPagedAttention

COPIED_BLOCKS = 256
"""Entries of a block table, or wanted tokens, that a program copies at once."""


class TritonPromptBuffers:
    """Implements ``base.PromptBuffers``."""

    def __init__(
        self, cache: TritonPagedAttention, largest: PromptSize, max_tokens: int, most_chosen: int
    ) -> None:
        """``largest``: of each number the largest of all sizes. ``max_tokens``: no context has more."""
        self._cache, self._max_tokens = cache, max_tokens
        self._kinds = tuple(sorted(cache.kinds_of_tiles))
        if len(self._kinds) > MOST_KINDS:
            raise ValueError(f"{len(self._kinds)} kinds of tiles, at most {MOST_KINDS}")
        width, device = -(-max_tokens // cache.block_size), cache.device
        room = largest.tables_at(self._kinds) + largest.rows * width
        self._packed = torch.zeros(room, dtype=torch.int32, device=device)
        self._tables = torch.full((largest.rows, width), cache.null_block, dtype=torch.int32, device=device)
        self._slots = torch.empty(largest.tokens, dtype=torch.int64, device=device)
        self.inputs = torch.zeros(2, largest.tokens, dtype=torch.int64, device=device)
        self.wanted = torch.zeros(largest.wanted, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(max(largest.rows, most_chosen), dtype=torch.int64, device=device)

    def fill(
        self,
        rows: PackedRows,
        size: PromptSize,
        input_ids: Int64s,
        wanted: Int64s,
        sources: Int64s | None = None,
    ) -> None:
        """See ``base.PromptBuffers``. One copy goes to the device."""
        packed = pack_tokens(rows, size, self._kinds, input_ids, wanted, sources)
        self._packed[: len(packed)].copy_(upload(packed, self._cache.device))

    def plan(self, size: PromptSize) -> TritonAttentionPlan:
        """See ``base.PromptBuffers``."""
        cache = self._cache
        kernels.take_tokens_apart[(size.tokens + size.rows + 1,)](
            self._packed,
            self.chosen,
            self.inputs,
            self._slots,
            self.wanted,
            self._tables,
            self.inputs.shape[1],
            self._tables.stride(0),
            cache.null_block,
            size.tokens,
            size.rows,
            size.wanted,
            size.wanted_at,
            size.tables_at(self._kinds),
            BLOCK_SIZE=cache.block_size,
            HEADER=HEADER,
            LINE=LINE,
            BLOCK=COPIED_BLOCKS,
        )
        singles = self._tiles(size.singles_at, size.singles) if size.singles else None
        positions = self.inputs[1, : size.tokens]
        tiles = partial(self._tiles_of, size)
        return TritonAttentionPlan(
            cache, self._slots[: size.tokens], self._tables, singles, tiles, lambda: positions
        )

    def _tiles_of(self, size: PromptSize, queries: int) -> Tiles:
        """Tiles of longer rows of layers of one kind."""
        before = self._kinds[: self._kinds.index(queries)]
        return self._tiles(size.tiles_at + TILE * sum(map(size.tiles, before)), size.tiles(queries))

    def _tiles(self, place: int, count: int) -> Tiles:
        return Tiles.of(self._packed[place : place + TILE * count].view(TILE, count), self._max_tokens)
