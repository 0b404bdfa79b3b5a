"""Buffers of captured steps with prompts over the Triton cache.

One upload is taken apart on the device: see :mod:`engine.attention.packed_tokens`. The first kernel of a step
writes what layers read: token ids, positions, cache slots, wanted tokens, and block tables of a fixed width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from engine.attention import triton_kernels as kernels
from engine.attention.base import AttentionPlan, Int64s, PackedRows
from engine.attention.packed_tokens import pack_tokens
from engine.attention.paged_tensors import PagedTensors
from engine.attention.prompt_size import HEADER, LINE, MOST_KINDS, TILE, PromptSize
from engine.attention.tiles import Tiles
from engine.attention.transfer import upload

COPIED_BLOCKS = 256
"""Entries of a block table, or wanted tokens, that a program copies at once."""


class TritonPromptBuffers:
    """Implements ``base.PromptBuffers``."""

    def __init__(
        self,
        cache: PagedTensors,
        kinds: tuple[int, ...],
        make_plan: Callable[..., AttentionPlan],
        largest: PromptSize,
        max_tokens: int,
        most_chosen: int,
    ) -> None:
        """Buffers for sizes of at most ``largest``; no context has more than ``max_tokens``.

        ``kinds``: queries per tile, by kind of layers. ``make_plan``: of slots, block tables, tiles of single
        tokens, those of longer rows by kind, and positions.
        """
        if len(kinds) > MOST_KINDS:
            raise ValueError(f"{len(kinds)} kinds of tiles, at most {MOST_KINDS}")
        self._cache, self._kinds, self._make_plan = cache, kinds, make_plan
        self._null_block, self._max_tokens = cache.num_blocks, max_tokens  # behind those of requests
        width, device = -(-max_tokens // cache.block_size), cache.device
        room = largest.tables_at(self._kinds) + largest.rows * width
        self._packed = torch.zeros(room, dtype=torch.int32, device=device)
        self._tables = torch.full((largest.rows, width), self._null_block, dtype=torch.int32, device=device)
        self._slots = torch.empty(largest.tokens, dtype=torch.int64, device=device)
        self.inputs = torch.zeros(2, largest.tokens, dtype=torch.int64, device=device)
        self.wanted = torch.zeros(largest.wanted, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(max(largest.rows, most_chosen), dtype=torch.int64, device=device)

    def fill(
        self, rows: PackedRows, size: PromptSize, ids: Int64s, wanted: Int64s, sources: Int64s | None = None
    ) -> None:
        """See ``base.PromptBuffers``. One copy goes to the device."""
        packed = pack_tokens(rows, size, self._kinds, ids, wanted, sources)
        self._packed[: len(packed)].copy_(upload(packed, self._cache.device))

    def plan(self, size: PromptSize) -> AttentionPlan:
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
            self._null_block,
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
        return self._make_plan(self._slots[: size.tokens], self._tables, singles, tiles, lambda: positions)

    def _tiles_of(self, size: PromptSize, queries: int) -> Tiles:
        """Tiles of longer rows of layers of one kind."""
        before = self._kinds[: self._kinds.index(queries)]
        return self._tiles(size.tiles_at + TILE * sum(map(size.tiles, before)), size.tiles(queries))

    def _tiles(self, place: int, count: int) -> Tiles:
        return Tiles.of(self._packed[place : place + TILE * count].view(TILE, count), self._max_tokens)
