"""Paged attention in plain torch by blocks of fixed size.

A token's bits depend on its own context alone. The cache is that of :mod:`engine.attention.torch_paged`.
Queries are computed in blocks of a fixed number of rows: the query heads of a KV head, for one token or for
a few of one request. Keys are gathered in tiles of :data:`KEY_TILE` that begin at its multiples, counted
from the request's first token. torch's fused kernel sums tile by tile, and a masked key adds exactly
nothing. So neither the cut of a prompt into steps nor the other requests of a step change a sum.

To be used under :class:`engine.compute.fixed_blocks.FixedBlocks`, for what is not the fused kernel's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention.base import Int64s, KeyChoice, KeyReach, PackedRows, Scoring
from engine.attention.torch_paged import MASK_ELEMENTS, MIN_TILE, StepOverPages, TorchPagedAttention
from engine.attention.transfer import upload

KEY_TILE = 512
"""Keys that torch's fused kernel on the CPU sums at once."""
QUERY_ROWS = 16
"""Rows of queries in a block, or a multiple: zeros fill it up."""
HIDDEN = {torch.float32: -1e30, torch.bfloat16: -1e30, torch.float16: -3e4}
"""Number that hides a key, by data type.

It is finite, for in a tile of a window all keys may be hidden.
"""


@dataclass(frozen=True)
class _Part:
    """Blocks of queries that are computed in one call."""

    tokens: torch.Tensor
    """Indices [blocks, tokens per block] of the queries in the step.

    A block that is not full repeats a token.
    """
    places: torch.Tensor
    """[results] where each result stands among [blocks * tokens per block]."""
    into: torch.Tensor
    """[results] the tokens whose results these are."""
    slots: torch.Tensor
    """[contexts * keys] slots of the cache.

    There is one context for all blocks, or one for each.
    """
    num_contexts: int
    mask: torch.Tensor
    """[blocks, 1, tokens per block, keys], added to the scores."""
    rows: Int64s
    """[contexts] the rows of the step that these are."""

    def mask_of(self, chosen: KeyChoice, first_tokens: Int64s) -> torch.Tensor:
        """[blocks, groups, tokens per block, keys]: the mask where queries attend to chosen keys."""
        blocks = self.tokens.split(1) if self.num_contexts > 1 else (self.tokens,)
        found = []
        for row, tokens in zip(self.rows.tolist(), blocks, strict=True):
            visible = chosen.visible[row][:, tokens - int(first_tokens[row])]
            visible = F.pad(visible, (0, self.mask.shape[-1] - visible.shape[-1]))
            found.append(visible.transpose(0, 1))
        return torch.where(torch.cat(found), self.mask, HIDDEN[self.mask.dtype])


