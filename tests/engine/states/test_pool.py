"""Memory of recurrent states: one region beside the blocks, wherever the tensors are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.states.pool import StatePool
from engine.transfers.piece_memory import PieceMemory
from tests.engine.invariance.answers import load
from tests.engine.states.models import make_state_model

LIKE = [
    (torch.zeros(1, 3, 4, dtype=torch.bfloat16), torch.zeros(1, 2, 4, 4)),
    (None, torch.zeros(1, 2, 5)),
    (torch.zeros(1, 0, 4), None),
]


def test_a_pool_has_the_tensors_of_its_layers_in_the_memory_that_it_is_given() -> None:
    given: list[torch.Tensor] = []

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        given.append(torch.zeros(shape, dtype=dtype))
        return given[-1]

    pool = StatePool(LIKE, 7, 100, zeros)
    assert [each.shape for each in pool.stored] == [(7, 3, 4), (7, 2, 4, 4), (7, 2, 5)]
    assert {each.data_ptr() for each in pool.stored} <= {each.data_ptr() for each in given}
    pool.write(103, 1, (None, torch.full((1, 2, 5), 2.5)))
    assert (pool.stored[2][3] == 2.5).all()
    assert not pool.stored[2][:3].any()


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2"])
def test_states_are_pieces_behind_the_blocks(family: str, tmp_path: Path) -> None:
    """Mamba 2 has no keys and values: its blocks are empty, its states are not."""
    executor = load(make_state_model(tmp_path, family), dtype="float32").executor
    executor.allocate(num_blocks := 12, num_states := 5)
    memory = executor.block_memory()
    assert isinstance(memory, PieceMemory)
    blocks, states = executor.regions
    assert (memory.num_blocks, states.num_blocks) == (num_blocks, num_states)
    assert memory.layout == blocks.layout + states.layout
    assert memory.block_layout == blocks.layout
    assert (memory.block_bytes == 0) == (family == "mamba2")
    _, stored = executor._tensors
    assert memory.bytes_of(num_blocks) == sum(each[0].nbytes for each in stored) > 0
    data = np.random.default_rng(1).integers(0, 255, memory.bytes_of(num_blocks), dtype=np.uint8)
    memory.write(num_blocks + 3, data.data)
    assert b"".join(each[3].view(torch.uint8).numpy().tobytes() for each in stored) == data.tobytes()
    assert not any(each[2].any() or each[4].any() for each in stored), "no other slot is touched"
    assert (memory.read([num_blocks + 3])[0] == data).all()
    executor.close()
