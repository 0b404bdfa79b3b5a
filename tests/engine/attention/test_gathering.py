"""Contexts that TORCH_SDPA gathers: on a GPU a few rows at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.attention import torch_paged
from engine.attention.base import WHOLE_CONTEXT, LayerShape, PackedRows, Scoring
from engine.attention.torch_paged import GATHER_BYTES, TorchPagedAttention, gather_bytes

LAYERS = [LayerShape(2, 16, 8, None), LayerShape(4, 8, 8, 20)]
BLOCK_SIZE, NUM_BLOCKS = 4, 300
CPU = torch.device("cpu")


def test_memory_for_gathered_contexts_is_known_beforehand() -> None:
    few = [LayerShape(8, 128, 64, None)]
    assert gather_bytes(few, torch.bfloat16, 4096) == 2 * GATHER_BYTES * 5 // 4
    long = GATHER_BYTES // (8 * 128 * 2) + 4000  # keys of one request alone are more
    assert gather_bytes(few, torch.bfloat16, long) == (long * 8 * 128 * 2 + GATHER_BYTES) * 5 // 4
    assert gather_bytes([], torch.bfloat16, 4096) == 0


def test_rows_are_gathered_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same results, and in no more memory than was counted."""
    numbers = torch.Generator().manual_seed(2)
    starts = np.array([60, 3, 61, 9, 0, 40, 17, 33])
    tables = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    packed = PackedRows(starts, np.ones_like(starts), tables, starts, len(starts))
    tensors = [
        [torch.randn(heads, 8, dim, generator=numbers) for heads, dim in ((8, s.key_dim), (s.kv_heads, s.key_dim), (s.kv_heads, s.value_dim))]
        for s in LAYERS
    ]  # fmt: skip
    contents = [torch.randn(NUM_BLOCKS * BLOCK_SIZE, s.kv_heads, d, generator=numbers) for s in LAYERS for d in (s.key_dim, s.value_dim)]  # fmt: skip

    def attended() -> tuple[list[torch.Tensor], TorchPagedAttention]:
        cache = TorchPagedAttention(
            LAYERS, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU
        )
        for mine, given in zip(
            [t for pair in zip(cache.keys, cache.values, strict=True) for t in pair], contents, strict=True
        ):
            mine.copy_(given)
        plan = cache.plan(packed)
        return [plan.attend(i, q, k, v, Scoring(0.3)) for i, (q, k, v) in enumerate(tensors)], cache

    whole, _ = attended()
    most = 3 * 16  # blocks of three of the longest rows
    made = torch_paged._ViewBuilder
    monkeypatch.setattr(
        torch_paged,
        "_ViewBuilder",
        lambda rows, size, dtype, device, _: made(rows, size, dtype, device, most),
    )
    parts, cache = attended()
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    view = made(packed, BLOCK_SIZE, torch.float32, CPU, most).view(WHOLE_CONTEXT)
    assert len(view.singles) > 2
    assert max(len(each.blocks) for each in view.singles) <= most
    rows = sorted(row for each in view.singles if each.rows is not None for row in each.rows.tolist())
    assert rows == list(range(8))
    widths = [len(each.blocks) // each.batch for each in view.singles]
    assert any(before != after for before, after in pairwise(widths)), (
        "short rows are not padded to long ones"
    )
    monkeypatch.setattr(torch_paged, "GATHER_BYTES", most * BLOCK_SIZE * 32 * 4)
    assert sum(each.nbytes for each in cache._scratch.values()) <= gather_bytes(LAYERS, torch.float32, 64)
