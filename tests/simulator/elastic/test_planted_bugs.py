"""Planted bugs in the rules of a changing mesh: each breaks a rule."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from coordinator.member_state import MemberState
from coordinator.membership.adoption import Adoption
from coordinator.membership.candidates import Candidates
from coordinator.membership.epochs import Epochs
from coordinator.membership.groups import Groups
from coordinator.membership.reach import Asked, Reachability
from coordinator.membership.records import Record
from coordinator.membership.suspicion import Suspicions
from coordinator.messages import Evidence, GroupPlan, Settings, State, ToCoordinator
from engine.groups.recovery import Instruction, Recovery, Turn
from parallel.lockstep import Decision, Lockstep, StepHeader, Switch
from parallel.placement import Placement, cover
from tests.coordinator import test_member_state
from tests.coordinator.membership import test_reach, test_registry_groups
from tests.nightly import NIGHTLY
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.settings import LONG_SPLIT
from tests.simulator.elastic.settings import Settings as SimulatorSettings
from tests.simulator.elastic.world import World, simulate
from tests.simulator.schedule import first_violation


class TakesOutWhoAnswers(Suspicions):
    def answered(self, instance: str, number: int) -> None:
        return


class TakesAClosedConnectionForADeath(Suspicions):
    def accuse(self, instance: str, accuser: str, evidence: Evidence, now: float) -> int | None:
        return super().accuse(instance, accuser, Evidence.EXITED, now)


class FormsWithTheDead(Candidates):
    """A member stays in plans for ever."""

    def all(self) -> list[Record]:
        seen = self.__dict__.setdefault("seen", {})
        seen.update({record.instance: record for record in super().all()})
        return sorted(seen.values(), key=lambda record: record.rank)


class ForgetsLostExperts(Candidates):
    """Leaves out experts that no member holds, so that none is asked to read them."""

    def placement(
        self, settings: Settings, members: list[Record], before: GroupPlan | None, *, lost: bool
    ) -> Placement:
        placement = super().placement(settings, members, before, lost=lost)
        if not any(member.experts for member in members):
            return placement
        held = {expert for member in members for of_rank in member.experts for expert in of_rank}
        return msgspec.structs.replace(
            placement, owners=tuple(owner for expert, owner in enumerate(placement.owners) if expert in held)
        )


class ForgetsThatRoomIsLimited(Candidates):
    def placement(
        self, settings: Settings, members: list[Record], before: GroupPlan | None, *, lost: bool
    ) -> Placement:
        return cover(
            settings.num_experts, [next(iter(member.experts), ()) for member in members], [0] * len(members)
        )


class FormsAtOnceAfterARestart(Adoption):
    def is_young(self, now: float) -> bool:
        return False

    def is_over(self, group: GroupPlan, size: int | None, now: float) -> bool:
        return True


class ForgetsTheNumbersBeforeARestart(Epochs):
    def learn(self, epoch: int, group: GroupPlan | None, now: float) -> None:
        super().learn(0, None if group is None else msgspec.structs.replace(group, epoch=1), now)

    def heard(self, record: Record) -> None:
        return


class MakesTwoChangesAtOnce(Epochs):
    def begins(self, now: float) -> bool:
        self._begun = True
        return False


class NeverLetsALeaverGo(Candidates):
    def all(self) -> list[Record]:
        drained = [record for record in self._records.values() if record.state is State.DRAINED]
        return sorted([*super().all(), *drained], key=lambda record: record.rank)


class FencesNobody(Epochs):
    def fences(self, instance: str, epoch: int, group: GroupPlan | None) -> bool:
        return False


class LeavesNobodyOut(Reachability):
    def choose(self, fits: Any, now: float) -> list[tuple[Record, str]]:
        super().choose(lambda stay: False, now)
        return []


class LeavesOutWhomMostReach(Reachability):
    """The mesh goes on with those who do not reach each other."""

    def choose(self, fits: Any, now: float) -> list[tuple[Record, str]]:
        members = list(self._members)
        out = super().choose(fits, now)
        for member, _ in out:
            self._out.pop(member.instance)
        stay = [member for member in members if member not in [each for each, _ in out]]
        for member in stay if out else []:
            self._leave_out(member.instance, "planted", now, was_found=True)
        return [(member, "planted") for member in stay] if out else []


class BelievesOneReport(Reachability):
    """Believes a report from any one of the tries."""

    def _count(self, names: frozenset[str], *, forget: bool) -> Any:
        pairs = self._tries[names].pairs if names in self._tries else set()
        tries = super()._count(names, forget=forget)
        tries.pairs |= pairs
        tries.count = max(tries.count, self._rules.reach_tries)
        return tries


class NeverLetsBack(Reachability):
    def let_back(self, now: float) -> list[Record]:
        return []


class LetsBackWhoIsNotReached(Reachability):
    def let_back(self, now: float) -> list[Record]:
        back = [self._records.named(name) for name, out in self._out.items() if out.question is not None]
        self._out.clear()
        return [record for record in back if record is not None]


class TriesWhoIsLeftOut(Candidates):
    def all(self) -> list[Record]:
        return self._records.loaded()


class TakesAStaleForm(Recovery):
    def on_form(self, form: GroupPlan) -> list[Instruction]:
        self._newest = 0
        return super().on_form(form)


class EntersWhenItIsReadyItself(Recovery):
    def turn(self, now: float) -> Turn:
        self._switched = self._switched or self._ready
        return super().turn(now)


class IsReadyBeforeItsGroup(Recovery):
    @property
    def ready_epoch(self) -> int:
        return self.target.epoch if self.target is not None else self.epoch


class LeavesWithoutAWord(Recovery):
    def _may_go(self, now: float) -> bool:
        return True


class GoesOnWhenFenced(Recovery):
    def on_fenced(self) -> list[Instruction]:
        return []


class KeepsNoWatchOverTheCoordinator(MemberState):
    """Reports a loss once, even if no coordinator receives it."""

    def outgoing(self, load: Any) -> list[ToCoordinator]:
        messages = super().outgoing(load)
        if self.welcome is not None:
            self._lost = None
        return messages


class SwitchesBeforeAllAgree(Lockstep):
    def advance(self, headers: Sequence[StepHeader]) -> Decision:
        decision = super().advance(headers)
        newest = max(header.ready_epoch for header in headers)
        if newest > headers[0].epoch and not isinstance(decision, Switch):
            self._enter(newest)
            return Switch(newest)
        return decision


PLANTED: dict[type[Any], tuple[str, set[Rule]]] = {
    TakesOutWhoAnswers: ("coordinator.membership.groups.Suspicions", {Rule.ALIVE}),
    TakesAClosedConnectionForADeath: ("coordinator.membership.groups.Suspicions", {Rule.ALIVE}),
    FormsWithTheDead: ("coordinator.membership.epochs.Candidates", {Rule.RECOVERS, Rule.SMOOTH}),
    ForgetsLostExperts: ("coordinator.membership.epochs.Candidates", {Rule.OWNED}),
    ForgetsThatRoomIsLimited: ("coordinator.membership.epochs.Candidates", {Rule.OWNED}),
    FormsAtOnceAfterARestart: (
        "coordinator.membership.epochs.Adoption",
        {Rule.ONE_GROUP, Rule.RECOVERS, Rule.ALIVE},
    ),
    ForgetsTheNumbersBeforeARestart: (
        "coordinator.membership.groups.Epochs",
        {Rule.RISING, Rule.RECOVERS, Rule.ALIVE},  # one that ignores its plans as stale is never ready
    ),
    MakesTwoChangesAtOnce: ("coordinator.membership.groups.Epochs", {Rule.SMOOTH, Rule.RECOVERS}),
    NeverLetsALeaverGo: ("coordinator.membership.epochs.Candidates", {Rule.LEFT}),
    FencesNobody: ("coordinator.membership.groups.Epochs", {Rule.FENCED}),
    LeavesNobodyOut: ("coordinator.membership.groups.Reachability", {Rule.SERVES}),
    LeavesOutWhomMostReach: (
        "coordinator.membership.groups.Reachability",
        {Rule.SERVES, Rule.STORM, Rule.RECOVERS},
    ),
    BelievesOneReport: ("coordinator.membership.groups.Reachability", {Rule.REACHED}),
    NeverLetsBack: ("coordinator.membership.groups.Reachability", {Rule.RECOVERS}),
    LetsBackWhoIsNotReached: ("coordinator.membership.groups.Reachability", {Rule.SERVES}),
    TriesWhoIsLeftOut: ("coordinator.membership.epochs.Candidates", {Rule.SERVES, Rule.STORM}),
    TakesAStaleForm: ("World.recovery_class", {Rule.RISING, Rule.RECOVERS}),
    EntersWhenItIsReadyItself: ("World.recovery_class", {Rule.SMOOTH}),
    IsReadyBeforeItsGroup: ("World.recovery_class", {Rule.SMOOTH, Rule.READY}),
    LeavesWithoutAWord: ("World.recovery_class", {Rule.SMOOTH}),
    GoesOnWhenFenced: ("World.recovery_class", {Rule.FENCED, Rule.RECOVERS}),
    KeepsNoWatchOverTheCoordinator: ("tests.simulator.elastic.instance.MemberState", {Rule.RECOVERS}),
    SwitchesBeforeAllAgree: ("World.lockstep_class", {Rule.AGREEMENT}),
}
"""Each planted bug: where, and the rules that may be the first to notice it."""

RARE: dict[type[Any], Callable[[SimulatorSettings], bool]] = {
    ForgetsTheNumbersBeforeARestart: lambda settings: settings.restarts > 0,
    FormsAtOnceAfterARestart: lambda settings: (
        settings.restarts > 0 < settings.stalls and not settings.splits
    ),
    FencesNobody: lambda settings: settings.stalls > 0 and settings.stall == 500 and not settings.splits,
    GoesOnWhenFenced: lambda settings: settings.stalls > 0 and settings.stall == 500,
    LeavesNobodyOut: lambda settings: settings.splits > 0 and settings.split == LONG_SPLIT,
    LeavesOutWhomMostReach: lambda settings: settings.splits > 0 and settings.split == LONG_SPLIT,
    BelievesOneReport: lambda settings: settings.splits == 0 < settings.stalls + settings.hangs,
    NeverLetsBack: lambda settings: settings.splits > 0,
    LetsBackWhoIsNotReached: lambda settings: settings.splits > 0 and settings.split == LONG_SPLIT,
    TriesWhoIsLeftOut: lambda settings: settings.splits > 0 and settings.split == LONG_SPLIT,
    KeepsNoWatchOverTheCoordinator: lambda settings: settings.restarts > 0 < settings.stalls,
}
"""What must come together for a bug to be seen.

