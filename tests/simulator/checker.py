"""Rules of every schedule, checked by an observer of what instances do.

The world passes on to the checker every header, decision, wake and piece of work as it happens. Each rule is
one of the proof obligations of docs/design/proofs.md. Time is the world's *counted* time, which stands
still while any instance is paused: so a bound of b means "b ticks, and the pauses that fall between".
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Sequence

import msgspec

from parallel.lockstep import Decision, RunStep, Sleep, StepHeader, Switch, Wake
from tests.simulator.schedule import AgreementChecker

Position = tuple[int, int]
"""(epoch, step)."""


class Rule(enum.StrEnum):
    """What can be broken."""

    AGREEMENT = "two instances decide differently at one step"
    FROM_HEADERS = "a decision is not the function of the headers that were sent for its step"
    ORDER = "a step is missed, or passed twice, or two instances are more than a step apart"
    ERROR = "the protocol finds its own headers impossible"
    UNASKED = "a step begins after a sleep though nobody asked for it"
    STALE_WAKE = "a wake for a step that has passed wakes somebody"
    LOST_WAKE = "a wake that has come for the next step does not count"
    STORM = "a wake without work behind it, or repeated after its step began"
    ASLEEP = "somebody sleeps for too long while work waits"
    PROGRESS = "work waits for too long"
    SWITCH = (
        "an epoch that all are ready for does not begin awake, or one that somebody is not ready for does"
    )
    REST = "after the last work not everything is at rest and done"


class Bounds(msgspec.Struct, frozen=True):
    """Bounds in counted ticks; the settings of a schedule say how they follow."""

    asleep: int
    """Longest sleep while work waits anywhere.

    It counts from the arrival of work, or from falling asleep if that is later, to the next step's header.
    """
    progress: int
    """Time from an instance's new work, or its last tokens, to its next tokens."""
    switch: int
    """Time from when all are ready for an epoch until all are in it."""


