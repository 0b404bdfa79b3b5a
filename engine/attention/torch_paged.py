"""Paged attention in plain torch: gather the context, then scaled dot products.

Runs on any device.

Per layer the cache is a tensor [slots, kv_heads, dim] for keys and one for values; slot = block *
block_size + offset. Codes have scales [slots, kv_heads] beside them, and are widened when they are gathered.
Rows of one token (decode) are computed together over their gathered, padded
contexts; longer rows one by one, cut into tiles so that no mask grows with the square of a prompt.
Grouped query heads are the query axis of the product (decode) or share keys by stride 0 (prefill), so
keys are never copied per head. Layers in which queries reach other keys get other views of the same step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Int64s, KeyChoice, KeyReach, LayerShape, PackedRows, Scoring
from engine.attention.key_choice import Question, choose_keys
from engine.attention.kv_codes import SCALE_TYPE, KVCodes, quantized, widened
from engine.attention.paged_tensors import PagedTensors
from engine.attention.transfer import upload

MASK_ELEMENTS = 1 << 22
"""Largest mask of a tile; longer rows are cut into more tiles."""
SCORE_ELEMENTS = 1 << 24
"""Largest product of queries and keys held at once without a fused kernel."""
MIN_TILE = 64
GATHER_BYTES = 256 << 20
"""Most bytes of keys that rows gather together on a GPU."""
GROUP_BLOCKS = 32
"""Padding (in blocks) that is worth another kernel call to avoid."""


@dataclass(frozen=True)
class _Singles:
    """Some of the one-token rows, of similar length, as one padded batch."""

    rows: torch.Tensor | None
    """Indices [batch] of the rows in the step; None: the first ``batch`` rows."""
    batch: int
    blocks: torch.Tensor
    """Blocks [batch * blocks per row] to gather."""
    mask: torch.Tensor
    """[batch, 1, 1, gathered tokens per row], 0 or -inf."""


@dataclass(frozen=True)
class _Tile:
    """Queries of one long row, and the gathered keys that they can see."""

    queries: slice
    keys: slice
    mask: torch.Tensor | None
    """[queries, keys], 0 or -inf; None: plain causal over the same positions."""


@dataclass(frozen=True)
class _LongRow:
    tokens: slice
    blocks: torch.Tensor | None
    """Blocks to gather; None: the context is the row itself."""
    tiles: list[_Tile]


@dataclass(frozen=True)
class _View:
    """A step as seen by the layers of one reach."""

    singles: list[_Singles]
    long_rows: list[_LongRow]


@dataclass(eq=False, repr=False)
class TorchPagedAttention(PagedTensors):
    """The KV cache of one model on one device. Implements ``base.PagedAttention``."""

    _: KW_ONLY
    codes: KVCodes | None = None
    """Kind of codes of keys and values; None: plain numbers."""

    def __post_init__(self) -> None:
        self.allocate(self.num_blocks, self.dtype if self.codes is None else torch.int8)
        self.scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Scales [slots, kv_heads, 1] of each layer's keys and values, where these are codes."""
        if self.codes is not None:
            slots = self.num_blocks * self.block_size
            shapes = [(slots, layer.kv_heads, 1) for layer in self.layers]
            self.scales = [tuple(self.zeros(shape, SCALE_TYPE) for _ in "kv") for shape in shapes]
        self._scratch: dict[str, torch.Tensor] = {}
        self._token_bytes = max(_bytes_per_token(self.layers, self.dtype), default=0)

    @property
    def stored(self) -> list[torch.Tensor]:
        """See ``base.PagedAttention``."""
        return [*super().stored, *(each for pair in self.scales for each in pair)]

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(layers={len(self.keys)}, blocks={self.num_blocks}, "
            f"block_size={self.block_size}, {self.dtype}, {self.device})"
        )

    def plan(self, rows: PackedRows) -> TorchAttentionPlan:
        """Build the index tensors and masks of a step; see ``base.PagedAttention``."""
        row_of_token = np.repeat(np.arange(len(rows.starts)), rows.counts)
        blocks = rows.block_tables[row_of_token, rows.positions // self.block_size].astype(np.int64)
        slots = blocks * self.block_size + rows.positions % self.block_size
        longest = int((rows.starts + rows.counts).max(initial=0))
        most_blocks = None
        if self.device.type != "cpu":  # there these buffers would take what the cache leaves
            most_blocks = GATHER_BYTES // max(self._token_bytes * self.block_size, 1)
        builder = _ViewBuilder(rows, self.block_size, self.dtype, self.device, most_blocks)
        if rows.windows_see and rows.sees is not None:
            longest = np.iinfo(np.int64).max  # layers with a window see more, however long it is
        reaches = [layer.reach.within(longest) for layer in self.layers]
        views = {reach: builder.view(reach) for reach in set(reaches)}
        view_of_layer = [views[reach] for reach in reaches]
        return TorchAttentionPlan(self, rows, upload(slots, self.device), view_of_layer)

    def store(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values [tokens, kv_heads, dim]; returns what the cache then has."""
        stored = self.keys[layer], self.values[layer]
        if self.codes is None:
            for kept, given in zip(stored, (keys, values), strict=True):
                kept.index_copy_(0, slots, given)
            return keys, values
        found = []
        for kept, scales, given in zip(stored, self.scales[layer], (keys, values), strict=True):
            codes, own_scales = quantized(given, self.codes)
            kept.index_copy_(0, slots, codes)
            scales.index_copy_(0, slots, own_scales.unsqueeze(-1))
            found.append(widened(codes, own_scales, self.codes, self.dtype))
        return found[0], found[1]

    def select(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [slots, kv_heads, dim] of some slots."""
        found = [each[layer].index_select(0, slots) for each in (self.keys, self.values)]
        if self.codes is not None:
            for number, scales in enumerate(self.scales[layer]):
                own_scales = scales.index_select(0, slots).squeeze(-1)
                found[number] = widened(found[number], own_scales, self.codes, self.dtype)
        return found[0], found[1]

    def store_index(self, layer: int, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """See ``key_choice.IndexCache``."""
        self.index_keys[layer].index_copy_(0, slots, keys)

    def index_context(self, layer: int, rows: PackedRows, row: int) -> torch.Tensor:
        """See ``key_choice.IndexCache``."""
        end = int(rows.starts[row] + rows.counts[row])
        blocks = upload(rows.block_tables[row, : -(-end // self.block_size)], self.device)
        keys = self.index_keys[layer].unflatten(0, (-1, self.block_size))
        return keys.index_select(0, blocks).flatten(0, 1)[:end].float()

    def index_products(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """See ``key_choice.IndexCache``."""
        return torch.matmul(queries, keys.t())

    def contexts(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len(blocks) * block_size, kv_heads, dim], valid until the next call."""
        keys = self._gather(self.keys[layer], blocks, "keys")
        values = self._gather(self.values[layer], blocks, "values")
        if self.codes is None:
            return keys, values
        key_scales, value_scales = (
            self._gather(scales, blocks, name).squeeze(-1)
            for scales, name in zip(self.scales[layer], ("key scales", "value scales"), strict=True)
        )
        return (
            widened(keys, key_scales, self.codes, self.dtype),
            widened(values, value_scales, self.codes, self.dtype),
        )

    def _gather(self, cache: torch.Tensor, blocks: torch.Tensor, name: str) -> torch.Tensor:
        """[len(blocks) * block_size, kv_heads, dim] of a layer's cache, valid until the next gather.

        The result lives in a buffer that is kept: fresh memory of this size costs more (page faults)
        than the copy.
        """
        kv_heads, dim = cache.shape[1:]
        width = self.block_size * kv_heads * dim
        size = blocks.shape[0] * width
        scratch = self._scratch.get(name)
        if scratch is None or scratch.numel() < size:
            scratch = torch.empty(size + size // 4, dtype=cache.dtype, device=self.device)
            self._scratch[name] = scratch
        gathered = scratch[:size].view(-1, width)
        torch.index_select(cache.view(-1, width), 0, blocks, out=gathered)
        return gathered.view(-1, kv_heads, dim)


Cache = TypeVar("Cache", bound=TorchPagedAttention)


class _ViewBuilder:
    """Makes the views of one step; masks of equal shape are made once."""

    def __init__(
        self,
        rows: PackedRows,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        most_blocks: int | None,
    ) -> None:
        """``most_blocks``: those that one-token rows gather together; None: any number."""
        self.most_blocks = most_blocks
        self.rows = rows
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self.masks: dict[tuple[int, int, int, KeyReach, int], torch.Tensor] = {}
        self.first_tokens = np.cumsum(rows.counts) - rows.counts

    def view(self, reach: KeyReach) -> _View:
        num_rows, num_single = len(self.rows.starts), self.rows.num_single
        singles = [self._singles(group, reach) for group in self._single_groups(reach)]
        long_rows = [self._long_row(row, reach) for row in range(num_single, num_rows)]
        return _View(singles, long_rows)

    def _first_blocks(self, positions: Int64s, reach: KeyReach) -> Int64s:
        """The first block that a query at each position can see into."""
        return reach.first_key(positions) // self.block_size

    def _single_groups(self, reach: KeyReach) -> list[Int64s]:
        """One-token rows, grouped so that padding to the longest of a group wastes little."""
        if not self.rows.num_single:
            return []
        positions = self.rows.starts[: self.rows.num_single]
        num_blocks = positions // self.block_size + 1 - self._first_blocks(positions, reach)
        order = np.argsort(-num_blocks, kind="stable")
        lengths = num_blocks[order]
        groups, begin = [], 0
        for end in range(1, len(order)):
            padding = int(lengths[begin] - lengths[end]) * (len(order) - end)
            if 2 * lengths[end] <= lengths[begin] and padding > GROUP_BLOCKS:
                groups.append(np.sort(order[begin:end]))
                begin = end
        groups.append(np.sort(order[begin:]))
        if self.most_blocks is None:
            return groups
        rows_of = [max(1, self.most_blocks // int(num_blocks[group].max())) for group in groups]
        return [
            group[first : first + most]
            for group, most in zip(groups, rows_of, strict=True)
            for first in range(0, len(group), most)
        ]

    def _singles(self, group: Int64s, reach: KeyReach) -> _Singles:
        positions = self.rows.starts[group]
        first_blocks = self._first_blocks(positions, reach)
        last_blocks = positions // self.block_size
        width = int((last_blocks - first_blocks).max()) + 1
        # Rows with fewer blocks repeat their last one: masked, and never another request's memory.
        columns = np.minimum(first_blocks[:, None] + np.arange(width), last_blocks[:, None])
        blocks = self.rows.block_tables[group[:, None], columns]
        key_positions = first_blocks[:, None] * self.block_size + np.arange(width * self.block_size)
        visible = key_positions <= positions[:, None]
        if not reach.is_whole:
            visible &= key_positions >= reach.first_key(positions)[:, None]
        all_rows = len(group) == self.rows.num_single
        return _Singles(
            rows=None if all_rows else upload(group, self.device),
            batch=len(group),
            blocks=upload(blocks.reshape(-1), self.device),
            mask=self._additive(visible)[:, None, None, :],
        )

    def _long_row(self, row: int, reach: KeyReach) -> _LongRow:
        start, count = int(self.rows.starts[row]), int(self.rows.counts[row])
        first_token = int(self.first_tokens[row])
        own = start == 0  # the whole context is in this step: nothing to gather
        first_block = int(self._first_blocks(self.rows.starts[row], reach))
        blocks = None
        if not own:
            table = self.rows.block_tables[row, first_block : (start + count - 1) // self.block_size + 1]
            blocks = upload(table, self.device)
        context_start = 0 if own else first_block * self.block_size
        sees = self.rows.seen_within(reach)
        sees = None if sees is None else sees[first_token : first_token + count]
        if sees is None or int((sees - np.arange(start, start + count)).max()) == 0:
            tiles = self._tiles(start, count, context_start, reach)
        else:
            tiles = self._tiles_ahead(start, sees, context_start, reach)
        return _LongRow(slice(first_token, first_token + count), blocks, tiles)

    def _tiles(self, start: int, count: int, context_start: int, reach: KeyReach) -> list[_Tile]:
        seen = reach.window or reach.chunk
        if start == 0 and (seen is None or count <= seen):
            return [_Tile(slice(0, count), slice(0, count), None)]
        tile = max(MASK_ELEMENTS // (start + count), MIN_TILE)
        if seen is not None:
            tile = min(tile, max(seen, MIN_TILE))
        tiles = []
        for begin in range(start, start + count, tile):
            end = min(begin + tile, start + count)
            first_key = max(context_start, int(reach.first_key(np.array([begin]))[0]))
            mask = self.tile_mask(begin, end, first_key, reach)
            keys = slice(first_key - context_start, end - context_start)
            tiles.append(_Tile(slice(begin - start, end - start), keys, mask))
        return tiles

    def _tiles_ahead(self, start: int, sees: Int64s, context_start: int, reach: KeyReach) -> list[_Tile]:
        """Tiles of a row whose queries from ``start`` on see keys up to these positions."""
        tile, tiles = max(MASK_ELEMENTS // (start + len(sees)), MIN_TILE), []
        for begin in range(0, len(sees), tile):
            last = sees[begin : begin + tile, None]
            queries = np.arange(start + begin, start + begin + len(last))[:, None]
            first_key = max(context_start, int(reach.first_key(queries[:1, 0])[0]))
            keys = np.arange(first_key, int(last[-1, 0]) + 1)[None, :]
            mask = self._additive((keys <= last) & (keys >= reach.first_key(queries)))
            own = slice(first_key - context_start, int(last[-1, 0]) + 1 - context_start)
            tiles.append(_Tile(slice(begin, begin + len(last)), own, mask))
        return tiles

    def tile_mask(self, begin: int, end: int, first_key: int, reach: KeyReach) -> torch.Tensor:
        """Mask of a tile of queries at positions [begin, end), over keys from ``first_key`` on."""
        within = begin % reach.chunk if reach.chunk is not None else 0
        shape = (end - begin, end - first_key, begin - first_key, reach, within)
        if shape not in self.masks:
            queries = np.arange(begin, end)[:, None]
            keys = np.arange(first_key, end)[None, :]
            visible = keys <= queries
            if not reach.is_whole:
                visible &= keys >= reach.first_key(queries)
            self.masks[shape] = self._additive(visible)
        return self.masks[shape]

    def _additive(self, visible: np.ndarray[tuple[int, ...], np.dtype[np.bool_]]) -> torch.Tensor:
        """Additive mask in the model's type, which no layer has to convert."""
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(upload(~visible, self.device), float("-inf"))


class StepOverPages(Generic[Cache]):
    """One step over a cache: its rows, and what its indexers choose.

    Implements ``key_choice.ChoosingPlan``, but for attention.
    """

    def __init__(self, cache: Cache, rows: PackedRows, slots: torch.Tensor) -> None:
        self._cache = cache
        self._rows = rows
        self._slots = slots
        self.use = cache.use

    @cached_property
    def positions(self) -> torch.Tensor:
        """See ``base.AttentionPlan``."""
        return upload(self._rows.positions, self._cache.device)

    def choose(self, layer: int, question: Question) -> KeyChoice:
        """See ``key_choice.ChoosingPlan``."""
        return choose_keys(self._cache, layer, self._rows, self._slots, question)


class TorchAttentionPlan(StepOverPages[TorchPagedAttention]):
    """One step over a :class:`TorchPagedAttention`. Implements ``base.AttentionPlan``."""

    def __init__(
        self, cache: TorchPagedAttention, rows: PackedRows, slots: torch.Tensor, views: list[_View]
    ) -> None:
        super().__init__(cache, rows, slots)
        self._views = views

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See ``base.AttentionPlan.attend``."""
        heads, tokens, _ = query.shape
        kv_heads, value_dim = self._cache.values[layer].shape[1:]
        token_keys, token_values = self._cache.store(
            layer, self._slots, key.transpose(0, 1), value.transpose(0, 1)
        )
        attended = query.new_empty(tokens, heads, value_dim)
        attention = _Attention(kv_heads, heads // kv_heads, *scoring[:3])
        if scoring.chosen is not None:
            self._attend_to(scoring.chosen, layer, query, attention, attended)
            return attended
        view = self._views[layer]
        for singles in view.singles:
            batch, rows = singles.batch, singles.rows
            keys, values = self._cache.contexts(layer, singles.blocks)
            queries = query.transpose(0, 1)
            queries = queries[:batch] if rows is None else queries.index_select(0, rows)
            result = attention.singles(
                queries,
                keys.view(batch, -1, *keys.shape[1:]),
                values.view(batch, -1, *values.shape[1:]),
                singles.mask,
            )
            if rows is None:
                attended[:batch] = result
            else:
                attended.index_copy_(0, rows, result)
        for row in view.long_rows:
            if row.blocks is None:
                keys, values = token_keys[row.tokens], token_values[row.tokens]
            else:
                keys, values = self._cache.contexts(layer, row.blocks)
            queries, results = query[:, row.tokens], attended[row.tokens]
            for tile in row.tiles:
                results[tile.queries] = attention.tile(
                    queries[:, tile.queries], keys[tile.keys], values[tile.keys], tile.mask
                )
        return attended

    def _attend_to(
        self,
        chosen: KeyChoice,
        layer: int,
        query: torch.Tensor,
        attention: _Attention,
        attended: torch.Tensor,
    ) -> None:
        """Attention of each row over the keys that any of its queries chose."""
        cache, token = self._cache, 0
        for table, visible in zip(self._rows.block_tables, chosen.visible, strict=True):
            seen = visible.flatten(0, 1).any(dim=0).nonzero().squeeze(1)
            blocks = upload(table, cache.device).long()[seen // cache.block_size]
            keys, values = cache.select(layer, blocks * cache.block_size + seen % cache.block_size)
            step = max(MASK_ELEMENTS // len(seen), MIN_TILE)
            for part in visible.index_select(2, seen).split(step, dim=1):
                tokens = slice(token, token + part.shape[1])
                mask = torch.zeros(part.shape, dtype=query.dtype, device=query.device)
                mask.masked_fill_(~part, float("-inf"))
                attended[tokens] = attention.tile(query[:, tokens], keys, values, mask[:, None])
                token = tokens.stop


@dataclass(frozen=True)
class _Attention:
    """The arithmetic of one layer, over contexts already gathered."""

    kv_heads: int
    group: int
    """Query heads per KV head."""
    scale: float
    softcap: float | None
    sinks: torch.Tensor | None

    def singles(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention of one-token rows [batch, heads, dim] over [batch, length, kv_heads, dim]."""
        batch, heads, dim = queries.shape
        grouped = queries.reshape(batch, self.kv_heads, self.group, dim)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self.softcap is None and self.sinks is None:
            attended = self._fused(grouped, keys, values, mask)
        else:
            sinks = None if self.sinks is None else self.sinks.view(self.kv_heads, self.group, 1)
            attended = self._plain(grouped, keys, values, mask, sinks)
        return attended.reshape(batch, heads, -1)

    def tile(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """Attention of one tile [heads, queries, dim] over [length, kv_heads, dim].

        ``mask``: [queries, keys], or [KV heads, 1, queries, keys], which may be one for all KV heads.
        """
        heads, num_queries, dim = queries.shape
        grouped = queries.reshape(self.kv_heads, self.group, num_queries, dim)
        keys, values = keys.transpose(0, 1)[:, None], values.transpose(0, 1)[:, None]
        if self.softcap is None and self.sinks is None:
            keys = keys.expand(-1, self.group, -1, -1)
            values = values.expand(-1, self.group, -1, -1)
            attended = self._fused(grouped, keys, values, mask)
        else:
            if mask is None:
                unseen = torch.full((num_queries, num_queries), float("-inf"), device=queries.device)
                mask = unseen.triu_(1)
            step = max(SCORE_ELEMENTS // (self.group * mask.numel()), 1)
            parts = []
            for head in range(0, self.kv_heads, step):
                part = slice(head, head + step)
                sinks = None
                if self.sinks is not None:
                    sinks = self.sinks.view(self.kv_heads, self.group, 1, 1)[part]
                own = mask[part] if mask.dim() == 4 and len(mask) > 1 else mask
                parts.append(self._plain(grouped[part], keys[part], values[part], own, sinks))
            attended = torch.cat(parts)
        return attended.reshape(heads, num_queries, -1).transpose(0, 1)

    def _fused(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        key_dim, value_dim = keys.shape[-1], values.shape[-1]
        if value_dim < key_dim:  # the fused kernels want one size
            values = F.pad(values, (0, key_dim - value_dim))
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=self.scale
        )
        return attended[..., :value_dim]

    def _plain(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention without a fused kernel, for soft-capped scores and sinks."""
        scores = torch.matmul(queries, keys.transpose(-1, -2)).float() * self.scale
        if self.softcap is not None:
            scores = scores.div_(self.softcap).tanh_().mul_(self.softcap)
        scores += mask
        if sinks is None:
            weights = torch.softmax(scores, dim=-1)
        else:
            # The sink takes part in the normalisation only: a larger denominator.
            sinks = sinks.float()
            peak = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
            weights = (scores - peak).exp_()
            weights /= weights.sum(dim=-1, keepdim=True) + (sinks - peak).exp()
        return torch.matmul(weights.to(values.dtype), values)


def _bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> tuple[int, ...]:
    """Most bytes of a token's keys in a layer, and of its values."""
    if not layers:
        return ()
    dims = [(layer.kv_heads * layer.key_dim, layer.kv_heads * layer.value_dim) for layer in layers]
    return tuple(max(each) * int(dtype.itemsize) for each in zip(*dims, strict=True))


def gather_bytes(layers: Sequence[LayerShape], dtype: torch.dtype, longest: int) -> int:
    """Most bytes on a GPU for gathered contexts of at most ``longest`` tokens each."""
    sizes = [max(GATHER_BYTES, longest * each) for each in _bytes_per_token(layers, dtype)]
    return sum(size + size // 4 for size in sizes)
