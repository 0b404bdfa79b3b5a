"""A mesh whose experts move holds its rules: ``python -m tests.simulator.elastic --balanced SEED`` shows one."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest

from coordinator.membership.epochs import Epochs
from coordinator.membership.rebalancing import Rebalancing
from coordinator.membership.records import Record
from coordinator.messages import GroupPlan, Settings
from parallel.placement import Copies, Placement
from tests.nightly import NIGHTLY
from tests.simulator.elastic.balanced import simulate_balanced
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.settings import Settings as SimulatorSettings
from tests.simulator.schedule import first_violation

NUM_SCHEDULES = 10_000 if NIGHTLY else 100
CHUNK = 100
WITHIN = 400
"""Number of schedules that suffice to find each bug."""


@cache
def counts_of(first: int) -> Counter[str]:
    """What happened in a chunk of schedules, none of which broke a rule."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += simulate_balanced(seed).checker.counts
    return counts


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_no_schedule_with_moves_breaks_a_rule(first: int) -> None:
    assert counts_of(first)


def test_the_schedules_reach_what_they_are_for() -> None:
    counts = counts_of(0)
    expected = {
        "rebalancings": 40,
        "failed rebalancings": 3,
        "reading failed": 10,
        "forward passes with copies": 1500,
        "windows": 2000,
        "operator asks": 50,
        "ends with copies": 3,
        "begins with copies": 20,
        "kills": 30,
        "groups after a loss": 30,
    }
    assert {name: counts[name] for name in expected if counts[name] < expected[name]} == {}


class ServesCopiesOfTheDead(Rebalancing):
    """Takes the ranks of the group before for those of the next one."""

    def placement(self, settings: Settings, members: Sequence[Record], *, lost: bool) -> Placement | None:
        found = super().placement(settings, members, lost=lost)
        if found is None or not lost:
            return found
        shifted = tuple(
            tuple(tuple(sorted({(rank + 1) % found.num_ranks for rank in ranks})) for ranks in layer)
            for layer in found.replicas
        )
        empty: tuple[Copies, ...] = tuple((*layer[:-1], ()) for layer in shifted)
        return msgspec.structs.replace(found, replicas=empty)


class BeginsWithoutCopies(Rebalancing):
    """Leaves copies to the first look at loads."""

    def first_placement(self, settings: Settings, members: Sequence[Record], first: Placement) -> Placement:
        return first


class CopiesBeyondRoom(Rebalancing):
    """Takes the room of all members for unlimited."""

    def placement(self, settings: Settings, members: Sequence[Record], *, lost: bool) -> Placement | None:
        for member in members:
            member.max_experts = 0
        return super().placement(settings, members, lost=lost)


class MovesWhileAGroupForms(Epochs):
    """Looks whether experts move without waiting until the group has begun everywhere."""

    def begins(self, now: float) -> bool:
        begun = super().begins(now)
        self._begun = self._begun or (self.form is not None and self.form.epoch > 1)
        return begun


class NeverContent(Rebalancing):
    """Deals the experts out another way at each look."""

    def reason(
        self, settings: Settings, form: GroupPlan, members: Sequence[Record], now: float
    ) -> str | None:
        self._looked_at = 0
        return super().reason(settings, form, members, now) or "again"


class ForgetsCopiesAfterADeath(Rebalancing):
    """Looks at no group that follows a loss."""

    def reason(
        self, settings: Settings, form: GroupPlan, members: Sequence[Record], now: float
    ) -> str | None:
        return None if form.broken else super().reason(settings, form, members, now)


PLANTED: dict[type[Any], tuple[str, set[Rule]]] = {
    ServesCopiesOfTheDead: ("coordinator.membership.epochs.Rebalancing", {Rule.OWNED}),
    BeginsWithoutCopies: ("coordinator.membership.epochs.Rebalancing", {Rule.BALANCED}),
    CopiesBeyondRoom: ("coordinator.membership.epochs.Rebalancing", {Rule.OWNED}),
    MovesWhileAGroupForms: (
        "coordinator.membership.groups.Epochs",
        {Rule.SMOOTH, Rule.RECOVERS, Rule.STORM, Rule.LEFT},
    ),
    NeverContent: ("coordinator.membership.epochs.Rebalancing", {Rule.STORM, Rule.RECOVERS}),
    ForgetsCopiesAfterADeath: ("coordinator.membership.epochs.Rebalancing", {Rule.BALANCED}),
}
"""Each planted bug: where, and the rules that may be the first to notice it."""


def schedules(bug: type[Any]) -> Iterator[int]:
    """Seeds with what must come together for a bug to be seen."""
    for seed in itertools.count():
        drawn = SimulatorSettings.draw(random.Random(seed))
        if bug is not ForgetsCopiesAfterADeath or (drawn.kills > 0 == drawn.room and not drawn.joins):
            yield seed


LONG = {MovesWhileAGroupForms}
"""Bugs whose schedules take seconds each: looked for at night."""


@pytest.mark.parametrize(
    "bug",
    [pytest.param(bug, marks=[pytest.mark.nightly] if bug in LONG else []) for bug in PLANTED],
    ids=lambda bug: bug.__name__,
)
def test_planted_bug_is_caught(bug: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    where, rules = PLANTED[bug]
    monkeypatch.setattr(where, bug)
    violation = first_violation(simulate_balanced, itertools.islice(schedules(bug), WITHIN))
    assert violation is not None, f"{WITHIN} schedules, and nothing noticed {bug.__name__}"
    assert violation.rule in rules, violation


def test_a_seed_is_a_schedule() -> None:
    chance = random.Random(3)
    for seed in chance.sample(range(1000), 5):
        one, other = simulate_balanced(seed), simulate_balanced(seed)
        assert list(map(str, one.trace)) == list(map(str, other.trace))
