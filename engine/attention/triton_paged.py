"""Paged attention straight from the blocks, in Triton kernels.

Needs a CUDA device, or Triton's interpreter.

The cache is laid out as in ``torch_paged``, with one block more, which belongs to no request: rows that only
fill up a step of fixed size write there. Rows of one token are tiles of one query, whose contexts may be cut
over several programs; longer rows are cut into tiles of a few queries. What a step needs on the device are
the slots to write, the block tables and four numbers per tile; no mask, and nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, cached_property, partial

import numpy as np
import torch

from engine.attention import splits
from engine.attention import triton_kernels as kernels
from engine.attention.base import Int64s, LayerShape, PackedRows, Scoring
from engine.attention.packed_rows import HEADER, pack_lines
from engine.attention.packed_tokens import tiles_of_longer_rows
from engine.attention.paged_tensors import PagedTensors
from engine.attention.prompt_buffers import TritonPromptBuffers
from engine.attention.prompt_size import PromptSize
from engine.attention.tiles import Tiles
from engine.attention.transfer import upload
from engine.gpu import fused_launches
from engine.gpu.late_rotary import LateRotation

SMALLEST_PRODUCT = 16
"""Tensor cores multiply matrices with at least so many rows and columns."""
TILE_BYTES = 16 << 10
"""Bytes of the keys that a program looks at together."""
MOST_KEYS = 64
QUERY_LINES = 64
"""Queries times heads of a tile of a longer row."""
FIXED_LINES = 32
"""Queries times heads of any tile of a cache that is ``fixed``.

