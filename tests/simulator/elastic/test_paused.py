"""A mesh that pauses holds its rules: ``python -m tests.simulator.elastic --paused SEED`` shows one."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from coordinator.membership.records import Record
from coordinator.membership.standing_orders import Orders
from coordinator.messages import StandingOrders, State
from tests.nightly import NIGHTLY
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.paused import PausedInstance, PausedWorld, simulate_paused
from tests.simulator.schedule import first_violation

NUM_SCHEDULES = 10_000 if NIGHTLY else 100
CHUNK = 100
WITHIN = 300
"""Number of schedules that suffice to find each bug."""


@cache
def counts_of(first: int) -> Counter[str]:
    """What happened in a chunk of schedules, none of which broke a rule."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += simulate_paused(seed).checker.counts
    return counts


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_no_schedule_with_pauses_breaks_a_rule(first: int) -> None:
    assert counts_of(first)


def test_the_schedules_reach_what_they_are_for() -> None:
    counts = counts_of(0)
    expected = {"keep done": 60, "wait done": 30, "resume done": 100, "requests in a pause": 100, "kills": 30}
    assert {name: counts[name] for name in expected if counts[name] < expected[name]} == {}


class MissesLateJoiners(Orders):
    """Orders reach those that are here when they are given, and nobody else."""

    def for_newcomers(self) -> StandingOrders:
        return StandingOrders()

    def heard(self, record: Record) -> StandingOrders | None:
        record.follows_orders = record.state is State.READY
        return None if record.orders.revision == 0 else super().heard(record)

    def behind(self) -> list[str]:
        return [each for each in super().behind() if self._has_any(each)]

    def _has_any(self, text: str) -> bool:
        return any(text.endswith(f" {rank}") and each.orders.revision for rank, each in self._records.items())


class AnswersBeforeAllFollow(Orders):
    """A pause is answered as done once it is ordered."""

    def behind(self) -> list[str]:
        return []


class ForgetsOrdersAtARestart(Orders):
    def learn(self, theirs: StandingOrders | None) -> None:
        return


class SendsOrdersOnce(Orders):
    def heard(self, record: Record) -> StandingOrders | None:
        super().heard(record)
        return None


class StepsThroughWhenIdle(PausedInstance):
    """An instance that has no request when orders come never looks at them."""

    def _follow(self) -> None:
        if self.requests or self.mode is not None:
            super()._follow()
        else:
            self.member_state.in_effect = self.member_state.orders.revision


ORDERS = "coordinator.membership.registry.Orders"
PLANTED: dict[type[Any], tuple[str, set[Rule]]] = {
    MissesLateJoiners: (ORDERS, {Rule.PAUSED}),
    AnswersBeforeAllFollow: (ORDERS, {Rule.PAUSED}),
    ForgetsOrdersAtARestart: (ORDERS, {Rule.PAUSED, Rule.RECOVERS}),
    SendsOrdersOnce: (ORDERS, {Rule.RECOVERS, Rule.STORM}),
}


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    where, rules = PLANTED[bug]
    monkeypatch.setattr(where, bug)
    violation = first_violation(simulate_paused, range(WITHIN))
    assert violation is not None, f"{WITHIN} schedules, and nothing noticed {bug.__name__}"
    assert violation.rule in rules, violation


def test_an_idle_instance_that_steps_through_a_pause_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PausedWorld, "instance_class", StepsThroughWhenIdle)
    violation = first_violation(simulate_paused, range(WITHIN))
    assert violation is not None
    assert violation.rule is Rule.PAUSED
