"""A mesh of real cores, partial ways and own clocks holds its rules.

``python -m tests.simulator.elastic --apart SEED`` shows a schedule.
The planted bugs are found by what these schedules add: each is looked for without it, too, and not found there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any

import msgspec
import pytest

from coordinator.membership.reach import Pair
from coordinator.membership.records import Record
from coordinator.messages import GroupPlan
from engine.core import EngineCore
from engine.core.step_pipeline import StepPipeline
from engine.groups.recovery import Instruction, Recovery
from engine.messages import Submit
from router.dispatch.ledger import Entry, Ledger
from tests.nightly import NIGHTLY
from tests.simulator.elastic.apart import ApartWorld, simulate_apart
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.streams import simulate_streams
from tests.simulator.elastic.world import World, simulate
from tests.simulator.schedule import first_violation

NUM_SCHEDULES = 3000 if NIGHTLY else 100
"""10,000 are run by ``make simulate``."""
CHUNK = 100
WITHIN = 300
"""Number of schedules that suffice to find each bug that is not rare."""
WITHOUT = 15
"""Schedules without what finds a bug, in which it is not found."""


@cache
def counts_of(first: int) -> Counter[str]:
    """What happened in a chunk of schedules, none of which broke a rule."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + CHUNK):
        counts += simulate_apart(seed).checker.counts
    return counts


@pytest.mark.parametrize("first", range(0, NUM_SCHEDULES, CHUNK))
def test_no_schedule_breaks_a_rule(first: int) -> None:
    assert counts_of(first)


def test_the_schedules_reach_what_they_are_for() -> None:
    counts = counts_of(0)
    expected = {
        "headers with steps under way": 2000,
        "interrupted with steps under way": 10,
        "interrupted with several steps under way": 1,
        "groups entered with steps under way": 40,
        "preemptions": 30,
        "requests moved": 50,
        "requests resumed": 8,
        "late tokens": 1,
        "splits that are not transitive": 10,
        "cuts in one direction": 5,
        "left out": 4,
    }
    assert {name: counts[name] for name in expected if counts[name] < expected[name]} == {}


def test_a_seed_is_a_schedule() -> None:
    for seed in (3, 8, 21):
        one, other = simulate_apart(seed), simulate_apart(seed)
        assert list(map(str, one.trace)) == list(map(str, other.trace))


# ---- planted bugs


class GoesOnInAGroupThatAllLeave(Recovery):
    """A plan of a later epoch leaves the group that all agreed to leave."""

    def on_form(self, form: GroupPlan) -> list[Instruction]:
        if form.epoch > self._newest:
            self._switched = False
        return super().on_form(form)


class ForgetfulPipeline(StepPipeline):
    """What a broken group cuts short is not run again."""

    def restart(self) -> None:
        super().restart()
        self._unfinished.clear()


