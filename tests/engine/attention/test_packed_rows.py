"""One array per decode step: what kernels read of its rows is what was packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention import why_not_triton
from engine.attention.base import LayerShape, PackedRows
from engine.attention.packed_rows import HEADER, pack_lines
from engine.attention.transfer import upload

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZE, NUM_BLOCKS, MOST_TOKENS = 4, 40, 50


def rows_of(seed: int, count: int) -> tuple[PackedRows, np.ndarray, np.ndarray]:
    """Rows of one token, their token ids, and indices of chosen tokens."""
    numbers = np.random.default_rng(seed)
    starts = numbers.integers(0, MOST_TOKENS, count)
    width = int(starts.max()) // SIZE + 1
    tables = numbers.integers(0, NUM_BLOCKS, (count, width)).astype(np.int32)
    ids = numbers.integers(0, 1 << 17, count)
    sources = np.where(numbers.random(count) < 0.5, numbers.integers(0, 8, count), -1)
    return PackedRows(starts, np.ones_like(starts), tables, starts.copy(), count), ids, sources


def test_a_line_has_token_source_position_and_blocks() -> None:
    packed, ids, sources = rows_of(0, 3)
    lines = pack_lines(packed, 5, NUM_BLOCKS, ids, sources)
    assert (lines.dtype, lines.flags.c_contiguous) == (np.int32, True)
    for index in range(3):
        expected = [ids[index], sources[index], packed.starts[index], 0, *packed.block_tables[index]]
        assert lines[index].tolist() == expected
    spare = [0, -1, 0, 0, *[NUM_BLOCKS] * packed.block_tables.shape[1]]
    assert lines[3:].tolist() == [spare] * 2
    assert HEADER * lines.itemsize % 16 == 0, "tables begin at a whole 16 bytes"
    bare = pack_lines(packed, 3, NUM_BLOCKS)
    assert bare[:, :2].tolist() == [[0, -1]] * 3


@pytest.mark.parametrize("seed", range(4))
def test_kernels_read_what_was_packed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also behind larger steps, whose lines are still there; one copy goes to the device."""
    assert why_not_triton(DEVICE) is None
    from engine.attention import triton_paged

    shape = LayerShape(1, 8, 8, None)
    cache = triton_paged.TritonPagedAttention(
        [shape], num_blocks=NUM_BLOCKS, block_size=SIZE, dtype=torch.float32, device=DEVICE, programs=4
    )
    buffers = cache.decode_buffers(6, MOST_TOKENS, 9)
    assert len(buffers.chosen) == 9
    chosen = torch.arange(9, device=DEVICE) + 1000
    buffers.chosen.copy_(chosen)
    uploads: list[tuple[int, ...]] = []

    def noted(array: np.ndarray, device: torch.device) -> torch.Tensor:
        uploads.append(array.shape)
        return upload(array, device)

    monkeypatch.setattr(triton_paged, "upload", noted)
    for count, size in ((6, 6), (1, 2), (3, 4)):
        packed, ids, sources = rows_of(10 * seed + count, count)
        uploads.clear()
        buffers.fill(packed, size, ids, sources)
        plan = buffers.plan(size)
        assert uploads == [(size, HEADER + packed.block_tables.shape[1])]
        expected = np.where(sources >= 0, sources + 1000, ids)
        blocks = packed.block_tables[np.arange(count), packed.starts // SIZE].astype(np.int64)
        spare = size - count
        assert buffers.inputs[0, :size].tolist() == [*expected, *[0] * spare]
        assert buffers.inputs[1, :size].tolist() == [*packed.starts, *[0] * spare]
        assert plan.positions.tolist() == [*packed.starts, *[0] * spare]
        slots = [*(blocks * SIZE + packed.starts % SIZE), *[NUM_BLOCKS * SIZE] * spare]
        assert plan._slots.tolist() == slots
        width = packed.block_tables.shape[1]
        assert plan._tables[:count, :width].tolist() == packed.block_tables.tolist()
        assert (plan._tables[count:, 0] == NUM_BLOCKS).all()
