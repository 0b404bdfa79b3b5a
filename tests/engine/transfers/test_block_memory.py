"""Blocks of a cache as bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.transfers.block_memory import BlockMemory, CacheMemory
from engine.transfers.identity import CacheFacts, identity_of
from tests.engine.copying_device import staged


@pytest.mark.parametrize("memory_of", [BlockMemory, staged])
def test_a_block_is_its_part_of_every_tensor(memory_of: Callable[[Any], CacheMemory]) -> None:
    keys = np.arange(12, dtype=np.uint8).reshape(3, 4)
    values = np.arange(100, 106, dtype=np.uint8).reshape(3, 2)
    memory = memory_of([keys, values])
    assert (memory.num_blocks, memory.block_bytes, memory.layout) == (3, 6, (4, 2))
    found = memory.read([2, 0])
    assert found.tolist() == [[8, 9, 10, 11, 104, 105], [0, 1, 2, 3, 100, 101]]
    memory.write(1, found[0].data)
    assert keys[1].tolist() == [8, 9, 10, 11]
    assert values[1].tolist() == [104, 105]
    keys[2, 0] = 77
    assert found[0, 0] == 8  # a copy


def test_each_fact_is_another_identity() -> None:
    facts = CacheFacts(numerics="fp_1", dtype="bfloat16", block_size=16, layout=(64, 64))
    changes: list[dict[str, object]] = [
        {"numerics": "fp_2"}, {"dtype": "float32"}, {"block_size": 32}, {"layout": (64, 32)},
        {"shards": (1, 1)}, {"shards": (2, 0)}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2},
    ]  # fmt: skip
    others = [msgspec.structs.replace(facts, **change) for change in changes]
    found = {identity_of(each) for each in (facts, *others)}
    assert len(found) == len(changes) + 1
    assert identity_of(msgspec.structs.replace(facts)) == identity_of(facts)


def test_pages_are_made_ready_and_keep_what_is_in_them() -> None:
    parts = [np.full((64, width), 7, dtype=np.uint8) for width in (8192, 100)]
    memory = BlockMemory(parts)
    for first, count in ((0, 0), (0, 3), (3, 1), (10, 1 << 30), (63, 1)):
        memory.prepare(count, first)
    assert all((part == 7).all() for part in parts)
