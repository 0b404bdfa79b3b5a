"""Parts of contexts by their own length, and programs that share them by device load."""

from __future__ import annotations

import pytest

from engine.attention.splits import (
    MOST_PARTS,
    MOST_ROUNDS,
    PART_KEYS,
    SPLIT_KEYS,
    most_parts,
    num_splits,
    with_equal_parts,
)
from engine.model.choice import PROGRAMS, PROMPT

H100 = 2 * 132


def keys_per_part(seen: int) -> int:
    """As the kernels find it."""
    share = SPLIT_KEYS
    while share * MOST_PARTS < seen:
        share *= 2
    return share


@pytest.mark.parametrize(
    ("lines", "seen", "programs"),
    [
        (8, 100, 1),  # too short to be cut
        (8, 2 * SPLIT_KEYS, 2),
        (8, 100_000, 32),
        (64, 4096, 4),  # as many programs as keep it busy
        (24 * 8, 4096, 2),  # busy anyway, but nobody waits for 4096 keys in a row
        (24 * 8, 131_072, 11),
        (24 * 8, PART_KEYS, 1),
        (512 * 8, 131_072, 1),  # busy for long
        (0, 5000, 20),
    ],
)
def test_programs_on_a_large_device(lines: int, seen: int, programs: int) -> None:
    assert num_splits(lines, seen, H100, most_parts(seen, None)) == programs


def test_there_are_never_too_many_programs() -> None:
    for lines in (1, 8, 100, 1000, 10_000):
        for seen in (1, 255, 256, 3000, 50_000, 1_000_000):
            parts = most_parts(seen, None)
            programs = num_splits(lines, seen, H100, parts)
            assert 1 <= programs <= parts <= MOST_PARTS
            assert programs == 1 or lines * programs <= MOST_ROUNDS * H100


def test_there_is_room_for_the_parts_of_each_context() -> None:
    """Also of shorter contexts, and of windows that begin within a part."""
    lengths = [*range(1, 3000, 7), 8191, 8192, 8193, 16384, 16385, 40_000]
    for window in (None, 1, 20, 256, 4096, 10_000):
        most = 0
        for length in lengths:
            begin = 0 if window is None else max(length - window, 0)
            share = keys_per_part(length - begin)
            most = max(most, -(-length // share) - begin // share)
            assert most <= most_parts(length, window)
    assert most_parts(300, None) == 2
    assert most_parts(4000, 20) == 2


def test_tokens_of_a_piece_have_parts_of_one_size() -> None:
    border = SPLIT_KEYS * MOST_PARTS
    assert with_equal_parts(5, 7) == [(5, 7)]
    assert with_equal_parts(0, border) == [(0, border)]
    assert with_equal_parts(border - 2, 5) == [(border - 2, 2), (border, 3)]
    assert with_equal_parts(border - 1, border + 2) == [(border - 1, 1), (border, border), (2 * border, 1)]
    for start, count in with_equal_parts(3, 5 * border):
        assert keys_per_part(start + 1) == keys_per_part(start + count)


@pytest.mark.parametrize("kv_heads", [1, 8, 128])
def test_contexts_are_cut_when_a_backend_is_checked(kv_heads: int) -> None:
    """Contexts are cut for two requests that decode together, and for one alone."""
    parts = most_parts(PROMPT, None)
    assert parts == 4
    assert num_splits(2 * kv_heads, PROMPT - 1, PROGRAMS, parts) == 4
    assert num_splits(kv_heads, PROMPT, PROGRAMS, parts) == 4
    assert most_parts(5, None) == 1
