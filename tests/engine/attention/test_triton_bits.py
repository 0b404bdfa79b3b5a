"""Bits of a token's attention in Triton follow its own context alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.attention import splits, triton_paged
from engine.attention.base import LayerShape, PackedRows, Scoring
from engine.attention.triton_paged import TritonPagedAttention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
BLOCK_SIZE, PAGES = 8, 16
TOKENS = BLOCK_SIZE * PAGES
HEADS = 4
LENGTHS = [1, 16, 17, 40, 64, 65, 100, 128]
"""Tokens of the requests, around the ends of parts and beyond where parts grow."""
CASES = {
    "plain": (LayerShape(2, 16, 16, None), None, False),
    "window": (LayerShape(1, 16, 16, 20), None, False),
    "long window": (LayerShape(2, 16, 16, 90), 1.5, True),
    "odd": (LayerShape(2, 24, 8, None), None, True),
}
cases = pytest.mark.parametrize("case", CASES)


class Requests:
    """Requests whose keys and values are cached but for a step's own."""

    def __init__(self, case: str) -> None:
        self.shape, self.softcap, has_sinks = CASES[case]
        self.numbers = torch.Generator().manual_seed(7)
        self.sinks = self.random(HEADS) if has_sinks else None
        kv_heads = self.shape.kv_heads
        self.query = self.random(len(LENGTHS), TOKENS, HEADS, self.shape.key_dim)
        self.key = self.random(len(LENGTHS), TOKENS, kv_heads, self.shape.key_dim)
        self.value = self.random(len(LENGTHS), TOKENS, kv_heads, self.shape.value_dim)
        order = np.random.default_rng(7).permutation(len(LENGTHS) * PAGES)
        self.tables = order.reshape(len(LENGTHS), PAGES).astype(np.int32)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.numbers).to(DEVICE, DTYPE)

    def cache(self, *, programs: int = 64, fixed: bool = False) -> TritonPagedAttention:
        """A cache that holds all tokens of all requests."""
        cache = TritonPagedAttention(
            [self.shape],
            num_blocks=len(LENGTHS) * PAGES,
            block_size=BLOCK_SIZE,
            dtype=DTYPE,
            device=DEVICE,
            programs=programs,
            fixed=fixed,
        )
        slots = torch.from_numpy(self.tables[..., None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).flatten(1)
        for request, mine in enumerate(slots.long().to(DEVICE)):
            cache.keys[0][mine] = self.key[request]
            cache.values[0][mine] = self.value[request]
        return cache

    def pack(self, rows: Sequence[tuple[int, int, int]]) -> tuple[PackedRows, tuple[torch.Tensor, ...]]:
        """Rows of a step, and its queries, keys and values [heads, tokens, dim]."""
        requests, starts, counts = (np.array(column) for column in zip(*rows, strict=True))
        positions = np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)])
        packed = PackedRows(starts, counts, self.tables[requests], positions, int((counts == 1).sum()))
        of_token = torch.from_numpy(np.repeat(requests, counts)).to(DEVICE)
        where = torch.from_numpy(positions).to(DEVICE)
        tensors = (self.query, self.key, self.value)
        return packed, tuple(each[of_token, where].transpose(0, 1) for each in tensors)

    def eager(self, rows: Sequence[tuple[int, int, int]], cache: TritonPagedAttention) -> torch.Tensor:
        packed, (query, key, value) = self.pack(rows)
        return cache.plan(packed).attend(0, query, key, value, Scoring(0.3, self.softcap, self.sinks))

    def captured(self, requests: Sequence[int], size: int, cache: TritonPagedAttention) -> torch.Tensor:
        """The last tokens of requests, as a graph for ``size`` rows computes them."""
        buffers = cache.decode_buffers(size, TOKENS)
        packed, tensors = self.pack([(request, LENGTHS[request] - 1, 1) for request in requests])
        buffers.fill(packed, size)
        plan = buffers.plan(size)
        missing = size - len(requests)
        query, key, value = (
            torch.cat([each, each.new_zeros(each.shape[0], missing, each.shape[2])], 1) for each in tensors
        )
        return plan.attend(0, query, key, value, Scoring(0.3, self.softcap, self.sinks))[: len(requests)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small parts and tiles; contexts beyond 64 tokens have parts of twice the size."""
    monkeypatch.setattr(splits, "SPLIT_KEYS", 16)
    monkeypatch.setattr(splits, "MOST_PARTS", 4)
    monkeypatch.setattr(triton_paged, "MOST_KEYS", 16)
    monkeypatch.setattr(triton_paged, "QUERY_LINES", 12)
    monkeypatch.setattr(triton_paged, "FIXED_LINES", 12)


def alone(requests: Requests, cache: TritonPagedAttention) -> list[torch.Tensor]:
    return [requests.eager([(each, length - 1, 1)], cache)[0] for each, length in enumerate(LENGTHS)]


@cases
def test_neighbours_graphs_and_the_device_change_no_bit(case: str) -> None:
    """A row alone and beside others, in two graphs, by few and many programs."""
    requests = Requests(case)
    expected = alone(requests, requests.cache(programs=264))
    everyone = [7, 6, 5, 4, 3, 2, 1, 0]
    for crowd, programs, size in (
        ([3, 0], 1, None),
        ([3, 7], 264, 2),
        (everyone, 10, None),
        (everyone, 10, 9),
    ):
        cache = requests.cache(programs=programs)
        if size is None:
            found = requests.eager([(each, LENGTHS[each] - 1, 1) for each in crowd], cache)
        else:
            found = requests.captured(crowd, size, cache)
        assert all(torch.equal(row, expected[each]) for each, row in zip(crowd, found, strict=True))


@pytest.mark.each_push
@cases
def test_chunks_change_no_bit(case: str) -> None:
    """Each token of a prompt computed whole, in chunks beside another row, and alone."""
    requests = Requests(case)
    cache = requests.cache(fixed=True)
    whole = requests.eager([(7, 0, TOKENS)], cache)
    for begin, end in ((14, 18), (61, 70), (120, 128)):
        chunk = requests.eager([(0, 0, 1), (7, begin, end - begin)], cache)
        assert torch.equal(chunk[1:], whole[begin:end])
    at = [0, 15, 16, 63, 64, 127]
    singles = requests.eager([(7, position, 1) for position in at], cache)
    assert torch.equal(singles, whole[at])


def test_where_the_parts_end_decides_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other parts give other bits, so that the tests above can fail."""
    requests = Requests("plain")
    expected = alone(requests, requests.cache())
    monkeypatch.setattr(splits, "SPLIT_KEYS", 32)
    assert not all(map(torch.equal, alone(requests, requests.cache()), expected))
