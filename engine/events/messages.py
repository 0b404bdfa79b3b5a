"""KV events as vLLM 0.32 encodes them.

A batch is an array, each event a map with its ``type``.
Blocks have names of 64 bits, as vLLM has by default: the same that routers of the mesh get
(:func:`engine.pieces.pool.prefix_names`).
"""

from __future__ import annotations

import msgspec

MEDIUM = "GPU"
"""vLLM's word for the cache that steps read, on a CPU, too."""


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    """Consecutive blocks of one context that the prefix index has now."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """The block before the first; None where that is the first of its context."""
    token_ids: list[int]
    """Tokens of all blocks, one after the other."""
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None
    """One entry per block: a cache salt for the first block of a context."""
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True, gc=False):
    """Blocks that the prefix index has no more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The prefix index is empty."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Batch of KV events from one turn of the step loop."""

    ts: float
    """Seconds since 1970."""
    events: list[KvEvent]
    data_parallel_rank: int | None = None
