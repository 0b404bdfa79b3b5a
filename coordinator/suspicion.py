"""Which members are dead when a group is broken (pure).

A closed connection does not distinguish a dead member from a live one that gave the group up, as every
survivor does. So each suspect gets a :class:`coordinator.messages.Probe`, which an instance answers at once,
whatever its step thread is doing. Silence is death; so is a process that has ended, without a probe. A member
that answers lives. It is removed only if its steps stand still. That is so if several others waited for it in
vain (or one, twice in a row), and it was not waiting itself, which it would have reported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from coordinator.messages import Evidence
from coordinator.records import Rules


@dataclass
class _Suspicion:
    number: int
    since: float
    accusers: dict[str, Evidence] = field(default_factory=dict)
    answered: bool = False


class Suspicions:
    """Open questions whether suspected instances live."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._open: dict[str, _Suspicion] = {}
        self._numbers = 0
        self._waiting: set[str] = set()
        """Instances that reported the broken group themselves: their step threads are well."""
        self._explained = False
        """Somebody is dead: that the others' ends are closed, too, is what comes of it."""
        self._excused: set[str] = set()
        """Instances that one other waited for in vain, and that live."""
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
        suspicion.accusers[accuser] = evidence
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
        return self._numbers

    def answered(self, instance: str, number: int) -> None:
        """Take a heartbeat with the number of the newest probe that the instance saw."""
        suspicion = self._open.get(instance)
        if suspicion is not None and number == suspicion.number:
            suspicion.answered = True

    def waits(self, instance: str) -> None:
        """An instance itself reports a broken group: its step thread has come out of it."""
        self._waiting.add(instance)

    def forget(self, instance: str) -> None:
        """An instance is gone."""
        self._open.pop(instance, None)
        self._answered_at.pop(instance, None)

    def begin_group(self) -> None:
        """Forget the reports about the old group: another one is being formed."""
        self._waiting.clear()
        self._answered_at.clear()
        self._explained = False

    def all_is_well(self) -> None:
        """A group has begun: the steps of all its members move."""
        self._excused.clear()

    def settle(self, now: float) -> list[tuple[str, str]]:
        """Close decided suspicions; returns the dead instances, and why they are dead."""
        dead = []
        self._explained |= any(
            Evidence.EXITED in suspicion.accusers.values() for suspicion in self._open.values()
        )
        for instance, suspicion in list(self._open.items()):
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

    def _verdict(self, instance: str, suspicion: _Suspicion, now: float) -> str | None:
        """Why an instance is dead; "" if it lives, None while unknown."""
        waited = now - suspicion.since
        evidence = list(suspicion.accusers.values())
        if Evidence.EXITED in evidence:
            return "its process has ended"
        if not suspicion.answered:
            grace = self._grace(instance, suspicion)
            return f"no answer for {waited:.1f} s, its group is broken" if waited >= grace else None
        num_waited = evidence.count(Evidence.DEADLINE)
        if num_waited == 0 or instance in self._waiting:
            return ""
        if waited < self._rules.probe_grace:
            return None
        if num_waited > 1 or instance in self._excused:
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
