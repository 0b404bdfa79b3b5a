"""Why prompts do not go to ``torch.nn.attention.varlen``: what it lacks, as this torch has it.

Where one of these fails, the reason in docs/design/gpu-tests.md has gone.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from engine.config import CacheConfig

FLASH_PAGE = 256
"""Tokens of which a page must have a multiple in FlashAttention 2, by its source."""


@pytest.mark.skipif(
    torch.__version__ < (2, 13),  # type: ignore[operator]  # torch compares it as a version
    reason="before torch 2.13 it has no block tables either",
)
def test_it_has_neither_soft_caps_nor_sinks() -> None:
    """``AttentionPlan.attend`` has both, so families that have them would need the other kernel as well."""
    parameters = set(inspect.signature(varlen_attn).parameters)
    assert {"window_size", "block_table", "seqused_k", "num_splits"} <= parameters
    assert not any("cap" in name or "sink" in name for name in parameters)


def test_it_computes_nothing_without_a_gpu() -> None:
    """So no test could compare one number of it with what it replaces."""
    query, lengths = torch.zeros(4, 2, 64, dtype=torch.bfloat16), torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(NotImplementedError, match="CPU"):
        varlen_attn(query, query, query, lengths, lengths, 4, 4, window_size=(-1, 0))


def test_our_blocks_are_smaller_than_its_pages() -> None:
    """So a prompt behind a cached prefix, or behind a chunk, could not take it."""
    assert CacheConfig().block_size % FLASH_PAGE != 0
