"""Planted bugs in the agreement: each is found, by a rule that it breaks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec
import pytest

from parallel.lockstep import Decision, Lockstep, Sleep, StepHeader, Switch, Wake
from tests.simulator.checker import Rule
from tests.simulator.schedule import Violation, first_violation
from tests.simulator.world import simulate


class WakeExcludesItsSender(Lockstep):
    def wake(self) -> Wake | None:
        wake = super().wake()
        if wake is not None:
            self.awake = False
        return wake


class StaleWakeIsTakenAsFact(Lockstep):
    def on_wake(self, wake: Wake) -> None:
        self.awake = True


class WakeOfAnotherEpochCounts(Lockstep):
    def on_wake(self, wake: Wake) -> None:
        super().on_wake(msgspec.structs.replace(wake, epoch=self.epoch))


class DecidesOnOldHeaders(Lockstep):
    """The next rank's header is the one of the step before."""

    previous: Sequence[StepHeader] = ()

    def advance(self, headers: Sequence[StepHeader]) -> Decision:
        seen, peer = list(headers), (self.rank + 1) % self.size
        if self.previous:
            seen[peer] = msgspec.structs.replace(self.previous[peer], epoch=self.epoch, step=self.step)
        self.previous = headers
        return super().advance(seen)


class DecidesOnItsOwnHeader(Lockstep):
    def advance(self, headers: Sequence[StepHeader]) -> Decision:
        return super().advance([headers[self.rank]] * self.size)


class EarlyWakeIsForgotten(Lockstep):
    def on_wake(self, wake: Wake) -> None:
        if (wake.epoch, wake.step) == (self.epoch, self.step):
            self.awake = True


class EarlyWakeOutlivesItsEpoch(Lockstep):
    def _enter(self, epoch: int) -> None:
        wanted = self._wanted
        super()._enter(epoch)
        self._wanted = wanted


class WakeIsNotRepeated(Lockstep):
    def wake(self) -> Wake | None:
        wake, self.outstanding_wake = super().wake(), None
        return wake


class WakeIsRepeatedForever(Lockstep):
    def advance(self, headers: Sequence[StepHeader]) -> Decision:
        outstanding = self.outstanding_wake
        decision = super().advance(headers)
        self.outstanding_wake = outstanding
        return decision


class WakeNamesTheStepBefore(Lockstep):
    def wake(self) -> Wake | None:
        wake = super().wake()
        return None if wake is None else Wake(wake.epoch, wake.step - 1)


class NeverSleeps(Lockstep):
    def advance(self, headers: Sequence[StepHeader]) -> Decision:
        decision = super().advance(headers)
        self.awake = True
        return decision


class SleepIsNotCountedAsStep(Lockstep):
    def advance(self, headers: Sequence[StepHeader]) -> Decision:
        decision = super().advance(headers)
        self.step -= isinstance(decision, Sleep)
        return decision


class EarlyWakeSkipsItsStep(Lockstep):
    """An early wake is taken for the step that it names."""

    def on_wake(self, wake: Wake) -> None:
        early = wake.epoch == self.epoch and wake.step > self.step
        super().on_wake(wake)
        if early:
            self.step = wake.step


class ImpossibleWakeIsRemembered(Lockstep):
    def on_wake(self, wake: Wake) -> None:
        super().on_wake(wake)
        if wake.epoch == self.epoch and wake.step > self.step:
            self._wanted, self.awake = max(self._wanted, wake.step), True


class EpochBeginsAsleep(Lockstep):
    def _enter(self, epoch: int) -> None:
        super()._enter(epoch)
        self.awake = False


class SwitchesBeforeAllAgree(Lockstep):
    """Switches to the oldest epoch that any instance is ready for."""

    def advance(self, headers: Sequence[StepHeader]) -> Decision:
        decision = super().advance(headers)
        oldest = min(header.ready_epoch for header in headers)
        if oldest > headers[0].epoch and not isinstance(decision, Switch):
            self._enter(oldest)
            return Switch(oldest)
        return decision


MUTATIONS: dict[type[Lockstep], set[Rule]] = {
    WakeExcludesItsSender: {Rule.ASLEEP},
    StaleWakeIsTakenAsFact: {Rule.STALE_WAKE, Rule.LOST_WAKE},
    WakeOfAnotherEpochCounts: {Rule.STALE_WAKE, Rule.UNASKED},
    DecidesOnOldHeaders: {Rule.FROM_HEADERS},
    DecidesOnItsOwnHeader: {Rule.FROM_HEADERS},
    EarlyWakeIsForgotten: {Rule.LOST_WAKE},
    EarlyWakeOutlivesItsEpoch: {Rule.UNASKED},
    WakeIsNotRepeated: {Rule.ASLEEP, Rule.REST},
    WakeIsRepeatedForever: {Rule.STORM},
    WakeNamesTheStepBefore: {Rule.STORM},
    NeverSleeps: {Rule.UNASKED},
    SleepIsNotCountedAsStep: {Rule.STORM, Rule.ORDER},
    EarlyWakeSkipsItsStep: {Rule.ERROR},
    ImpossibleWakeIsRemembered: {Rule.UNASKED},
    EpochBeginsAsleep: {Rule.SWITCH, Rule.ORDER},
    SwitchesBeforeAllAgree: {Rule.FROM_HEADERS},
}
"""Each planted bug, and the rules that may be the first to notice it."""

OUTCOMES = {Rule.ASLEEP, Rule.PROGRESS, Rule.SWITCH, Rule.REST, Rule.ERROR}
"""Rules about effects that a user sees.

These are work that waits, machines that never rest, and errors.
"""

WITHIN = 100
"""Number of schedules that suffice to find each bug."""


def violation_of(lockstep: type[Lockstep], ignored: Collection[Rule] = ()) -> Violation:
    violation = first_violation(lambda seed: simulate(seed, lockstep, ignored), range(WITHIN))
    assert violation is not None, f"{WITHIN} schedules, and nothing noticed {lockstep.__name__}"
    return violation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_planted_bug_is_caught(mutation: type[Lockstep]) -> None:
    violation = violation_of(mutation)
    assert violation.rule in MUTATIONS[mutation]
    assert "seed " in violation.__notes__[0]
    assert "Gathered(" in violation.__notes__[0]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_planted_bug_is_caught_by_its_outcome_alone(mutation: type[Lockstep]) -> None:
    """The bug shows in its effects, without checks of headers, decisions and wakes."""
    assert violation_of(mutation, ignored=set(Rule) - OUTCOMES).rule in OUTCOMES


def test_unchanged_protocol_is_not_caught() -> None:
    assert first_violation(simulate, range(WITHIN)) is None
