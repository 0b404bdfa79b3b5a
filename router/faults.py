"""Faults and reactions to them: counts by kind, and a bounded list of the latest.

Routers and the launcher each keep their own; :meth:`Faults.merged` makes one of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

import msgspec

MAX_RECENT = 100
"""Events that each process remembers in words."""
MAX_TEXT = 300
"""Characters of an event's text; the rest is cut off."""


class FaultEvent(enum.StrEnum):
    """Kind of a fault event."""

    DETECTION = "detection"
    """A loss was detected; the kind names the sign."""
    RESTART = "restart"
    """A process was started again; the kind is its role."""
    RESUME = "resume"
    """Requests continued at another instance; the kind names the cause."""


KINDS = {
    FaultEvent.DETECTION: ("process_exit", "connection_lost", "removed", "shadow_difference"),
    FaultEvent.RESTART: ("coordinator", "engine", "router"),
    FaultEvent.RESUME: ("connection_lost", "removed", "reattached", "drained", "refused", "no_group"),
}
"""Kinds that every mesh reports from its start, so that their rates begin at zero."""


class Fault(msgspec.Struct, frozen=True):
    """Fault event in words."""

    at: float
    """Unix time in seconds."""
    event: FaultEvent
    kind: str
    count: int
    """How many at once (requests, for a resume)."""
    text: str


class Faults(msgspec.Struct):
    """Counts since the start of the process, and the latest events, oldest first."""

    counts: dict[FaultEvent, dict[str, int]] = {}
    recent: list[Fault] = []

    def count(self, event: FaultEvent, kind: str, count: int = 1) -> None:
        """Count an event without a text, as may happen many times a second."""
        of_event = self.counts.setdefault(event, {})
        of_event[kind] = of_event.get(kind, 0) + count

    def record(self, event: FaultEvent, kind: str, text: str, at: float, count: int = 1) -> None:
        """Record an event with its text; ``at`` is a Unix time in seconds."""
        self.count(event, kind, count)
        self.recent.append(Fault(at, event, kind, count, text[:MAX_TEXT]))
        del self.recent[:-MAX_RECENT]

    @classmethod
    def merged(cls, parts: Iterable[Faults]) -> Faults:
        """All counts added up, and the latest events of all."""
        total = cls(counts={event: {} for event in FaultEvent})
        for part in parts:
            for event, kinds in part.counts.items():
                for kind, count in kinds.items():
                    total.counts[event][kind] = total.counts[event].get(kind, 0) + count
            total.recent += part.recent
        total.recent = sorted(total.recent, key=lambda fault: fault.at)[-MAX_RECENT:]
        return total
