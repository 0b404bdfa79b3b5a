"""Outcomes of routing for /metrics, of all routers of one ``serve`` (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric

OUTCOMES = ("affinity_hits", "affinity_misses", "moves", "queue_full")
"""Dispatches to an instance that had some of the prompt, or none.

Then requests recalled from a queue to wait less elsewhere; requests refused because all queues were full.
"""

CHANGES = {"numerics_promised": "true", "numerics_free": "false"}
"""Values of the label ``promised`` by outcome: requests that went on in another numerics class.

Promised are those whose answer would be the same again in the first one.
"""


class ChoiceCounts:
    """Counts of a process that may have replaced one that died."""

    def __init__(self, now: Callable[[], Mapping[str, int]]) -> None:
        """``now``: what this process has counted by itself, by outcome."""
        self._now = now
        self._before: Mapping[str, int] = {}

    def __repr__(self) -> str:
        return f"<ChoiceCounts {self.total()}>"

    def go_on_from(self, left: Mapping[str, int]) -> None:
        """Begin with the counts of the process before it."""
        self._before = left

    def total(self) -> dict[str, int]:
        """Counts by outcome, in the order of :data:`OUTCOMES`, then of :data:`CHANGES`."""
        return self._sum([])

    def families(self, others: Iterable[Mapping[str, int]]) -> Iterator[Metric]:
        """The counters with the counts of other routers."""
        counted = self._sum(others)
        choices = CounterMetricFamily(
            "lockstep:choices", "How choices of instances came out.", labels=("outcome",)
        )
        for outcome in OUTCOMES:
            choices.add_metric((outcome,), counted[outcome])
        yield choices
        changes = CounterMetricFamily(
            "lockstep:numerics_changes",
            "Requests that went on in another numerics class.",
            labels=("promised",),
        )
        for outcome, promised in CHANGES.items():
            changes.add_metric((promised,), counted[outcome])
        yield changes

    def _sum(self, others: Iterable[Mapping[str, int]]) -> dict[str, int]:
        counted = Counter[str]()
        for counts in (self._before, self._now(), *others):
            counted.update(counts)
        return {outcome: counted[outcome] for outcome in (*OUTCOMES, *CHANGES)}
