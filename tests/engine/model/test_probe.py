"""Paged attention against the definition: one query, one head at a time, over whole sequences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.attention import make_attention, torch_paged
from engine.attention.base import LayerShape, PackedRows, Scoring

BLOCK_SIZE = 4
NUM_BLOCKS = 200


class Requests:
    """Requests with random keys and values for each layer, computed a row at a time."""

    def __init__(self, layers: list[LayerShape], group: int, lengths: list[int], seed: int) -> None:
        self.layers = layers
        self.group = group
        self.numbers = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self.tensors = [  # per request, per layer: queries, keys, values of [heads, length, dim]
            [
                (
                    torch.randn(layer.kv_heads * group, length, layer.key_dim, generator=generator),
                    torch.randn(layer.kv_heads, length, layer.key_dim, generator=generator),
                    torch.randn(layer.kv_heads, length, layer.value_dim, generator=generator),
                )
                for layer in layers
            ]
            for length in lengths
        ]
        self.lengths = lengths
        self.done = [0] * len(lengths)
        width = -(-max(lengths) // BLOCK_SIZE)
        blocks = self.numbers.permutation(NUM_BLOCKS)[: width * len(lengths)]
        self.tables = blocks.reshape(len(lengths), width).astype(np.int32)

    def next_rows(self, longest: int) -> list[tuple[int, int, int]]:
        """Random (request, start, count) of a step, rows of one token first.

        None when all is computed.
        """
        unfinished = [request for request, length in enumerate(self.lengths) if self.done[request] < length]
        chosen = [request for request in unfinished if self.numbers.random() < 0.8] or unfinished
        rows = []
        for request in chosen:
            left = self.lengths[request] - self.done[request]
            count = min(int(self.numbers.integers(1, longest + 1)), left)
            rows.append((request, self.done[request], count))
            self.done[request] += count
        return sorted(rows, key=lambda row: row[2] > 1)

    def pack(self, rows: list[tuple[int, int, int]]) -> PackedRows:
        starts = np.array([start for _, start, _ in rows])
        counts = np.array([count for _, _, count in rows])
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
        tables = self.tables[[request for request, _, _ in rows]]
        return PackedRows(starts, counts, tables, positions, int((counts == 1).sum()))

    def packed_tensors(
        self, rows: list[tuple[int, int, int]], layer: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = [
            [tensor[:, start : start + count] for tensor in self.tensors[request][layer]]
            for request, start, count in rows
        ]
        query, key, value = (torch.cat(column, dim=1) for column in zip(*parts, strict=True))
        return query, key, value

    def expected(
        self,
        rows: list[tuple[int, int, int]],
        layer: int,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[tokens, heads, value_dim], by the definition, in float64."""
        window, chunk = self.layers[layer].window or math.inf, self.layers[layer].chunk
        lines = []
        for request, start, count in rows:
            query, key, value = (tensor.double() for tensor in self.tensors[request][layer])
            key, value = (tensor.repeat_interleave(self.group, dim=0) for tensor in (key, value))
            for position in range(start, start + count):
                seen = [k for k in range(position + 1) if position - k < window]
                if chunk is not None:
                    seen = [k for k in seen if k // chunk == position // chunk]
                scores = torch.einsum("hd,hkd->hk", query[:, position], key[:, seen]) * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
                weights = torch.softmax(scores, dim=1)[:, : len(seen)]
                lines.append(torch.einsum("hk,hkd->hd", weights, value[:, seen]))
        return torch.stack(lines)


SHAPES = {
    "full": [LayerShape(2, 16, 16, None)] * 2,
    "one kv head": [LayerShape(1, 8, 8, None)],
    "window": [LayerShape(2, 16, 16, 7)],
    "window of one": [LayerShape(2, 16, 16, 1)],
    "window of a block": [LayerShape(2, 16, 16, BLOCK_SIZE)],
    "huge window": [LayerShape(2, 16, 16, 100_000)],
    "alternating": [
        LayerShape(2, 16, 16, 9),
        LayerShape(2, 16, 16, None),
        LayerShape(2, 16, 16, 9),
        LayerShape(2, 16, 16, 30),
    ],
    "chunks": [LayerShape(2, 16, 16, None, chunk=7), LayerShape(2, 16, 16, None)],
    "chunks of one": [LayerShape(1, 8, 8, None, chunk=1)],
    "different dims": [LayerShape(4, 24, 16, None), LayerShape(2, 8, 20, 6)],
}


@pytest.mark.parametrize("special", ["plain", "softcap", "sinks", "both"])
@pytest.mark.parametrize("shapes", SHAPES)
def test_equals_the_definition(shapes: str, special: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = SHAPES[shapes]
    softcap = 1.5 if special in ("softcap", "both") else None
    for seed, (longest, group) in enumerate([(40, 1), (9, 3), (1, 2), (3, 2)]):
        if seed == 0:  # tiles and head groups far smaller than in real use
            monkeypatch.setattr(torch_paged, "MASK_ELEMENTS", 40)
            monkeypatch.setattr(torch_paged, "SCORE_ELEMENTS", 100)
            monkeypatch.setattr(torch_paged, "MIN_TILE", 5)
            monkeypatch.setattr(torch_paged, "GROUP_BLOCKS", 1)
        else:
            monkeypatch.undo()
        cache = make_attention(
            layers,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        lengths = [1, 45, 17, 2, 33, 3] if longest > 3 else [3, 21, 5]
        requests = Requests(layers, group, lengths, seed)
        while rows := requests.next_rows(longest):
            plan = cache.plan(requests.pack(rows))
            for layer, shape in enumerate(layers):
                heads = shape.kv_heads * group
                sinks = torch.linspace(-1, 2, heads) if special in ("sinks", "both") else None
                query, key, value = requests.packed_tensors(rows, layer)
                found = plan.attend(layer, query, key, value, Scoring(0.3, softcap, sinks))
                assert found.shape == (query.shape[1], heads, shape.value_dim)
                expected = requests.expected(rows, layer, 0.3, softcap, sinks)
                torch.testing.assert_close(found.double(), expected, atol=2e-5, rtol=1e-4)
        assert requests.done == lengths


def test_stored_where_the_tables_say() -> None:
    """A token's key and value lie in slot block * block_size + offset.

    Nothing else is touched.
    """
    layer = LayerShape(1, 2, 3, None)
    cache = torch_paged.TorchPagedAttention(
        [layer], num_blocks=6, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu")
    )
    tables = np.array([[4, 1]], dtype=np.int32)
    packed = PackedRows(np.array([0]), np.array([6]), tables, np.arange(6), 0)
    key = torch.arange(12.0).view(1, 6, 2) + 1
    value = torch.ones(1, 6, 3)
    cache.plan(packed).attend(0, torch.zeros(1, 6, 2), key, value, Scoring(1.0))
    expected = torch.zeros(24, 1, 2)
    expected[[16, 17, 18, 19, 4, 5], 0] = key[0]
    assert torch.equal(cache.keys[0], expected)
    assert cache.values[0].sum() == 18
    assert "blocks=6" in repr(cache)


def test_rows_of_similar_length_stay_together() -> None:
    """Very different contexts are not padded to the longest; like ones are one batch."""
    cache = torch_paged.TorchPagedAttention(
        [LayerShape(1, 8, 8, None)],
        num_blocks=1,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    for starts, batches in (([400, 395, 390], [3]), ([3, 4000, 5, 3990], [2, 2]), ([9, 30], [2])):
        count = len(starts)
        packed = PackedRows(
            np.array(starts),
            np.ones(count, dtype=np.int64),
            np.zeros((count, 1001), dtype=np.int32),
            np.array(starts),
            count,
        )
        assert [singles.batch for singles in cache.plan(packed)._views[0].singles] == batches
