"""How choices of instances came out, for /metrics: of this front end and of those beside it (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric

OUTCOMES = ("affinity_hits", "affinity_misses", "moves", "queue_full")
"""Dispatches to an instance that had some of the prompt, or none.

Requests asked back from a queue to wait less elsewhere; requests refused because all queues were full.
"""


class ChoiceCounts:
    """Counts of a process that may have taken over a dead one's place."""

    def __init__(self, now: Callable[[], Mapping[str, int]]) -> None:
        """``now``: what this process has counted by itself, by outcome."""
        self._now = now
        self._before: Mapping[str, int] = {}

    def __repr__(self) -> str:
        return f"<ChoiceCounts {self.total()}>"

    def go_on_from(self, left: Mapping[str, int]) -> None:
        """Begin with what the process before it has counted."""
        self._before = left

    def total(self) -> dict[str, int]:
        """By outcome, in the order of :data:`OUTCOMES`."""
        return self._sum([])

    def family(self, others: Iterable[Mapping[str, int]]) -> Metric:
        """With the counts of other front ends."""
        family = CounterMetricFamily(
            "lockstep:choices", "How choices of instances came out.", labels=("outcome",)
        )
        for outcome, count in self._sum(others).items():
            family.add_metric((outcome,), count)
        return family

    def _sum(self, others: Iterable[Mapping[str, int]]) -> dict[str, int]:
        counted = Counter[str]()
        for counts in (self._before, self._now(), *others):
            counted.update(counts)
        return {outcome: counted[outcome] for outcome in OUTCOMES}