Results of a part, and of those before it, have to fit the registers.
"""
WIDE_LINES = 16
"""Queries times heads of a tile in float32: more would not fit the registers."""
PROGRAMS_PER_PROCESSOR = 2


@dataclass(eq=False, repr=False)
class TritonPagedAttention(PagedTensors):
    """The KV cache of one model on one device. Implements ``base.CapturableAttention``."""

    _: KW_ONLY
    programs: int | None = None
    """Programs that keep the device busy; None: what suits it."""
    fixed: bool = False
    """Whether a token's bits are the same in chunks of any size (``--batch-invariant``).

    Contexts of longer rows then have the parts that those of single tokens have.
    """
    kinds_of_tiles: set[int] = field(default_factory=set, init=False)
    """Queries per tile of longer rows, of the layers that have attended so far."""

    def __post_init__(self) -> None:
        self.null_block = self.num_blocks
        self.allocate(self.num_blocks + 1, self.dtype)
        self._programs = _programs(self.device) if self.programs is None else self.programs

    def __repr__(self) -> str:
        return (
            f"TritonPagedAttention(layers={len(self.layers)}, blocks={self.null_block}, "
            f"block_size={self.block_size}, {self.dtype}, {self.device})"
        )

    def plan(self, rows: PackedRows) -> TritonAttentionPlan:
        """Upload what the kernels need to know of a step; see ``base.PagedAttention``."""
        row_of_token = np.repeat(np.arange(len(rows.starts)), rows.counts)
        slots = self.slots(rows.block_tables[row_of_token, rows.positions // self.block_size], rows.positions)
        singles = None
        if rows.num_single:
            starts = rows.starts[: rows.num_single]
            order = np.arange(rows.num_single)
            singles = self.tiles(np.stack([order, order, np.ones_like(order), starts]))
        tables = upload(rows.block_tables, self.device)

        @cache
        def longer(queries: int) -> Tiles | None:
            if rows.num_single == len(rows.starts):
                return None
            return self.tiles(tiles_of_longer_rows(rows, queries))

        return TritonAttentionPlan(
            self,
            upload(slots, self.device),
            tables,
            singles,
            longer,
            lambda: upload(rows.positions, self.device),
        )

    def slots(self, blocks: np.ndarray[tuple[int, ...], np.dtype[np.int32]], positions: Int64s) -> Int64s:
        """Cache slots of the tokens at these positions, in these blocks."""
        return blocks.astype(np.int64) * self.block_size + positions % self.block_size

    def tiles(self, tiles: Int64s) -> Tiles:
        """Tiles from arrays [4, tiles] on the host, uploaded."""
        longest = int((tiles[2] + tiles[3]).max())
        return Tiles.of(upload(tiles.astype(np.int32), self.device), longest)

    def decode_buffers(self, max_rows: int, max_tokens: int, most_chosen: int = 0) -> TritonDecodeBuffers:
        """See ``base.CapturableAttention``."""
        return TritonDecodeBuffers(self, max_rows, max_tokens, most_chosen)

    def prompt_buffers(
        self, largest: PromptSize, max_tokens: int, most_chosen: int = 0
    ) -> TritonPromptBuffers:
        """See ``base.CapturableAttention``."""
        plan, kinds = partial(TritonAttentionPlan, self), tuple(sorted(self.kinds_of_tiles))
        return TritonPromptBuffers(self, kinds, plan, largest, max_tokens, most_chosen)

    def splits(self, num_tiles: int, layer: LayerShape, longest: int, parts: int) -> int:
        """Number of programs that share the parts of the context of each query."""
        seen = longest if layer.window is None else min(longest, layer.window)
        return splits.num_splits(num_tiles * layer.kv_heads, seen, self._programs, parts)


def _programs(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return PROGRAMS_PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


class TritonAttentionPlan:
    """One step over a :class:`TritonPagedAttention`. Implements ``base.AttentionPlan``."""

    turns_late = True
    """Whether queries and keys come unturned; see :mod:`engine.gpu.late_rotary`."""

    def __init__(
        self,
        cache: TritonPagedAttention,
        slots: torch.Tensor,
        tables: torch.Tensor,
        singles: Tiles | None,
        longer: Callable[[int], Tiles | None],
        positions: Callable[[], torch.Tensor],
    ) -> None:
        """``slots`` [tokens], ``tables`` [rows, width] on the device.

        ``longer``: rows of more than one token, cut into tiles of so many queries; None if there are none.
        ``positions`` [tokens], on the device once they are asked for.
        """
        self.use = cache.use
        self._cache = cache
        self._slots = slots
        self._tables = tables
        self._singles = singles
        self._longer = longer
        self._positions = positions

    @cached_property
    def positions(self) -> torch.Tensor:
        """See ``base.AttentionPlan``."""
        return self._positions()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scoring: Scoring,
        turn: LateRotation | None = None,
    ) -> torch.Tensor:
        """See ``base.AttentionPlan.attend``; ``turn``: by which angles queries and keys are turned first."""
        cache, shape = self._cache, self._cache.layers[layer]
        query, key, value = _rows_of_numbers(query), _rows_of_numbers(key), _rows_of_numbers(value)
        heads, tokens, _ = query.shape
        launch = _Launch(cache, layer, heads, scoring)
        if turn is None:
            launch.store(key, value, self._slots)
        else:
            kept = launch.keys, launch.values, self._slots
            query = fused_launches.rotate_and_store(turn, query, key, value, *kept)
        attended = query.new_empty(tokens, heads, shape.value_dim)
        if self._singles is not None:
            launch.attend(query, attended, self._tables, self._singles)
        group = heads // shape.kv_heads
        queries = queries_per_tile(group, query.dtype, fixed=cache.fixed)
        cache.kinds_of_tiles.add(queries)
        long_tiles = self._longer(queries)
        if long_tiles is not None:
            launch.attend(query, attended, self._tables, long_tiles, queries)
        return attended


class TritonDecodeBuffers:
    """Implements ``base.DecodeBuffers``: one packed array, taken apart by the first kernel of a step."""

    def __init__(self, cache: TritonPagedAttention, max_rows: int, max_tokens: int, most_chosen: int) -> None:
        self._cache = cache
        self._max_tokens = max_tokens
        width = -(-max_tokens // cache.block_size)
        device = cache.device
        self._lines = torch.zeros((max_rows, HEADER + width), dtype=torch.int32, device=device)
        self._lines[:, HEADER:].fill_(cache.null_block)
        self._slots = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._order = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._ones = torch.ones(max_rows, dtype=torch.int32, device=device)
        self.inputs = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(max(max_rows, most_chosen), dtype=torch.int64, device=device)

    def fill(
        self, rows: PackedRows, size: int, input_ids: Int64s | None = None, sources: Int64s | None = None
    ) -> None:
        """See ``base.DecodeBuffers``. One copy goes to the device."""
        lines = pack_lines(rows, size, self._cache.null_block, input_ids, sources)
        self._lines[:size, : lines.shape[1]].copy_(upload(lines, self._cache.device))

    def plan(self, size: int) -> TritonAttentionPlan:
        """See ``base.DecodeBuffers``."""
        lines, order = self._lines[:size], self._order[:size]
        slots, positions = self._slots[:size], self._positions[:size]
        kernels.take_apart[(size,)](
            lines,
            lines.stride(0),
            self.chosen,
            self.inputs,
            self.inputs.shape[1],
            positions,
            slots,
            BLOCK_SIZE=self._cache.block_size,
            HEADER=HEADER,
        )
        tiles = Tiles(order, order, self._ones[:size], positions, self._max_tokens)
        return TritonAttentionPlan(
            self._cache, slots, lines[:, HEADER:], tiles, lambda _queries: None, lambda: positions
        )


class _Launch:
    """The launches of one layer of one step."""

    def __init__(self, cache: TritonPagedAttention, layer: int, heads: int, scoring: Scoring) -> None:
        self.cache = cache
        self.shape = cache.layers[layer]
        self.keys, self.values = cache.keys[layer], cache.values[layer]
        self.heads = heads
        self.scale, self.softcap, self.sinks, _ = scoring
        self.block_k = _padded(self.shape.key_dim)
        self.block_v = _padded(self.shape.value_dim)
        self.block_n = self._keys_at_once()

    def store(self, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
        """Write keys and values [kv_heads, tokens, dim] to the cache."""
        shape = self.shape
        kernels.store[(key.shape[1], shape.kv_heads)](
            key,
            value,
            self.keys,
            self.values,
            slots,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            KV_HEADS=shape.kv_heads,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            BLOCK_K=self.block_k,
            BLOCK_V=self.block_v,
        )

    def attend(
        self,
        query: torch.Tensor,
        attended: torch.Tensor,
        tables: torch.Tensor,
        tiles: Tiles,
        queries: int | None = None,
    ) -> None:
        """Launch attention for tiles of so many queries each; None: of single tokens."""
        shape, num_tiles, cache = self.shape, len(tiles), self.cache
        is_single, group = queries is None, self.heads // shape.kv_heads
        parts = splits.most_parts(tiles.longest, shape.window) if is_single else 1
        is_split = parts > 1
        programs = cache.splits(num_tiles, shape, tiles.longest, parts) if is_split else 1
        room = (parts, num_tiles, self.heads) if is_split else (1,)
        sums = attended.new_empty(*room, shape.value_dim, dtype=torch.float32)
        peaks, totals = attended.new_empty(2, *room, dtype=torch.float32)
        if cache.fixed:
            queries = queries_per_tile(group, query.dtype, fixed=True)
        kernels.attend[(num_tiles, shape.kv_heads, programs)](
            query,
            self.keys,
            self.values,
            attended,
            sums,
            peaks,
            totals,
            attended if self.sinks is None else self.sinks,
            tables,
            tiles.rows,
            tiles.tokens,
            tiles.counts,
            tiles.positions,
            self.scale,
            1.0 if self.softcap is None else self.softcap,
            shape.window or 0,
            query.stride(0),
            query.stride(1),
            tables.stride(0),
            HEADS=self.heads,
            KV_HEADS=shape.kv_heads,
            KEY_DIM=shape.key_dim,
            VALUE_DIM=shape.value_dim,
            BLOCK_SIZE=cache.block_size,
            BLOCK_M=_padded((queries or 1) * group),
            BLOCK_N=self.block_n,
            BLOCK_K=self.block_k,
            BLOCK_V=self.block_v,
            **_part_sizes(),
            SPLIT=is_split,
            FOLDED=not is_split and (is_single or cache.fixed),
            WINDOWED=shape.window is not None,
            CAPPED=self.softcap is not None,
            SINKS=self.sinks is not None,
            WIDEN=query.dtype == torch.bfloat16 and query.device.type == "cpu",
            enable_fp_fusion=not (is_single or cache.fixed),  # forms of one kernel round alike
        )
        if is_split:
            self._merge((sums, peaks, totals), attended, tiles)

    def _merge(self, parts: tuple[torch.Tensor, ...], attended: torch.Tensor, tiles: Tiles) -> None:
        """Merge the parts of each tile's context.

        ``parts``: sums of values, highest scores, sums of weights.
        """
        shape = self.shape
        kernels.merge[(len(tiles), self.heads)](
            *parts,
            attended if self.sinks is None else self.sinks,
            attended,
            tiles.tokens,
            tiles.counts,
            tiles.positions,
            shape.window or 0,
            HEADS=self.heads,
            VALUE_DIM=shape.value_dim,
            **_part_sizes(),
            BLOCK_V=self.block_v,
            WINDOWED=shape.window is not None,
            SINKS=self.sinks is not None,
            enable_fp_fusion=False,
        )

    def _keys_at_once(self) -> int:
        bytes_per_key = max(self.block_k, self.block_v) * int(self.cache.dtype.itemsize)
        return max(SMALLEST_PRODUCT, min(MOST_KEYS, TILE_BYTES // bytes_per_key))


def _part_sizes() -> dict[str, int]:
    return {"PART_KEYS": splits.SPLIT_KEYS, "MOST_PARTS": splits.MOST_PARTS}


def queries_per_tile(group: int, dtype: torch.dtype, *, fixed: bool = False) -> int:
    """Queries of a tile of a longer row, by heads for each KV head."""
    most = FIXED_LINES if fixed else QUERY_LINES
    lines = most if dtype.itemsize <= 2 else min(most, WIDE_LINES)
    return max(lines // group, 1)


def _padded(size: int) -> int:
    """The next power of two that can be multiplied."""
    return max(SMALLEST_PRODUCT, 1 << (size - 1).bit_length())


def _rows_of_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, with contiguous lines."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
