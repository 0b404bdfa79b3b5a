"""Shared ground of both simulators: clock, chance, event queue, checks, report.

A schedule is a seed: it fixes the settings, each delay and fault, and the order of events of the same tick.
``tests/simulator`` runs instances that stay, ``tests/simulator/elastic`` a mesh that changes and fails.
"""

from __future__ import annotations

import enum
import heapq
import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from parallel.lockstep import Decision, LockstepError, StepHeader, Switch, decide

Who = TypeVar("Who", bound=Hashable)
"""The identity of an instance."""
Position = TypeVar("Position", bound=tuple[Any, ...])
"""A step: the key of its epoch, and its number there."""
Event = TypeVar("Event")
World = TypeVar("World", bound="Schedule[Any]")


class Violation(Exception):
    """A broken rule; its notes are the seed and the end of the trace."""

    def __init__(self, rule: enum.StrEnum, what: str) -> None:
        super().__init__(f"{rule.name}: {rule}: {what}")
        self.rule = rule


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What each schedule draws.

    Times are in ticks; each delay is drawn between 0 (or 1) and the value here.
    """

    size: int
    budget: int
    """Most tokens per step and instance."""
    compute: int
    """Duration of a step; at least 1."""
    gather: int
    """Delay from the last contribution to a header exchange until a member has all headers."""
    delay: int
    """Delay of a wake message that is not lost."""
    arrivals: int


class AgreementChecker(Generic[Who, Position]):
    """The steps of all instances, the headers sent for them, and the decisions that follow."""

    ORDER: ClassVar[enum.StrEnum]
    """The rule that is broken by a header or a decision for the wrong step."""
    ERROR: ClassVar[enum.StrEnum]
    """The rule that is broken by an error of the protocol."""
    ENDLESS: ClassVar[enum.StrEnum]
    """The rule that is broken by a schedule without end."""

    def __init__(self, ignored: Collection[enum.StrEnum] = ()) -> None:
        self.counts: Counter[str] = Counter()
        """How often the interesting situations came up."""
        self._ignored = ignored
        self._next: dict[Who, Position] = {}
        self._headers: dict[Position, dict[Who, StepHeader]] = {}
        self._function: dict[Position, Decision] = {}
        """The decision that follows from the headers of each step."""

    def _record_header(self, who: Who, at: Position, header: StepHeader) -> None:
        """An instance sends its header for a step, which must be its next one."""
        headers = self._headers.setdefault(at, {})
        if at != self._next[who] or who in headers:
            self.broken(self.ORDER, f"instance {who} begins step {at}, its next is {self._next[who]}")
        headers[who], self._next[who] = header, at

    def _decision_at(self, at: Position, members: Sequence[Who]) -> Decision:
        """The decision that follows from the headers of these members, in rank order."""
        if at not in self._function:
            headers = self._headers.get(at, {})
            if set(headers) != set(members):
                self.broken(self.ORDER, f"step {at} is decided with {sorted(headers, key=str)} of {members}")
            ordered = [headers[who] for who in members if who in headers]
            self._function[at] = decide(ordered)
            self.counts[type(self._function[at]).__name__] += 1
            self._look_at(at, ordered)
        return self._function[at]

    def _look_at(self, at: Position, headers: Sequence[StepHeader]) -> None:
        """Check the headers of a step further, once they are complete."""

    def _pass(self, who: Who, decision: Decision) -> None:
        """An instance goes on to the next step, unless it switches to another epoch."""
        if not isinstance(decision, Switch):
            self._next[who] = (*self._next[who][:-1], self._next[who][-1] + 1)

    def end(self) -> None:
        """Check the end: nothing will ever happen again, no message is under way."""

    def error(self, what: str) -> None:
        """The protocol raised an error."""
        self.broken(self.ERROR, what)

    def endless(self, num_events: int) -> None:
        """The world did not come to rest."""
        self.broken(self.ENDLESS, f"{num_events} events and no end")

    def broken(self, rule: enum.StrEnum, what: str) -> None:
        if rule not in self._ignored:
            raise Violation(rule, what)


class Schedule(Generic[Event]):
    """The clock, the chance and the event queue of one seed.

    Ticks are whole numbers, so that events do meet in one tick, and then in random order.
    """

    MAX_EVENTS: ClassVar[int]
    """A schedule that pushes more events than this does not end."""

    settings: CommonSettings
    checker: AgreementChecker[Any, Any]

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0
        self.num_events = 0
        self.most_events = self.MAX_EVENTS
        self.is_over = False
        self.trace: list[tuple[int, object, object]] = []
        """Entries (time, subject, event), sent messages and decisions included.

        The subject is an instance, another part of the world, or None.
        """
        self._queue: list[tuple[int, float, int, Event]] = []

    # ---- time and chance

    def up_to(self, most: int) -> int:
        """A random number of ticks."""
        return int(self.rng.random() * (most + 1))

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def push(self, delay: int, event: Event) -> None:
        """Let an event happen after a delay; events of one tick happen in random order."""
        self._push_at(self.now + delay, self.rng.random(), event)

    def _push_at(self, when: int, order: float, event: Event) -> None:
        """Let an event happen at a time; lower orders of one tick happen first."""
        self.num_events += 1
        heapq.heappush(self._queue, (when, order, self.num_events, event))

    def note(self, who: object, what: object) -> None:
        """Write into the trace what an instance sends or decides."""
        self.trace.append((self.now, who, what))

    # ---- what happens

    def run(self) -> None:
        """Let all events happen until none is left, or the world is over."""
        try:
            self.begin()
            while self._queue and not self.is_over:
                self.now, _, _, event = heapq.heappop(self._queue)
                self.happen(event)
                if self.num_events > self.most_events:
                    self.checker.endless(self.num_events)
                    return
            self.checker.end()
        except LockstepError as error:
            self.checker.error(str(error))

    def begin(self) -> None:
        """Begin the instances' first steps."""

    @abstractmethod
    def happen(self, event: Event) -> None:
        """Let one event happen, at its time."""

    # ---- for readers

    @abstractmethod
    def state(self) -> Iterable[object]:
        """The objects whose ``repr`` shows the end of the schedule."""

    def line(self, time: int, who: object, what: object) -> str:
        """A line of the trace."""
        return f"{time:6d}  {who}: {what}"

    def report(self, seed: int, most_lines: int = 100) -> str:
        """The settings, the last lines of the trace and the state of all parts."""
        lines = [f"seed {seed}: {self.settings}"]
        if len(self.trace) > most_lines:
            lines.append(f"({len(self.trace) - most_lines} earlier lines left out)")
        lines += [self.line(*entry) for entry in self.trace[-most_lines:]]
        return "\n".join([*lines, *map(repr, self.state())])


def run_schedule(seed: int, world: World) -> World:
    """Run the schedule of a seed.

    Raises:
        Violation: a rule that is not ignored was broken; its notes are the seed and the trace.
    """
    try:
        world.run()
    except Violation as violation:
        violation.add_note(world.report(seed))
        raise
    return world


def first_violation(run: Callable[[int], object], seeds: Iterable[int]) -> Violation | None:
    """The first rule broken by these schedules; None if no rule is."""
    for seed in seeds:
        try:
            run(seed)
        except Violation as violation:
            return violation
    return None