class FixedPagedAttention(TorchPagedAttention):
    """The KV cache of one model on a CPU. Implements ``base.PagedAttention``."""

    def plan(self, rows: PackedRows) -> FixedAttentionPlan:  # type: ignore[override]
        """Find the slots of a step's tokens; see ``base.PagedAttention``."""
        row_of_token = np.repeat(np.arange(len(rows.starts)), rows.counts)
        return FixedAttentionPlan(
            self, rows, upload(self.slots(rows, row_of_token, rows.positions), self.device)
        )

    def slots(self, rows: PackedRows, row: Int64s | int, positions: Int64s) -> Int64s:
        """Slots of positions of requests, which are those of rows of a step."""
        blocks: Int64s = rows.block_tables[row, positions // self.block_size].astype(np.int64)
        found: Int64s = blocks * self.block_size + positions % self.block_size
        return found

    def index_products(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """See ``key_choice.IndexCache``: in tiles of one number of keys."""
        padded = F.pad(keys, (0, 0, 0, -len(keys) % KEY_TILE))
        return torch.cat([F.linear(queries, tile) for tile in padded.split(KEY_TILE)], dim=1)[:, : len(keys)]


class FixedAttentionPlan(StepOverPages[FixedPagedAttention]):
    """One step over a :class:`FixedPagedAttention`. Implements ``base.AttentionPlan``."""

    def __init__(self, cache: FixedPagedAttention, rows: PackedRows, slots: torch.Tensor) -> None:
        super().__init__(cache, rows, slots)
        self._first_tokens = np.cumsum(rows.counts) - rows.counts
        self._parts: dict[tuple[KeyReach, int, int], list[_Part]] = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
    ) -> torch.Tensor:
        """See ``base.AttentionPlan.attend``."""
        cache, (scale, softcap, sinks, chosen) = self._cache, scoring
        cache.store(layer, self._slots, key.transpose(0, 1), value.transpose(0, 1))
        heads, num_tokens, dim = query.shape
        kv_heads, value_dim = cache.values[layer].shape[1:]
        group = heads // kv_heads
        queries = query.transpose(0, 1).reshape(num_tokens, kv_heads, group, dim)
        attended = query.new_empty(num_tokens, heads, value_dim)
        # For a single block of a single head torch would use all its threads inside of each product.
        least = 2 if kv_heads == 1 else 1
        for part in self._parts_of(cache.layers[layer].reach, max(QUERY_ROWS // group, 1), least):
            blocks, per_block = part.tokens.shape
            contexts = part.num_contexts, -1, kv_heads
            keys, values = cache.select(layer, part.slots)
            keys = keys.view(*contexts, dim).transpose(1, 2)
            values = values.view(*contexts, value_dim).transpose(1, 2)
            used = per_block * group
            rows = queries[part.tokens].permute(0, 2, 1, 3, 4).reshape(blocks, kv_heads, used, dim)
            mask = part.mask
            if chosen is not None:
                mask = part.mask_of(chosen, self._first_tokens)
            mask = mask.repeat_interleave(group, dim=2)
            if missing := -used % QUERY_ROWS:
                rows, mask = F.pad(rows, (0, 0, 0, missing)), F.pad(mask, (0, 0, 0, missing))
            compute = _fused if softcap is None else partial(_capped, softcap)
            found, sums = compute(
                rows,
                keys.expand(blocks, -1, -1, -1),
                values.expand(blocks, -1, -1, -1),
                mask,
                scale,
            )
            found = found[:, :, :used].view(blocks, kv_heads, per_block, group, value_dim)
            if sinks is not None:  # a sink takes part in the normalisation only: a larger denominator
                logits = sums[:, :, :used].view(blocks, kv_heads, per_block, group)
                share = torch.sigmoid(logits - sinks.float().view(kv_heads, 1, group))
                found = (found.float() * share.unsqueeze(-1)).to(query.dtype)
            found = found.transpose(1, 2).reshape(blocks * per_block, heads, value_dim)
            attended.index_copy_(0, part.into, found.index_select(0, part.places))
        return attended

    def _parts_of(self, reach: KeyReach, per_block: int, least: int) -> list[_Part]:
        """The calls of layers with a reach; at least so many blocks each."""
        shape = reach, per_block, least
        if shape not in self._parts:
            parts = _Parts(self._cache, self._rows, *shape)
            self._parts[shape] = [*parts.of_single_tokens(), *parts.of_longer_rows()]
        return self._parts[shape]


class _Parts:
    """Cuts the rows of a step into parts."""

    def __init__(
        self, cache: FixedPagedAttention, rows: PackedRows, reach: KeyReach, per_block: int, least: int
    ) -> None:
        self._cache = cache
        self._rows = rows
        self._reach = reach
        self._per_block = per_block
        self._least = least

    def of_single_tokens(self) -> Iterator[_Part]:
        """Rows of one token: those whose contexts have as many tiles go together."""
        positions = self._rows.starts[: self._rows.num_single]
        firsts = self._first_key(positions)
        widths = (positions - firsts) // KEY_TILE + 1
        for width in np.unique(widths):
            rows = (widths == width).nonzero()[0]
            blocks = np.resize(rows, max(len(rows), self._least))
            tokens = np.repeat(blocks[:, None], self._per_block, axis=1)
            seen = firsts[blocks][:, None] + np.arange(width * KEY_TILE)
            within = np.minimum(seen, positions[blocks][:, None])
            slots = self._cache.slots(self._rows, blocks[:, None], within)
            at = positions[tokens]
            places = np.arange(len(rows)) * self._per_block
            yield self._part(tokens, places, rows, slots, blocks, seen, at, at)

    def of_longer_rows(self) -> Iterator[_Part]:
        """Rows of several tokens, one after the other."""
        first_tokens = np.cumsum(self._rows.counts) - self._rows.counts
        for row in range(self._rows.num_single, len(self._rows.starts)):
            start, count = int(self._rows.starts[row]), int(self._rows.counts[row])
            most = max(MASK_ELEMENTS // (start + count), MIN_TILE)
            if seen := self._reach.window or self._reach.chunk:
                most = min(most, max(seen, MIN_TILE))
            for begin in range(start, start + count, most):
                end = min(begin + most, start + count)
                yield self._of_tokens(row, begin, end, int(first_tokens[row]) - start)

    def _of_tokens(self, row: int, begin: int, end: int, offset: int) -> _Part:
        """Tokens at positions [begin, end) of a request.

        In the step they are ``offset`` further on.
        """
        places = np.arange(end - begin)
        num_blocks = max(-(-len(places) // self._per_block), self._least)
        positions = begin + np.minimum(np.arange(num_blocks * self._per_block), len(places) - 1)
        at = positions.reshape(num_blocks, self._per_block)
        sees = self._rows.seen_within(self._reach)
        until = at if sees is None else sees[at + offset]
        first, last = int(self._first_key(np.array(begin))), int(until.max())
        seen = np.arange(first, first + ((last - first) // KEY_TILE + 1) * KEY_TILE)
        slots = self._cache.slots(self._rows, row, np.minimum(seen, last))
        rows = np.array([row])
        return self._part(at + offset, places, begin + places + offset, slots, rows, seen[None], at, until)

    def _first_key(self, positions: Int64s) -> Int64s:
        """First key of the first tile that queries at these positions can see."""
        return self._reach.first_key(positions) // KEY_TILE * KEY_TILE

    def _part(
        self,
        tokens: Int64s,
        places: Int64s,
        into: Int64s,
        slots: Int64s,
        rows: Int64s,
        seen: Int64s,
        at: Int64s,
        until: Int64s,
    ) -> _Part:
        """``seen`` [contexts, keys] are positions of keys, ``at`` [blocks, tokens per block] of queries.

        ``until``: of the last key that each query sees.
        """
        cache = self._cache
        visible = seen[:, None, :] <= until[:, :, None]
        if not self._reach.is_whole:
            visible &= seen[:, None, :] >= self._reach.first_key(at)[:, :, None]
        mask = torch.zeros(visible.shape, dtype=cache.dtype)
        mask.masked_fill_(torch.from_numpy(~visible), HIDDEN[cache.dtype])
        return _Part(
            torch.from_numpy(tokens),
            torch.from_numpy(places),
            torch.from_numpy(into),
            torch.from_numpy(slots.reshape(-1)),
            len(rows),
            mask.unsqueeze(1),
            rows,
        )


def _fused(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attended [blocks, heads, rows, dim], and logarithms [blocks, heads, rows] of the sums of weights."""
    key_dim, value_dim = keys.shape[-1], values.shape[-1]
    if missing := max(key_dim - value_dim, 0):  # the kernel wants one size
        values = F.pad(values, (0, missing))
    elif missing := value_dim - key_dim:
        queries, keys = F.pad(queries, (0, missing)), F.pad(keys, (0, missing))
    found, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        queries, keys, values, 0.0, False, attn_mask=mask, scale=scale
    )
    return found[..., :value_dim], sums


def _capped(
    softcap: float,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_fused`, with soft-capped scores, which no fused kernel has."""
    shape = *queries.shape[:3], 1
    most = torch.full(shape, HIDDEN[torch.float32])
    total, attended = torch.zeros(shape), torch.zeros(*queries.shape[:3], values.shape[3])
    for begin in range(0, keys.shape[2], KEY_TILE):
        tile = slice(begin, begin + KEY_TILE)
        scores = torch.matmul(queries, keys[:, :, tile].transpose(2, 3)).float() * scale
        scores = torch.tanh(scores / softcap) * softcap + mask[..., tile].float()
        peak = torch.maximum(scores.amax(dim=-1, keepdim=True), most)
        weights, before = torch.exp(scores - peak), torch.exp(most - peak)
        total = total * before + weights.sum(dim=-1, keepdim=True)
        of_tile = torch.matmul(weights.to(values.dtype), values[:, :, tile])
        attended, most = attended * before + of_tile.float(), peak
    return (attended / total).to(values.dtype), (most + torch.log(total)).squeeze(-1)
