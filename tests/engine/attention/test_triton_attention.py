"""Triton kernels on a GPU or in Triton's interpreter, against the definition and torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention import splits, why_not_triton
from engine.attention.base import LayerShape, PackedRows, Scoring
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import CacheConfig, ModelConfig
from engine.model import choice
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.model.weights import load_model
from tests.engine.model.test_probe import BLOCK_SIZE, NUM_BLOCKS, SHAPES, Requests
from tests.engine.tiny_models import make_tiny_model

CACHE = CacheConfig(block_size=8)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if why_not_triton(DEVICE) is not None:
    raise ImportError(f"no Triton: {why_not_triton(DEVICE)}")  # it is part of the extra dev

from engine.attention import triton_kernels, triton_paged  # noqa: E402 (loads triton)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A maker of caches whose contexts are cut for ``programs``, with small tiles and splits."""
    monkeypatch.setattr(splits, "SPLIT_KEYS", 16)
    monkeypatch.setattr(triton_paged, "MOST_KEYS", 16)
    monkeypatch.setattr(triton_paged, "QUERY_LINES", 12)

    def make(layers, dtype=torch.float32, programs=64, *, fixed=False):
        return triton_paged.TritonPagedAttention(
            layers,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=dtype,
            device=DEVICE,
            programs=programs,
            fixed=fixed,
        )

    return make


CASES = [  # shapes, options, longest row, query heads per KV head, lengths of the requests
    pytest.param("full", "plain", 40, 1, [1, 45, 17], marks=pytest.mark.nightly),
    ("full", "plain", 9, 1, [1, 25, 7]),
    ("one kv head", "both", 9, 3, [2, 33, 3]),
    pytest.param("window", "plain", 9, 3, [1, 45, 17], marks=pytest.mark.nightly),
    ("window of one", "sinks", 3, 2, [3, 11]),
    pytest.param("window of a block", "softcap", 1, 2, [3, 11], marks=pytest.mark.nightly),
    ("huge window", "sinks", 20, 5, [21, 5]),
    pytest.param("alternating", "both", 12, 2, [40, 7], marks=pytest.mark.nightly),
    ("different dims", "plain", 25, 2, [33, 2, 6]),
]


@pytest.mark.parametrize(("shapes", "special", "longest", "group", "lengths"), CASES)
def test_equals_the_definition(shapes, special, longest, group, lengths, make) -> None:
    layers = SHAPES[shapes]
    softcap = 1.5 if special in ("softcap", "both") else None
    cache = make(layers)
    cut: list[int] = []
    splits_of = cache.splits
    cache.splits = lambda *arguments: cut.append(splits_of(*arguments)) or cut[-1]
    requests = Requests(layers, group, lengths, seed=len(lengths))
    requests.lengths = [length - 1 for length in lengths]  # the last token of each comes alone
    while rows := requests.next_rows(longest) or last_rows(requests, lengths):
        plan = cache.plan(requests.pack(rows))
        for layer, shape in enumerate(layers):
            heads = shape.kv_heads * group
            sinks = torch.linspace(-1, 2, heads, device=DEVICE) if special in ("sinks", "both") else None
            query, key, value = (t.to(DEVICE) for t in requests.packed_tensors(rows, layer))
            found = plan.attend(layer, query, key, value, Scoring(0.3, softcap, sinks))
            expected = requests.expected(rows, layer, 0.3, softcap, None if sinks is None else sinks.cpu())
            torch.testing.assert_close(found.cpu().double(), expected, atol=2e-5, rtol=1e-4)
    assert requests.done == lengths
    parts = max(splits.most_parts(max(lengths), layer.window) for layer in layers)
    assert max(cut, default=1) == parts


def last_rows(requests: Requests, lengths: list[int]) -> list[tuple[int, int, int]]:
    requests.lengths = lengths
    return requests.next_rows(1)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)]
)
def test_equals_the_other_backend(dtype, tolerance, make) -> None:
    """One cache's content and another's, of requests that share blocks, in each type."""
    layers = [LayerShape(2, 64, 64, None), LayerShape(2, 80, 48, 21)]
    ours = make(layers, dtype)
    other = TorchPagedAttention(
        layers, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=dtype, device=DEVICE
    )
    generator = torch.Generator().manual_seed(3)
    for mine, its, null in zip(
        ours.keys + ours.values, other.keys + other.values, [BLOCK_SIZE] * 4, strict=True
    ):
        its.copy_(torch.randn(its.shape, generator=generator))
        mine[:-null] = its
    numbers = np.random.default_rng(3)
    tables = numbers.permutation(NUM_BLOCKS)[:80].reshape(4, 20).astype(np.int32)
    tables[1, :9] = tables[0, :9]  # the same prefix
    starts, counts = np.array([70, 43, 36, 0]), np.array([1, 1, 17, 9])
    positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
    packed = PackedRows(starts, counts, tables, positions, 2)
    plans = ours.plan(packed), other.plan(packed)
    for layer, shape in enumerate(layers):
        heads, tokens = 6, len(positions)
        # as models give them: [tokens, heads, dim], seen from the other side
        query = (
            torch.randn(tokens, heads, shape.key_dim, generator=generator).to(DEVICE, dtype).transpose(0, 1)
        )
        key = torch.randn(tokens, 2, shape.key_dim, generator=generator).to(DEVICE, dtype).transpose(0, 1)
        value = torch.randn(tokens, 2, shape.value_dim, generator=generator).to(DEVICE, dtype).transpose(0, 1)
        found, expected = (
            plan.attend(layer, query, key, value, Scoring(shape.key_dim**-0.5)).float() for plan in plans
        )
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(ours.keys[layer][:-BLOCK_SIZE], other.keys[layer])
        assert torch.equal(ours.values[layer][:-BLOCK_SIZE], other.values[layer])


