from __future__ import annotations

import numpy as np

from tests.engine.pieces.toy_cache import NUM_BLOCKS, NUM_STATES, STATE_WIDTHS, WIDTHS, ToyCache


def test_each_kind_has_a_region_of_its_own_sizes() -> None:
    cache = ToyCache()
    assert cache.memory.layout == (*WIDTHS, *STATE_WIDTHS)
    assert cache.memory.bytes_of(NUM_BLOCKS - 1) == cache.memory.block_bytes == sum(WIDTHS)
    assert cache.memory.bytes_of(NUM_BLOCKS) == sum(STATE_WIDTHS)
    assert [bytes(part) for part in cache.memory.parts_of(NUM_BLOCKS + 2)] == [
        bytes(each[2]) for each in cache.states
    ]


def test_every_way_to_a_slot_reaches_its_piece_alone() -> None:
    cache, before = ToyCache(), ToyCache()
    last = NUM_BLOCKS + NUM_STATES - 1
    cache.memory.write(last, memoryview(bytes(sum(STATE_WIDTHS))))
    cache.memory.write(0, memoryview(bytes(sum(WIDTHS))))
    with cache.memory.filling(NUM_BLOCKS) as parts:
        for part in parts:
            part[:] = bytes([7]) * len(part)
    assert set(cache.bytes_in(last)) == set(cache.bytes_in(0)) == {0}
    assert set(cache.bytes_in(NUM_BLOCKS)) == {7}
    for slot in range(last + 1):
        if slot not in (0, NUM_BLOCKS, last):
            assert cache.bytes_in(slot) == before.bytes_in(slot)
    rows = cache.memory.read([NUM_BLOCKS + 1, NUM_BLOCKS + 3])
    assert rows.shape == (2, sum(STATE_WIDTHS))
    assert np.array_equal(rows[1], np.frombuffer(cache.bytes_in(NUM_BLOCKS + 3), dtype=np.uint8))
