"""Policy of when an instance reports to a router (pure: no sockets, no clock).

Routers choose by how many requests run and wait, and by how much of them is to be computed. That changes as
requests come, begin and end, and goes with the next tokens. What grows with every token (counters, blocks in
use, names of full blocks) is no reason for a report in every message: it goes along, and alone from time to
time.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.messages import InstanceReport

WITH_TOKENS = 0.05
"""Seconds until a router that gets tokens gets a report though only counts changed."""
WITHOUT_TOKENS = 0.25
"""Seconds until a router that gets no tokens gets a report of what has changed."""


class LoadSnapshot(NamedTuple):
    """Load of an instance between two steps, in numbers that are cheap to find."""

    running: int
    waiting: int
    waiting_tokens: int
    """See :class:`engine.messages.InstanceReport`, as for the next two."""
    uncached_tokens: int
    queued: int
    blocks_used: int
    generation_tokens: int
    """Counted since the start, like the next one."""
    steps: int
    cache_checked: int = 0
    """Cached pieces that were computed again and compared, since the start."""
    cache_wrong: int = 0


class ReportPolicy:
    """State of the reports to one router: the last one, and the next one's time."""

    def __init__(self) -> None:
        self._last: InstanceReport | None = None
        self._sent_at = float("-inf")

    def __repr__(self) -> str:
        return f"<ReportPolicy sent {self._last} at {self._sent_at}>"

    def goes_along(self, snapshot: LoadSnapshot, last_dispatch: int, now: float) -> bool:
        """Whether tokens that are sent now take a report along."""
        last = self._last
        return (
            last is None
            or last.last_dispatch != last_dispatch
            or last.running != snapshot.running
            or last.waiting != snapshot.waiting
            or last.waiting_tokens != snapshot.waiting_tokens
            or last.uncached_tokens != snapshot.uncached_tokens
            or last.queued != snapshot.queued
            or now - self._sent_at >= WITH_TOKENS
        )

    def may_go_alone(self, now: float) -> bool:
        """Whether a message without tokens is due, if there is anything new in it."""
        return now - self._sent_at >= WITHOUT_TOKENS

    def is_new(self, report: InstanceReport) -> bool:
        """Whether this report differs from the last one."""
        return report != self._last

    def sent(self, report: InstanceReport, now: float) -> None:
        """Note that a report was sent."""
        self._last, self._sent_at = report, now
