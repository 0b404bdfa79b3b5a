"""Identity of a KV cache: blocks fit all caches of the same one (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

FORMAT = 3
"""Raised with each change of what a block's bytes mean beside the facts below."""


class CacheFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that decide the bytes of a block with given tokens."""

    numerics: str
    """Fingerprint of the numerics class: model, data type, kernels, versions."""
    dtype: str
    """Data type of keys and values as they are stored."""
    block_size: int
    """Tokens of a block."""
    layout: Sequence[int]
    """Bytes of a block in each tensor of the cache, in order."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    weights: str = ""
    """Digest of all bytes of the weights; the class has a shortened one."""
    shards: Sequence[int] = ()
    """Number of tensors of each worker, by stage, then rank."""
    boundaries: Sequence[tuple[str, int, str]] | msgspec.UnsetType = msgspec.UNSET
    """Label, grid and form of each boundary kind; not set without such kinds."""


def identity_of(facts: CacheFacts) -> str:
    """Digest of a cache's facts: caches with the same one can exchange blocks."""
    text = msgspec.json.encode((FORMAT, facts), order="sorted")
    return hashlib.blake2b(text, digest_size=12).hexdigest()