def load(tmp_path: Path, family: str, layers: int | None = None):
    directory = make_tiny_model(tmp_path / family, family, layers=layers)
    settings = ModelConfig(model=str(directory))
    return load_model(read_model_info(directory), settings, dtype=torch.float32, device=DEVICE)


class Forgetful:
    """:func:`triton_kernels.merge` that takes the first part only."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def launch(sums, peaks, totals, *rest, **options):
            for part in range(1, len(sums)):
                peaks[part] = float("-inf")
                totals[part] = 0.0
                sums[part] = 0.0
            self.kernel[grid](sums, peaks, totals, *rest, **options)

        return launch


def test_rows_of_all_lengths_are_merged(make) -> None:
    """Short contexts beside a long one have parts without keys, of which nothing is written."""
    layers = [LayerShape(2, 16, 16, None), LayerShape(2, 16, 16, 20)]
    ours = make(layers)
    other = TorchPagedAttention(
        layers, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=DEVICE
    )
    generator = torch.Generator().manual_seed(5)
    for mine, its in zip(ours.keys + ours.values, other.keys + other.values, strict=True):
        its.copy_(torch.randn(its.shape, generator=generator))
        mine[:-BLOCK_SIZE] = its
    starts = np.array([0, 15, 16, 3, 60, 31])
    tables = np.random.default_rng(3).permutation(NUM_BLOCKS)[:96].reshape(6, 16).astype(np.int32)
    packed = PackedRows(starts, np.ones_like(starts), tables, starts, len(starts))
    plans = ours.plan(packed), other.plan(packed)
    for layer, shape in enumerate(layers):
        query = torch.randn(4, 6, shape.key_dim, generator=generator).to(DEVICE)
        key, value = torch.randn(2, 2, 6, 16, generator=generator).to(DEVICE)
        found, expected = (plan.attend(layer, query, key, value, Scoring(0.3)) for plan in plans)
        assert ours.splits(6, shape, 61, splits.most_parts(61, shape.window)) > 1
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_backend_is_chosen_if_it_agrees(tmp_path: Path, monkeypatch) -> None:
    """Backends agree on soft caps and windows, and on sinks; contexts are cut, and not."""
    monkeypatch.setattr(choice, "PROMPT", 40)
    monkeypatch.setattr(splits, "SPLIT_KEYS", 16)
    monkeypatch.setattr(triton_paged, "MOST_KEYS", 16)
    monkeypatch.setattr(triton_paged, "QUERY_LINES", 32)
    monkeypatch.setattr(triton_paged, "WIDE_LINES", 32)
    cut: set[int] = set()
    splits_of = triton_paged.TritonPagedAttention.splits

    def count(cache, *arguments):
        cut.add(parts := splits_of(cache, *arguments))
        return parts

    monkeypatch.setattr(triton_paged.TritonPagedAttention, "splits", count)
    assert choice.choose_backend("TRITON_ATTN", load(tmp_path, "gemma2", 2), CACHE) == "TRITON_ATTN"
    assert cut >= {2, 3}
    model = load(tmp_path, "gpt_oss", 2)  # with a window and without
    assert choice.choose_backend("TRITON_ATTN", model, CACHE) == "TRITON_ATTN"
    on_its_own = "TRITON_ATTN" if DEVICE.type == "cuda" else "TORCH_SDPA"
    assert choice.choose_backend("auto", model, CACHE) == on_its_own
    codes = CacheConfig(block_size=8, kv_cache_dtype="int8")
    assert choice.choose_backend("auto", model, codes) == "TORCH_SDPA"

    def fail(size: int) -> int:
        raise RuntimeError(f"no tile of size {size}")

    slots = triton_paged.TritonPagedAttention.slots

    def lose(cache, blocks, positions):  # the keys of some tokens
        return np.where(positions == 9, 0, slots(cache, blocks, positions))

    with monkeypatch.context() as patch:
        patch.setattr(triton_paged.TritonPagedAttention, "slots", lose)
        with pytest.raises(CheckpointError, match="cannot serve: on a few steps of this model it differs"):
            choice.choose_backend("TRITON_ATTN", model, CACHE)
    with monkeypatch.context() as patch:
        patch.setattr(triton_kernels, "merge", Forgetful(triton_kernels.merge))
        with pytest.raises(CheckpointError, match="on a few steps of this model it differs"):
            choice.choose_backend("TRITON_ATTN", model, CACHE)
    with monkeypatch.context() as patch:
        patch.setattr(triton_paged, "_padded", fail)
        with pytest.raises(
            CheckpointError, match=r"its kernels fail: RuntimeError: no tile .*Leave the flag"
        ):
            choice.choose_backend("TRITON_ATTN", model, CACHE)


def test_tiles_of_wide_numbers_are_small() -> None:
    """In float32, 64 lines spill kilobytes of registers per thread."""
    for dtype, lines in ((torch.bfloat16, 64), (torch.float16, 64), (torch.float32, 16)):
        found = [triton_paged.queries_per_tile(group, dtype) for group in (1, 2, 5, 100)]
        assert found == [lines, lines // 2, lines // 5, 1]
