"""How a step's attention is cut into tasks."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.cache.native_cache import _tasks, _tasks_of_rows


@given(st.lists(st.integers(1, 120), min_size=1, max_size=12), st.sampled_from([1, 12, 48]))
def test_tasks_of_whole_rows_are_those_of_all_their_tokens(lengths: list[int], most: int) -> None:
    counts = np.array(lengths)
    offsets, rows = np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)
    every = np.arange(counts.sum())
    found = _tasks_of_rows(counts, offsets, most)
    assert found.tolist() == _tasks(every, rows, offsets, most).tolist()
    assert found[:, 2].max() <= most
    covered = [
        token
        for row, first, queries, _ in found.tolist()
        for token in range(offsets[row] + first, offsets[row] + first + queries)
    ]
    assert covered == every.tolist()
    assert found[:, 3].tolist() == (offsets[found[:, 0]] + found[:, 1]).tolist()


def test_tokens_of_rows_that_are_apart_are_a_task_each() -> None:
    rows, offsets = np.array([0, 1, 2, 2, 3]), np.array([0, 1, 2, 40])
    tokens = np.array([0, 1, 4, 5, 40])
    assert _tasks(tokens, rows, offsets, 12).tolist() == [[0, 0, 1, 0], [1, 0, 1, 1], [2, 2, 2, 2], [3, 0, 1, 4]]  # fmt: skip
    last = np.array([0, 1, 39, 40])
    assert _tasks(last, np.arange(4), offsets, 12).tolist() == [
        [0, 0, 1, 0], [1, 0, 1, 1], [2, 37, 1, 2], [3, 0, 1, 3],
    ]  # fmt: skip
