"""Parts of step time: every second in one part, every step in one bucket."""

from __future__ import annotations

import pytest

from engine.executor_contract import ExpertTimes
from engine.groups.step_profile import StepProfile
from engine.groups.stepping import Agreement
from engine.messages import STEP_BOUNDS


def test_parts_add_up_to_the_whole() -> None:
    split = StepProfile()
    times = ExpertTimes(dispatch=0.001, experts=0.004, combine=0.002, attention=0.003, attention_calls=6)
    split.stepped(Agreement(runs=True, sizes=(3, 1), waited=0.005), 3, 0.020, times)
    split.stepped(Agreement(runs=True, sizes=(0, 4), waited=0.0), 0, 0.008, ExpertTimes(0.001, 0.004, 0.002))
    split.slept(Agreement(runs=False, waited=0.7))
    counters = split.counters({2: 9})
    assert (counters.steps, counters.empty_steps, counters.sleeps) == (2, 1, 1)
    assert counters.attention_calls == 6
    parts = (
        counters.wait_seconds,
        counters.attention_seconds,
        counters.dispatch_seconds,
        counters.experts_seconds,
        counters.combine_seconds,
        counters.rest_seconds,
    )
    assert parts == pytest.approx((0.705, 0.003, 0.002, 0.008, 0.004, 0.011))
    assert counters.all_steps_seconds == pytest.approx(sum(parts))
    assert counters.longest_step_seconds == pytest.approx(0.7)
    assert (counters.busiest_tokens, counters.mean_tokens) == (7, 4.0)
    assert counters.tokens_per_expert == {2: 9}


@pytest.mark.parametrize(
    ("seconds", "bucket"),
    [(0.0, 0), (0.001, 0), (0.0011, 1), (0.3, 8), (30.0, len(STEP_BOUNDS) - 1), (31.0, len(STEP_BOUNDS))],
)
def test_a_duration_is_counted_under_its_bound(seconds: float, bucket: int) -> None:
    split = StepProfile()
    split.slept(Agreement(runs=False, waited=seconds))
    counts = split.counters({}).step_counts
    assert counts == [int(place == bucket) for place in range(len(STEP_BOUNDS) + 1)]


def test_a_report_keeps_what_was_true_when_it_was_made() -> None:
    split = StepProfile()
    before = split.counters({})
    split.slept(Agreement(runs=False, waited=0.01))
    assert sum(before.step_counts) == 0