class Checker(AgreementChecker[int, Position]):
    """Observes a world; raises :class:`Violation` at the first event that breaks a rule."""

    ORDER = Rule.ORDER
    ERROR = Rule.ERROR
    ENDLESS = Rule.REST

    def __init__(self, members: Iterable[int], bounds: Bounds, ignored: Collection[Rule] = ()) -> None:
        super().__init__(ignored)
        self.now = 0
        self._members = tuple(members)
        self._bounds = bounds
        self._next = dict.fromkeys(self._members, (0, 0))
        self._decided: dict[Position, Decision] = {}
        self._asked: dict[Position, int] = {}
        """The steps that somebody sent a wake for, and how many did."""
        self._received: dict[int, Position] = dict.fromkeys(self._members, (-1, -1))
        """The latest step that a wake asked each instance for."""
        self._asleep_since: dict[int, int] = {}
        self._work: dict[int, int] = dict.fromkeys(self._members, 0)
        self._ready: dict[int, int] = dict.fromkeys(self._members, 0)
        self._work_since: int | None = None
        """Since when work waits somewhere without a gap."""
        self._progress_since: dict[int, int] = {}
        self._switch_since: int | None = None
        self._alarm: float = math.inf
        """No bound can be broken before this time."""

    # ---- time

    def tick(self, now: int) -> None:
        """Time has come to ``now``."""
        self.now = now
        if now > self._alarm:
            self._alarm = self._next_alarm()

    def _next_alarm(self) -> float:
        """The time at which the first bound is broken if nothing happens.

        Raises if one is broken already.
        """
        alarms: list[float] = [math.inf]
        if self._work_since is not None:
            for who, since in self._asleep_since.items():
                alarms.append(
                    self._alarm_at(Rule.ASLEEP, max(since, self._work_since), self._bounds.asleep, who)
                )
        for who, since in self._progress_since.items():
            alarms.append(self._alarm_at(Rule.PROGRESS, since, self._bounds.progress, who))
        if self._switch_since is not None:
            alarms.append(self._alarm_at(Rule.SWITCH, self._switch_since, self._bounds.switch, None))
        return min(alarms)

    def _alarm_at(self, rule: Rule, since: int, bound: int, who: int | None) -> float:
        if self.now <= since + bound:
            return since + bound
        subject = "all" if who is None else f"instance {who}, next step {self._next[who]}"
        self.broken(rule, f"{subject}: since {since}, bound {bound}, now {self.now} (counted ticks)")
        return math.inf

    def _watch(self, bound: int) -> None:
        self._alarm = min(self._alarm, self.now + bound)

    # ---- the agreement

    def header_sent(self, who: int, header: StepHeader) -> None:
        """An instance begins a step. It is awake."""
        at = (header.epoch, header.step)
        self._record_header(who, at, header)
        since = self._asleep_since.pop(who, None)
        if since is not None and self._work_since is not None:
            slept = self.now - max(since, self._work_since)
            self.counts["sleeps as long as they may be"] += 0 < slept == self._bounds.asleep
        if at not in self._asked and isinstance(self._decided.get((header.epoch, header.step - 1)), Sleep):
            self.broken(Rule.UNASKED, f"instance {who} begins step {at}")

    def decided(self, who: int, decision: Decision) -> None:
        """An instance knows what its next step is."""
        at = self._next[who]
        function = self._decision_at(at, self._members)
        if decision != function:
            self.broken(Rule.FROM_HEADERS, f"instance {who} decides {decision} at {at}, not {function}")
        first = self._decided.setdefault(at, decision)
        if decision != first:
            self.broken(Rule.AGREEMENT, f"at {at} one decides {first} and instance {who} {decision}")
        if isinstance(decision, Switch):
            self._switched(who, at, decision.epoch)
        self._pass(who, decision)

    def _look_at(self, at: Position, headers: Sequence[StepHeader]) -> None:
        """Check the decision of :func:`decide` against what its words mean."""
        decision = self._function[at]
        sizes = tuple(header.num_tokens for header in headers)
        pending = any(header.ready_epoch > at[0] for header in headers)
        match decision:
            case RunStep(told):
                right = told == sizes and (any(sizes) or pending)
                self.counts["steps without tokens"] += not any(sizes)
            case Sleep():
                right = not any(sizes) and not pending
                self.counts["sleeps asked for"] += at in self._asked
            case Switch(epoch):
                right = all(header.ready_epoch == epoch > at[0] for header in headers)
        if not right:
            self.broken(Rule.FROM_HEADERS, f"{decision} of {headers}")
        self.counts["steps"] += 1

    def _switched(self, who: int, at: Position, epoch: int) -> None:
        said = {member: header.ready_epoch for member, header in self._headers[at].items()}
        if epoch <= at[0] or set(said.values()) != {epoch}:
            self.broken(Rule.SWITCH, f"instance {who} goes from {at} to epoch {epoch}, ready are {said}")
        self._next[who] = (epoch, 0)
        if who in self._progress_since:  # no tokens in this step, and that is right
            self._progress_since[who] = self.now
            self._watch(self._bounds.progress)
        self._look_for_switch()
        self._look_for_work()

    def sleeps(self, who: int) -> None:
        """An instance begins no step until something comes."""
        if self._next[who][1] == 0:
            self.broken(Rule.SWITCH, f"instance {who} sleeps before {self._next[who]}, its epoch's beginning")
        if self._received[who] == self._next[who]:
            self.broken(Rule.LOST_WAKE, f"instance {who} sleeps before {self._next[who]}, a wake for it came")
        if who not in self._asleep_since:
            self._asleep_since[who] = self.now
            self._watch(self._bounds.asleep)

    # ---- wakes

    def wake_made(self, who: int, wake: Wake) -> None:
        """An instance that has work asks for a step."""
        at = (wake.epoch, wake.step)
        if at != self._next[who] or not self._has_work(who):
            self.broken(Rule.STORM, f"instance {who} sends {wake} before {self._next[who]}")
        self._asked[at] = self._asked.get(at, 0) + 1
        self.counts["steps with two wakers"] += self._asked[at] == 2

    def wake_repeated(self, who: int, wake: Wake) -> None:
        """An instance sends its wake again."""
        self.counts["repeats"] += 1
        if (wake.epoch, wake.step) != self._next[who]:
            self.broken(Rule.STORM, f"instance {who} repeats {wake} though {self._next[who]} is its next")

    def wake_received(self, who: int, wake: Wake, *, woke: bool) -> None:
        """A wake has come to an instance; ``woke``: it slept before and is awake after."""
        at, now = (wake.epoch, wake.step), self._next[who]
        asleep = who in self._asleep_since
        self._received[who] = max(self._received[who], at)
        if at < now:
            self.counts["stale wakes"] += 1
            self.counts["stale wakes in sleep"] += asleep
            if woke:
                self.broken(Rule.STALE_WAKE, f"{wake} wakes instance {who}, whose next step is {now}")
        elif at == now:
            self.counts["wakes" if asleep else "wakes repeated in vain"] += 1
            if asleep and not woke:
                self.broken(Rule.LOST_WAKE, f"{wake} does not wake instance {who}, whose next step is {now}")
        else:
            self.counts["early wakes"] += 1
            if at != (now[0], now[1] + 1):
                self.broken(Rule.ORDER, f"{wake} comes to instance {who}, more than a step before {now}")

    # ---- work

    def arrived(self, who: int, tokens: int) -> None:
        """Work has come to an instance, which may be paused and not know it."""
        self._work[who] += tokens
        if who not in self._progress_since:
            self._progress_since[who] = self.now
            self._watch(self._bounds.progress)
        self._look_for_work()

    def cancelled(self, who: int, tokens: int) -> None:
        """Work of an instance is not wanted any more."""
        self._take(who, tokens)
        if not self._work[who]:
            self._progress_since.pop(who, None)

    def computed(self, who: int, tokens: int) -> None:
        """An instance has run some of its tokens."""
        if tokens:
            self._take(who, tokens)
            self._progress_since.pop(who, None)
            if self._work[who]:
                self._progress_since[who] = self.now
                self._watch(self._bounds.progress)

    def ready(self, who: int, epoch: int) -> None:
        """An instance is ready for an epoch."""
        self._ready[who] = epoch
        self._look_for_switch()
        self._look_for_work()

    def _take(self, who: int, tokens: int) -> None:
        self._work[who] -= tokens
        if self._work[who] < 0:
            self.broken(Rule.REST, f"instance {who} computes {-self._work[who]} tokens too many")
        self._look_for_work()

    def _has_work(self, who: int) -> bool:
        return self._work[who] > 0 or self._ready[who] > self._next[who][0]

    def _look_for_work(self) -> None:
        if not any(map(self._has_work, self._members)):
            self._work_since = None
        elif self._work_since is None:
            self._work_since = self.now
            self._watch(self._bounds.asleep)

    def _look_for_switch(self) -> None:
        ready = set(self._ready.values())
        if len(ready) > 1 or ready == {min(epoch for epoch, _ in self._next.values())}:
            self._switch_since = None
        elif self._switch_since is None:
            self._switch_since = self.now
            self._watch(self._bounds.switch)

    # ---- the end

    def end(self) -> None:
        """Nothing will ever happen again, no message is under way."""
        if any(self._work.values()):
            self.broken(Rule.REST, f"work left: {self._work}")
        if len({*self._next.values()}) > 1:
            self.broken(Rule.REST, f"different steps: {self._next}")
        if awake := [who for who in self._members if who not in self._asleep_since]:
            self.broken(Rule.REST, f"not asleep: {awake}")
        if set(self._ready.values()) != {self._next[self._members[0]][0]}:
            self.broken(Rule.REST, f"ready for epochs {self._ready}, next steps {self._next}")
