"""When a router is told how its instance stands (pure: no sockets, no clock).

What routers choose by (who runs and waits, and how much of it is to be computed) changes as requests come,
begin and end, and goes with the next tokens. What grows with every token (counters, blocks in use, names of
full blocks) is no reason for a word in every message: it goes along, and alone from time to time.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.messages import InstanceReport

WITH_TOKENS = 0.05
"""Seconds after which a router that gets tokens is told all, though only counts have changed."""
WITHOUT_TOKENS = 0.25
"""Seconds after which one that gets none is told what has changed."""


class LoadSnapshot(NamedTuple):
    """An instance between two steps, as far as it can be told at no cost."""

    running: int
    waiting: int
    waiting_tokens: int
    """See :class:`engine.messages.InstanceReport`, as for the next two."""
    uncached_tokens: int
    queued: int
    blocks_used: int
    generation_tokens: int
    """Since the start, as the next."""
    steps: int


class ReportPolicy:
    """What one router was told last."""

    def __init__(self) -> None:
        self._told: InstanceReport | None = None
        self._told_at = float("-inf")

    def __repr__(self) -> str:
        return f"<ReportPolicy told {self._told} at {self._told_at}>"

    def go_along(self, standing: LoadSnapshot, last_dispatch: int, now: float) -> bool:
        """Whether tokens that are sent now take a report along."""
        told = self._told
        return (
            told is None
            or told.last_dispatch != last_dispatch
            or told.running != standing.running
            or told.waiting != standing.waiting
            or told.waiting_tokens != standing.waiting_tokens
            or told.uncached_tokens != standing.uncached_tokens
            or told.queued != standing.queued
            or now - self._told_at >= WITH_TOKENS
        )

    def may_go_alone(self, now: float) -> bool:
        """Whether it is time for a message without tokens, if there is anything new to say."""
        return now - self._told_at >= WITHOUT_TOKENS

    def are_in(self, report: InstanceReport) -> bool:
        """Whether this report says anything else than the last one."""
        return report != self._told

    def told(self, report: InstanceReport, now: float) -> None:
        """A report was sent."""
        self._told, self._told_at = report, now
