"""Lists of steps, with and without drafts, and what comes of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from engine.speculation.draft_trials import FIRST, LONGEST, PLAIN, SHARE, DraftTrials, PlainSteps


class Load:
    """Steps of one number of rows, whose drafts bring and cost what a test says."""

    def __init__(
        self, rows: int = 1, others: int = 0, noise: float = 0.0, follows: int = 0, *, finds: bool = True
    ) -> None:
        """``follows``: steps after drafts were off in which nothing can be proposed.

        ``finds``: whether anything is ever proposed.
        """
        self.trials = DraftTrials()
        self.rows, self._others, self._noise, self._follows = rows, others, noise, follows
        self._random = random.Random(3)
        self._since_off, self._finds = follows, finds
        self.seconds = self.plain_seconds = 0.0
        self.drafted: list[bool] = []

    def run(self, steps: int, taken: Callable[[int], float], price: float) -> float:
        """Speed over that without drafts; ``price``: of a step with drafts, in plain ones."""
        seconds = self.seconds
        tokens = 0.0
        for step in range(steps):
            was_on = self.trials.are_on(self.rows)
            self._since_off = self._since_off + 1 if was_on else 0
            drafts = was_on and self._finds and self._since_off > self._follows
            count = self.rows * (1 + drafts * taken(step))
            took = 0.01 * (price if was_on else 1.0) * (1 + self._noise * self._random.uniform(-1, 1))
            self.trials.took(
                self.rows,
                tokens=round(count),
                seconds=took,
                drafted=drafts,
                was_on=was_on,
                others=self._others,
            )
            self.seconds += took
            tokens += round(count)
            self.drafted.append(was_on)
        return tokens / self.rows * 0.01 / (self.seconds - seconds)


@pytest.mark.parametrize("rows", [1, 8, 32])
@pytest.mark.parametrize("price", [1.02, 1.1, 1.5, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_drafts_that_bring_nothing_cost_little(rows: int, price: float, noise: float) -> None:
    load = Load(rows, noise=noise)
    load.run(100, lambda _: 0.0, price)
    assert load.run(4000, lambda _: 0.0, price) > 1 - 1.5 * SHARE


def test_tries_that_keep_losing_are_ever_rarer() -> None:
    load = Load()
    load.run(1000, lambda _: 0.0, 1.5)
    assert load.run(20_000, lambda _: 0.0, 1.5) > 1 - SHARE / 4
    begins = [step for step in range(1, 21_000) if load.drafted[step] and not load.drafted[step - 1]]
    waits = [late - early for early, late in pairwise(begins)]
    assert waits == sorted(waits)
    assert waits[-1] > 3 * waits[0]
    assert waits[-1] - waits[-2] < waits[0], "rarer only so far"


def test_a_try_that_wins_makes_the_next_ones_as_frequent_as_at_first() -> None:
    load = Load()
    load.run(9000, lambda _: 0.0, 1.3)
    while not load.trials.are_on(1):
        load.run(1, lambda _: 1.0, 1.3)
    load.run(200, lambda _: 1.0, 1.3)
    assert load.trials.are_on(1)
    load.run(60, lambda _: 0.0, 1.3)
    assert not load.trials.are_on(1)
    load.run(700, lambda _: 1.0, 1.3)
    assert load.trials.are_on(1)


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_looking_where_nothing_is_found_costs_little(noise: float) -> None:
    load = Load(noise=noise, finds=False)
    load.run(100, lambda _: 0.0, 1.1)
    assert load.run(10_000, lambda _: 0.0, 1.1) > 1 - SHARE
    assert sum(load.drafted) < 1000


def test_looking_that_became_dear_ends_soon() -> None:
    load = Load(finds=False)
    load.run(600, lambda _: 0.0, 0.99)
    assert load.trials.are_on(1)
    load.run(60, lambda _: 0.0, 1.1)
    assert not load.trials.are_on(1), "not only at the next steps without drafts"


def test_the_first_try_is_short() -> None:
    load = Load()
    load.run(FIRST + PLAIN + 2, lambda _: 0.0, 1.5)
    assert sum(load.drafted) == FIRST
    assert not load.trials.are_on(1)


def test_drafts_that_bring_more_than_they_cost_stay_on() -> None:
    load = Load(noise=0.2)
    load.run(100, lambda _: 1.0, 1.3)
    assert load.run(4000, lambda _: 1.0, 1.3) > 0.97 * 2 / 1.3
    assert load.drafted[-LONGEST - PLAIN :].count(False) <= 2 * (PLAIN + 1)


def test_what_proposes_from_every_step_begins_anew_behind_a_pause() -> None:
    load = Load(follows=16)
    load.run(200, lambda _: 1.0, 1.3)
    assert load.run(4000, lambda _: 1.0, 1.3) > 0.93 * 2 / 1.3


def test_a_first_step_without_drafts_that_is_packed_anew_is_no_measure() -> None:
    trials, steps = DraftTrials(), [True]
    for _ in range(600):
        was_on = trials.are_on(1)
        seconds = 0.012 if was_on else 0.02 if steps[-1] else 0.01
        trials.took(1, tokens=1, seconds=seconds, drafted=False, was_on=was_on)
        steps.append(was_on)
    assert sum(steps) < 60


def test_texts_that_change_are_noticed_in_both_directions() -> None:
    load = Load()
    load.run(500, lambda _: 0.0, 1.3)
    assert not load.trials.are_on(1)
    load.run(600, lambda _: 1.0, 1.3)
    assert load.trials.are_on(1)
    assert load.run(500, lambda _: 1.0, 1.3) > 1.4
    load.run(60, lambda _: 0.0, 1.3)
    assert not load.trials.are_on(1)


def test_sizes_of_batches_are_judged_by_themselves() -> None:
    trials = DraftTrials()
    for _ in range(300):
        for rows, price in ((2, 1.1), (32, 1.9)):
            was_on = trials.are_on(rows)
            trials.took(
                rows,
                tokens=rows + was_on * rows // 2,
                seconds=0.01 * (price if was_on else 1.0),
                drafted=was_on,
                was_on=was_on,
            )
    assert trials.are_on(2)
    assert not trials.are_on(32)


def test_tokens_of_other_instances_in_lockstep_wait_for_drafts_too() -> None:
    alone, beside = Load(rows=1), Load(rows=1, others=8)
    for load in (alone, beside):
        load.run(400, lambda _: 1.0, 1.4)
    assert alone.trials.are_on(1)
    assert not beside.trials.are_on(1)
    cheap = Load(rows=1, others=8)
    cheap.run(400, lambda _: 1.0, 1.05)
    assert cheap.trials.are_on(1)


def test_what_is_proposed_beside_prompts_counts_as_well() -> None:
    alone, beside = Load(), Load()
    for _ in range(12):
        for load in (alone, beside):
            load.run(20, lambda _: 1.0, 1.8)
        beside.trials.paid(1, 0.1)
    assert alone.trials.are_on(1)
    assert not beside.trials.are_on(1)


def test_times_of_other_numbers_of_rows_are_between_those_known() -> None:
    plain = PlainSteps()
    assert plain.seconds(3) is None
    plain.took(4, 0.4)
    assert plain.seconds(8) == 0.4
    assert plain.seconds(2) == pytest.approx(0.2)
    plain.took(8, 0.6)
    assert plain.seconds(6) == pytest.approx(0.5)
    for _ in range(3):
        plain.took(4, 400.0)
    assert plain.seconds(4) < 2.1  # type: ignore[operator]