class TakesStepsUnderWayForDone(EngineCore):
    """An engine core with the pipeline that forgets."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._steps.__class__ = ForgetfulPipeline


class ForgetsTheSample(Entry):
    """A sample goes on with the random numbers of the first one."""

    def submit(self, number: int, copy: int = 0) -> Submit:
        made = super().submit(number, copy)
        return msgspec.structs.replace(made, sample_index=0) if self.emitted else made


class BeginsAgain(Entry):
    """A request is computed again from its prompt on: its first tokens come twice."""

    def submit(self, number: int, copy: int = 0) -> Submit:
        return msgspec.structs.replace(super().submit(number, copy), output_ids=[])


class BooksTwice(Ledger):
    """The last token of a try is not counted."""

    def place(self, entry: Entry, instance: str, number: int) -> None:
        del entry.emitted[-1:]
        super().place(entry, instance, number)


class TakesLateTokens(Ledger):
    """What an earlier try still brings is passed on, too."""

    def drop(self, entry: Entry) -> tuple[str, int] | None:
        old = self.__dict__.setdefault("old", {})
        if entry.address is not None:
            old[entry.address] = entry
        return super().drop(entry)

    def at(self, instance: str) -> dict[int, Entry]:
        old = self.__dict__.get("old", {})
        late = {number: entry for (name, number), entry in old.items() if name == instance}
        return {**late, **super().at(instance)}


def all_connected(members: Sequence[Record], cut: Collection[Pair]) -> list[Record]:
    """Stands for ``without_cuts``: who reaches one of some is taken to reach all of them."""
    found: list[set[str]] = []
    for member in members:
        near = {
            other.instance for other in members if frozenset((member.instance, other.instance)) not in cut
        }
        joined = [some for some in found if some & near]
        found = [some for some in found if some not in joined]
        found.append({member.instance}.union(*joined))
    largest = max(found, key=len)
    return [member for member in members if member.instance in largest]


class ReadsClocksOfSenders(ApartWorld):
    """A coordinator that takes times of the instances for its own."""

    def arrival_time(self, sender: str) -> float:
        return self.clock(self.instances[sender])


WORLD = "tests.simulator.elastic.streams.StreamWorld"
PLANTED: dict[str, tuple[str, Any, set[Rule]]] = {
    "takes steps under way for done": (
        f"{WORLD}.core_class",
        TakesStepsUnderWayForDone,
        {Rule.ERROR},
    ),
    "forgets the sample": (f"{WORLD}.entry_class", ForgetsTheSample, {Rule.TOKENS}),
    "begins again": (f"{WORLD}.entry_class", BeginsAgain, {Rule.TOKENS}),
    "books twice": (f"{WORLD}.ledger_class", BooksTwice, {Rule.TOKENS}),
    "takes late tokens": (f"{WORLD}.ledger_class", TakesLateTokens, {Rule.TOKENS}),
    "reads clocks of senders": (
        "tests.simulator.elastic.apart.ApartWorld.arrival_time",
        ReadsClocksOfSenders.arrival_time,
        {Rule.ALIVE, Rule.RECOVERS, Rule.ONE_GROUP},
    ),
}
"""Each planted bug: where, what, and the rules that may notice it first."""


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, rules = PLANTED[bug]
    monkeypatch.setattr(where, what)
    violation = first_violation(simulate_apart, range(WITHIN))
    assert violation is not None, f"{WITHIN} schedules, and nothing noticed what {bug}"
    assert violation.rule in rules, violation


FOUND_IN: dict[str, tuple[str, Any, set[Rule], tuple[int, ...]]] = {
    "takes ways for transitive": (
        "coordinator.membership.reach.without_cuts",
        all_connected,
        {Rule.SERVES, Rule.STORM, Rule.RECOVERS},
        (1740, 1767, 1878, 2511, 2798),
    ),
    "goes on in a group that all leave": (
        "tests.simulator.elastic.world.World.recovery_class",
        GoesOnInAGroupThatAllLeave,
        {Rule.ORDER},
        (6061,),
    ),
}
"""Bugs that one of hundreds or thousands of schedules finds, and some that did.

The first needs a long split that is not transitive. The second needs a coordinator that was restarted during a
change: it has heard of the next epoch and not of the agreement, and forms the one above while steps under way end
after the ``Switch``.
"""


@pytest.mark.parametrize("bug", FOUND_IN)
def test_a_rare_bug_is_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, what, rules, seeds = FOUND_IN[bug]
    assert first_violation(simulate_apart, seeds[:1]) is None
    monkeypatch.setattr(where, what)
    violation = first_violation(simulate_apart, seeds)
    assert violation is not None, f"none of {seeds} notices what {bug}"
    assert violation.rule in rules, violation


@pytest.mark.parametrize(
    ("bug", "run", "seeds"),
    [
        ("goes on in a group that all leave", simulate, FOUND_IN["goes on in a group that all leave"][3]),
        ("takes ways for transitive", simulate_streams, FOUND_IN["takes ways for transitive"][3]),
        ("reads clocks of senders", simulate_streams, range(WITHOUT)),
    ],
)
def test_it_is_not_caught_without(
    bug: str, run: Callable[[int], World], seeds: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without steps under way; with two sides; with one clock."""
    where, what, *_ = FOUND_IN.get(bug) or PLANTED[bug]
    monkeypatch.setattr(where.replace("apart.ApartWorld", "world.World"), what)
    assert first_violation(run, seeds) is None
