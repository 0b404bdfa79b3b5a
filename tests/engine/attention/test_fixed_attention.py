"""Attention in blocks of fixed size: the same bits however rows are cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention import make_attention
from engine.attention.base import LayerShape, PackedRows, Scoring
from engine.attention.kv_codes import KVCodes
from engine.compute.fixed_blocks import FixedBlocks
from tests.nightly import NIGHTLY

LENGTHS = 1100, 530
"""Tokens of two requests: three tiles of keys, and two."""
BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}
CASES = {  # layer, query heads per KV head, soft cap, sinks
    "full": (LayerShape(2, 32, 32, None), 4, None, False),
    "one head": (LayerShape(1, 24, 24, None), 1, None, False),
    "many queries": (LayerShape(1, 16, 16, None), 20, None, False),
    "narrow window": (LayerShape(2, 16, 16, 12), 3, None, True),
    "wide window": (LayerShape(2, 16, 16, 600), 2, None, True),
    "chunks": (LayerShape(2, 16, 16, None, chunk=520), 2, None, False),
    "narrow values": (LayerShape(3, 24, 20, None), 1, None, False),
    "narrow keys": (LayerShape(2, 16, 24, None), 2, None, True),
    "soft cap": (LayerShape(2, 16, 16, 600), 2, 1.5, False),
}


class Rows:
    """Attention over one layer, with made-up numbers for each token of two requests."""

    def __init__(self, case: str, dtype: torch.dtype) -> None:
        self.layer, group, self.softcap, has_sinks = CASES[case]
        heads = self.layer.kv_heads * group
        generator = torch.Generator().manual_seed(4)

        def made(width: int, dim: int) -> list[torch.Tensor]:
            shapes = [(length, width, dim) for length in LENGTHS]
            return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

        self.query = made(heads, self.layer.key_dim)
        self.key = made(self.layer.kv_heads, self.layer.key_dim)
        self.value = made(self.layer.kv_heads, self.layer.value_dim)
        self.sinks = torch.linspace(-1, 2, heads).to(dtype) if has_sinks else None
        self.dtype = dtype
        self.pages = -(-max(LENGTHS) // BLOCK_SIZE)

    def run(
        self, backend: str, steps: list[list[tuple[int, int, int]]], codes: KVCodes | None = None
    ) -> torch.Tensor:
        """Results of the first request's tokens, after steps of rows (request, first token, end)."""
        cache = make_attention(
            [self.layer],
            num_blocks=2 * self.pages,
            block_size=BLOCK_SIZE,
            dtype=self.dtype,
            device=torch.device("cpu"),
            backend=backend,  # type: ignore[arg-type]
            codes=codes,
        )
        tables = np.random.default_rng(1).permutation(2 * self.pages).reshape(2, -1).astype(np.int32)
        found = []
        for rows in steps:
            requests, begins, ends = (np.array(column) for column in zip(*rows, strict=True))
            counts = ends - begins
            positions = np.concatenate([np.arange(begin, end) for _, begin, end in rows])
            packed = PackedRows(begins, counts, tables[requests], positions, int((counts == 1).sum()))
            query, key, value = (
                torch.cat([each[request][begin:end] for request, begin, end in rows]).transpose(0, 1)
                for each in (self.query, self.key, self.value)
            )
            with torch.inference_mode(), FixedBlocks():
                attended = cache.plan(packed).attend(
                    0, query, key, value, Scoring(0.3, self.softcap, self.sinks)
                )
            found.append(attended[torch.from_numpy(np.repeat(requests, counts) == 0)])
        return torch.cat(found)


WHOLE = [[(0, 0, LENGTHS[0])]]
PIECES = [
    [(1, 0, 300), (0, 0, 513)],
    [(0, 513, 514), (1, 300, 301)],
    [(1, 301, 302), (0, 514, 800)],
    [(0, 800, 1098), (1, 302, 530)],
    [(0, 1098, 1099), (1, 17, 18)],
    [(0, 1099, 1100)],
]


@pytest.mark.parametrize("dtype", TOLERANCE if NIGHTLY else [torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_pieces_and_neighbours_change_no_bit(case: str, dtype: torch.dtype) -> None:
    rows, threads = Rows(case, dtype), torch.get_num_threads()
    whole = rows.run("TORCH_FIXED", WHOLE)
    torch.set_num_threads(3)
    try:
        pieces = rows.run("TORCH_FIXED", PIECES)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(whole, pieces)
    other = rows.run("TORCH_SDPA", WHOLE)
    torch.testing.assert_close(whole, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("codes", ["int8", "fp8"])
@pytest.mark.parametrize("case", ["full", "narrow window", "chunks", "narrow values", "soft cap"])
def test_codes_are_the_same_in_pieces(case: str, codes: KVCodes) -> None:
    rows = Rows(case, torch.bfloat16)
    whole = rows.run("TORCH_FIXED", WHOLE, codes)
    assert torch.equal(whole, rows.run("TORCH_FIXED", PIECES, codes))
    for steps in (WHOLE, PIECES):  # a prompt that is all in one step sees what is kept of its keys, too
        other = rows.run("TORCH_SDPA", steps, codes)
        torch.testing.assert_close(whole, other, atol=2e-2, rtol=2e-2)