The other schedules are not run.
"""

WITHIN = 600
"""Number of schedules that suffice to find each bug."""


FIRST: dict[type[Any], int] = {
    KeepsNoWatchOverTheCoordinator: 2221,
    FormsAtOnceAfterARestart: 3961,
    BelievesOneReport: 989,
    ForgetsTheNumbersBeforeARestart: 481,
    MakesTwoChangesAtOnce: 56,
    TakesAStaleForm: 42,
}
"""Seeds that found bugs which many before did not find.

For each push the search begins there.
"""


def schedules(bug: type[Any]) -> Iterator[int]:
    chosen = RARE.get(bug, lambda settings: True)
    first = 0 if NIGHTLY else FIRST.get(bug, 0)
    return (seed for seed in itertools.count(first) if chosen(SimulatorSettings.draw(random.Random(seed))))


def plant(bug: type[Any], patch: pytest.MonkeyPatch) -> Collection[Rule]:
    where, rules = PLANTED[bug]
    plant_at(where, bug, patch)
    return rules


def plant_at(where: str, bug: type[Any], patch: pytest.MonkeyPatch) -> None:
    if where.startswith("World."):
        patch.setattr(World, where.removeprefix("World."), bug)
    else:
        patch.setattr(where, bug)


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rules = plant(bug, monkeypatch)
    violation = first_violation(simulate, itertools.islice(schedules(bug), WITHIN))
    assert violation is not None, f"{WITHIN} schedules, and nothing noticed {bug.__name__}"
    assert violation.rule in rules, violation


class TakesOutWhoIsBack(Epochs):
    """A newcomer that was taken out for being late is late again at once."""

    def stragglers(self, now: float) -> list[Record]:
        for record in self._records.values():
            record.registered_at = 0.0
        return super().stragglers(now)


class TakesAPlanBehindAFence(MemberState):
    def _take_form(self, form: GroupPlan) -> None:
        self._fenced_up_to = 0
        super()._take_form(form)


class NeverReconsiders(Reachability):
    def reconsider(self, instances: Collection[Record], now: float) -> list[Asked]:
        return []


class BlamesTheWayToWhoIsLate(Groups):
    def _steps_in(self, instance: str, epoch: int) -> bool:
        return True


FOUND_ONCE: dict[type[Any], tuple[str, Rule, int]] = {
    BlamesTheWayToWhoIsLate: ("coordinator.membership.registry.Groups", Rule.REACHED, 84306),
}
"""Bugs that one of ten thousand schedules finds: where, the rule, and such a schedule."""


@pytest.mark.parametrize("bug", FOUND_ONCE, ids=lambda bug: bug.__name__)
def test_a_rare_bug_is_caught(bug: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    where, rule, seed = FOUND_ONCE[bug]
    simulate(seed)
    plant_at(where, bug, monkeypatch)
    violation = first_violation(simulate, [seed])
    assert violation is not None
    assert violation.rule is rule


RARER: dict[type[Any], tuple[str, Callable[[], None]]] = {
    NeverReconsiders: (
        "coordinator.membership.groups.Reachability",
        test_reach.test_those_who_were_left_out_serve_when_the_others_lack_room,
    ),
    TakesOutWhoIsBack: (
        "coordinator.membership.groups.Epochs",
        test_registry_groups.test_who_was_late_and_is_back_gets_the_time_to_prepare_again,
    ),
    TakesAPlanBehindAFence: (
        "tests.coordinator.test_member_state.MemberState",
        test_member_state.test_a_plan_of_the_time_before_a_fence_is_void,
    ),
}
"""Bugs that schedules reach more rarely yet: where, and the plain case that fails."""


@pytest.mark.parametrize("bug", RARER, ids=lambda bug: bug.__name__)
def test_a_rarer_bug_fails_a_plain_case(bug: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    where, case = RARER[bug]
    case()
    monkeypatch.setattr(where, bug)
    with pytest.raises(AssertionError):
        case()
