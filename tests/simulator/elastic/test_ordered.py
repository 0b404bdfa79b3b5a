"""A mesh with updates, sleeps and pauses holds its rules: ``python -m tests.simulator.elastic --ordered SEED``."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest

from coordinator.membership.records import Record
from coordinator.membership.sleep_orders import SleepOrders
from coordinator.membership.standing_orders import Orders
from coordinator.membership.weight_updates import WeightUpdates
from coordinator.messages import StandingOrders, State, WeightUpdate, WeightVersion
from tests.nightly import NIGHTLY
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.ordered import FIRST, OrderedInstance, OrderedWorld, simulate_ordered
from tests.simulator.schedule import first_violation

NUM_SCHEDULES = 1_000 if NIGHTLY else 200
CHUNK = 100
WITHIN = 400
"""Number of schedules that suffice to find each bug."""


@cache
def counts_of(first: int) -> Counter[str]:
    """What happened in a chunk of schedules, none of which broke a rule."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += simulate_ordered(seed).checker.counts
    return counts


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_no_schedule_with_orders_breaks_a_rule(first: int) -> None:
    assert counts_of(first)


HARD = (9, 15, 53, 158, 203, 225, 263, 374, 517, 638, 827, 836, 1010, 1165, 1334, 1838, 2212, 2886, 4094)
"""Schedules in which parts of the coordinator or of instances were found wrong."""


@pytest.mark.parametrize("seed", HARD)
def test_known_hard_schedules(seed: int) -> None:
    simulate_ordered(seed)


@pytest.mark.each_push
def test_the_schedules_reach_what_they_are_for() -> None:
    counts = counts_of(0)
    expected = {
        "updates answered 200": 60, "updates answered 500": 3, "sleeps answered 200": 40, "keep done": 40,
        "wakes answered 200": 60, "switches": 200, "kills": 30, "restarts": 20,
    }  # fmt: skip
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


class DecidesOnOneWord(WeightUpdates):
    """New weights are decided once one instance has prepared them."""

    def _missing(self, serving: list[Record], version: WeightVersion) -> list[str]:
        missing = super()._missing(serving, version)
        return missing if len(missing) == len(serving) else []


class GivesMemoryBackAtOnce(SleepOrders):
    """Memory is given back before all stand still, and requests run before all have it."""

    def go_on(self, *, is_settled: bool) -> None:
        sleep = self._orders.current.sleep
        if sleep is not None and not sleep.parts:
            self._orders.change(sleep=None)
        else:
            super().go_on(is_settled=True)


class SwapsAlone(OrderedInstance):
    """An instance that goes over to new weights by itself, as independent ones do."""

    def _follow(self) -> None:
        super()._follow()
        weights = self.member_state.orders.weights
        if self.number % 2 and weights.number > self.following.number and self.following.has(weights):
            self._switch(weights.number)


class StaysWithItsWeights(OrderedInstance):
    """An instance that enters a group with the weights that it has."""

    def _switch(self, number: int) -> None:
        if self.number % 3:
            super()._switch(number)
        else:
            self.member_state.weights = self.following.report()


class ReadsTheOldDirectory(OrderedInstance):
    """A joiner reads its command line's directory, whatever the mesh serves."""

    def _read_weights(self, update: WeightUpdate) -> str:
        return FIRST if self.group is None and self.number > 2 else super()._read_weights(update)


class StepsThroughASleep(OrderedInstance):
    """An instance without requests does not look at orders, and steps with the others."""

    def _follow(self) -> None:
        if self.requests or self.member_state.orders.sleep is None:
            super()._follow()
        else:
            self.member_state.in_effect = self.member_state.orders.revision

    @property
    def runnable(self) -> list[Any]:
        return self.requests if self.member_state.orders.sleep is not None else super().runnable


ORDERS = "coordinator.membership.registry."
PLANTED: dict[type[Any], tuple[str, set[Rule]]] = {
    MissesLateJoiners: (ORDERS + "Orders", {Rule.PAUSED, Rule.ASLEEP, Rule.VERSIONS, Rule.RECOVERS}),
    DecidesOnOneWord: (ORDERS + "WeightUpdates", {Rule.VERSIONS, Rule.RECOVERS, Rule.STORM}),
    GivesMemoryBackAtOnce: (ORDERS + "SleepOrders", {Rule.ASLEEP}),
}
INSTANCES: dict[type[OrderedInstance], set[Rule]] = {
    SwapsAlone: {Rule.VERSIONS, Rule.ERROR},
    StaysWithItsWeights: {Rule.VERSIONS},
    ReadsTheOldDirectory: {Rule.VERSIONS},
    StepsThroughASleep: {Rule.ASLEEP},
}


def check_found(bug: type[Any], rules: set[Rule]) -> None:
    violation = first_violation(simulate_ordered, range(WITHIN))
    assert violation is not None, f"{WITHIN} schedules, and nothing noticed {bug.__name__}"
    assert violation.rule in rules, violation


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_the_coordinator_is_caught(bug: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    where, rules = PLANTED[bug]
    monkeypatch.setattr(where, bug)
    check_found(bug, rules)


@pytest.mark.parametrize("bug", INSTANCES, ids=lambda bug: bug.__name__)
def test_a_planted_bug_of_an_instance_is_caught(
    bug: type[OrderedInstance], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OrderedWorld, "instance_class", bug)
    check_found(bug, INSTANCES[bug])
