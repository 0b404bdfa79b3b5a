"""Consecutive decode steps by themselves: when they go on, and where their rows are written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.attention.base import PackedRows
from engine.kernels.cache.native_cache import NativePlan
from engine.kernels.decode_continuation import DecodeContinuation
from engine.sampling import SamplingParams
from engine.step import Admit, Step

SIZE = 16
TABLES = [[3, 4, 0, 0], [7, 0, 0, 0]]
STARTS = [20, 15]
"""Positions of two rows, one token each; the second one fills its block."""


def plan_of(starts: list[int]) -> NativePlan:
    tables = np.array(TABLES, dtype=np.int32)
    rows = np.arange(len(starts))
    slots = np.array([tables[row, start // SIZE] * SIZE + start % SIZE for row, start in enumerate(starts)])
    tasks = np.zeros((len(starts), 4), dtype=np.int32)
    return NativePlan(slots, rows, tasks, tasks, tables)


def made() -> tuple[DecodeContinuation, NativePlan]:
    plan, starts = plan_of(STARTS), np.array(STARTS)
    packed = PackedRows(starts, np.ones(2, dtype=np.int64), plan.tables, starts.copy(), 2)
    arguments: Any = SimpleNamespace(array={"apart": 0})
    continuation = DecodeContinuation(arguments, np.array([50, 60]), packed, plan, SIZE)
    continuation.begin(Step([], [0, 1], STARTS, [1, 1]))
    return continuation, plan


NEXT = Step([], [0, 1], [start + 1 for start in STARTS], [1, 1])


def test_the_next_step_of_the_same_rows_goes_on() -> None:
    assert made()[0].is_followed_by(NEXT)


@pytest.mark.parametrize(
    "other",
    [
        Step([], [1, 0], [21, 16], [1, 1]),
        Step([], [0, 2], [21, 16], [1, 1]),
        Step([], [0, 1], [20, 15], [1, 1]),
        Step([], [0, 1], [21, 16], [1, 2]),
        Step([], [0], [21], [1]),
        Step([Admit(2, [1], 1, SamplingParams(), 0, ())], [0, 1], [21, 16], [1, 1]),
    ],
    ids=["turned round", "another slot", "the same again", "more tokens", "fewer rows", "an admission"],
)
def test_any_other_step_is_packed(other: Step) -> None:
    assert not made()[0].is_followed_by(other)


def test_it_goes_on_as_far_as_tables_and_positions_reach() -> None:
    continuation, _ = made()
    assert continuation.fits(22)
    assert not continuation.fits(21), "position 21 would be the 22nd"
    room = len(TABLES[0]) * SIZE
    while continuation.fits(10_000):
        continuation.advance({})
        room_left = room - 1 - int(continuation._positions.max())
    assert room_left == 0


def test_rows_are_written_behind_their_last_ones_or_at_the_begin_of_a_block() -> None:
    continuation, plan = made()
    continuation.advance({1: [9]})
    assert plan.slots.tolist() == [4 * SIZE + 5, 9 * SIZE]
    assert plan.tables[1].tolist() == [7, 9, 0, 0]
    continuation.advance({})
    assert plan.slots.tolist() == [4 * SIZE + 6, 9 * SIZE + 1]


def test_kept_tokens_come_with_their_slots_and_positions() -> None:
    continuation, _ = made()
    continuation.keep([1, 2])
    continuation.keep([3, 4])
    assert list(continuation.take()) == [(0, 22, (1, 3)), (1, 17, (2, 4))]
    assert list(continuation.take()) == []
