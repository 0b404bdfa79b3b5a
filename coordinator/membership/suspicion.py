"""Which members are dead when a group is broken (pure).

A closed connection does not distinguish a dead member from a live one that gave the group up, as every
survivor does. So each suspect gets a :class:`coordinator.messages.Probe`, which an instance answers at once,
whatever its step thread is doing. Silence is death; so is a process that has ended, without a probe. A member
that answers lives. It is removed only if its steps stand still. That is so if several others waited for it in
vain (or one, in two groups in a row), and it was not waiting itself, which it would have reported.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from coordinator.membership.records import Rules
from coordinator.messages import Evidence


@dataclass
class _Suspicion:
    number: int
    since: float
    accusers: dict[str, Evidence] = field(default_factory=dict)
    num_waited: int = 0
    """Accusers that waited for it in vain."""
    has_ended: bool = False
    """Its process has ended, as one of them saw."""
    answered: bool = False

    def accuse(self, accuser: str, evidence: Evidence) -> None:
        before = self.accusers.get(accuser)
        self.accusers[accuser] = evidence
        self.num_waited += (evidence is Evidence.DEADLINE) - (before is Evidence.DEADLINE)
        if evidence is Evidence.EXITED or before is Evidence.EXITED:
            self.has_ended = Evidence.EXITED in self.accusers.values()


class Suspicions:
    """Open questions whether suspected instances live.

    Thousands may be open at once, and each report may settle some. So only those are looked at of which
    something is new, or whose time is over.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._open: dict[str, _Suspicion] = {}
        self._numbers = 0
        self._new: set[str] = set()
        """Suspects of which something was learnt since the last look."""
        self._times: list[tuple[float, int, str]] = []
        """When to look at suspects again, with the number of the suspicion: a heap."""
        self._waiting: set[str] = set()
        """Instances that reported the broken group themselves: their step threads are well."""
        self._explained = False
        """Somebody is dead: that the others' ends are closed, too, is what comes of it."""
        self._excused: set[str] = set()
        """Live instances that one other waited for in vain, in this group."""
        self._excused_before: set[str] = set()
        """The same in the groups before this one, since one began."""
        self._answered_at: dict[str, float] = {}
        """When a suspect of this group was last found alive."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def __repr__(self) -> str:
        return f"<Suspicions {' '.join(sorted(self._open))}>"

    def accuse(self, instance: str, accuser: str, evidence: Evidence, now: float) -> int | None:
        """A report that an instance is lost; returns the number of a probe to send."""
        number = self.ask(instance, now, certain=evidence is Evidence.EXITED)
        suspicion = self._open.get(instance)
        if suspicion is None:
            return None
        if not suspicion.accusers:
            self._look_at(instance, suspicion.since + self._rules.probe_grace)
        suspicion.accuse(accuser, evidence)
        self._new.add(instance)
        return number

    def ask(self, instance: str, now: float, *, certain: bool = False) -> int | None:
        """Suspect an instance that no other accuses.

        Returns the number of a probe to send. Who has just answered one for the same group is not asked again
        so soon: those who accuse each other and answer could go on for ever.
        """
        just_answered = now - self._answered_at.get(instance, -math.inf) < self._rules.quiet_grace
        if instance in self._open or (just_answered and not certain):
            return None
        self._numbers += 1
        self._open[instance] = _Suspicion(self._numbers, now)
        self._look_at(instance, now + self._rules.quiet_grace)
        return self._numbers

    def answered(self, instance: str, number: int) -> None:
        """Take a heartbeat with the number of the newest probe that the instance saw."""
        suspicion = self._open.get(instance)
        if suspicion is not None and number == suspicion.number:
            suspicion.answered = True
            self._new.add(instance)

    def waits(self, instance: str) -> None:
        """Note that a suspect reports a broken group itself: its step thread is well."""
        self._waiting.add(instance)
        self._new.add(instance)

    def forget(self, instance: str) -> None:
        """Forget an instance that is gone."""
        self._open.pop(instance, None)
        self._new.discard(instance)
        self._answered_at.pop(instance, None)

    def begin_group(self) -> None:
        """Forget the reports about the old group: another one is being formed."""
        self._waiting.clear()
        self._answered_at.clear()
        self._explained = False
        self._excused_before |= self._excused
        self._excused.clear()

    def all_is_well(self) -> None:
        """Forget all excuses: a group has begun, so the steps of its members move."""
        self._excused.clear()
        self._excused_before.clear()

    def settle(self, now: float) -> list[tuple[str, str]]:
        """Close decided suspicions; returns the dead instances, and why they are dead."""
        dead = []
        looks = [(self._open[name].number, name) for name in self._due(now)]
        self._explained |= any(self._open[name].has_ended for _, name in looks)
        for _, instance in sorted(looks):
            suspicion = self._open[instance]
            verdict = self._verdict(instance, suspicion, now)
            if verdict is None:
                continue
            del self._open[instance]
            if verdict:
                self._explained = True
                dead.append((instance, verdict))
            else:
                self._answered_at[instance] = now
        return dead

    def _due(self, now: float) -> set[str]:
        """Suspects to look at now."""
        due, self._new = self._new & self._open.keys(), set()
        while self._times and self._times[0][0] <= now:
            _, number, instance = heapq.heappop(self._times)
            suspicion = self._open.get(instance)
            if suspicion is not None and suspicion.number == number:
                due.add(instance)
        return due

    def _look_at(self, instance: str, time: float) -> None:
        heapq.heappush(self._times, (time, self._open[instance].number, instance))

    def _verdict(self, instance: str, suspicion: _Suspicion, now: float) -> str | None:
        """Why an instance is dead; "" if it lives, None while unknown."""
        waited = now - suspicion.since
        if suspicion.has_ended:
            return "its process has ended"
        if not suspicion.answered:
            grace = self._grace(instance, suspicion)
            is_over = now >= suspicion.since + grace
            return f"no answer for {waited:.1f} s, its group is broken" if is_over else None
        num_waited = suspicion.num_waited
        if num_waited == 0 or instance in self._waiting:
            return ""
        if now < suspicion.since + self._rules.probe_grace:
            return None
        if num_waited > 1 or instance in self._excused_before:
            others = f"{num_waited} other{'s' * (num_waited > 1)}"
            return f"it answers, but its steps stand still, say {others}"
        self._excused.add(instance)
        return ""

    def _grace(self, instance: str, suspicion: _Suspicion) -> float:
        """How long an answer may take.

        Survivors of a group that another one broke are likely to be alive, busy as they may be.
        """
        doubtful = suspicion.accusers and instance not in self._waiting and not self._explained
        return self._rules.probe_grace if doubtful else self._rules.quiet_grace
