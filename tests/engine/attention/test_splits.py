"""Number of parts that contexts are cut into, by device load and longest context."""

from __future__ import annotations

import pytest

from engine.attention.splits import MOST_ROUNDS, MOST_SPLITS, PART_KEYS, SPLIT_KEYS, num_splits
from engine.model.choice import PROGRAMS, PROMPT

H100 = 2 * 132


@pytest.mark.parametrize(
    ("lines", "seen", "splits"),
    [
        (8, 100, 1),  # too short to be cut
        (8, 2 * SPLIT_KEYS, 2),
        (8, 100_000, 32),
        (64, 4096, 4),  # as many programs as keep it busy
        (24 * 8, 4096, 2),  # busy anyway, but nobody waits for 4096 keys in a row
        (24 * 8, 131_072, 11),
        (24 * 8, PART_KEYS, 1),
        (512 * 8, 131_072, 1),  # busy for long
        (0, 5000, 19),
    ],
)
def test_splits_on_a_large_device(lines: int, seen: int, splits: int) -> None:
    assert num_splits(lines, seen, H100) == splits


def test_there_is_never_too_much_of_it() -> None:
    for lines in (1, 8, 100, 1000, 10_000):
        for seen in (1, 255, 256, 3000, 50_000, 1_000_000):
            splits = num_splits(lines, seen, H100)
            assert 1 <= splits <= MOST_SPLITS
            assert splits == 1 or seen >= splits * SPLIT_KEYS
            assert splits == 1 or lines * splits <= MOST_ROUNDS * H100


@pytest.mark.parametrize("kv_heads", [1, 8, 128])
def test_contexts_are_cut_when_a_backend_is_checked(kv_heads: int) -> None:
    """Contexts are cut for two requests that decode together, and for one alone."""
    assert num_splits(2 * kv_heads, PROMPT - 1, PROGRAMS) == 3
    assert num_splits(kv_heads, PROMPT, PROGRAMS) == 3
    assert num_splits(kv_heads, 5, PROGRAMS) == 1
