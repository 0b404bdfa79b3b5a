"""Counters with one label for /metrics, of all routers of one ``serve`` (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, Metric

OUTCOMES = ("affinity_hits", "affinity_misses", "moves", "queue_full")
"""Outcomes of routing; the first two are dispatches with and without cached prompt.

Then requests recalled from a queue to wait less elsewhere; requests refused because all queues were full.
"""


class LabelCounts:
    """Counter with one label, continued across restarts of a router."""

    def __init__(
        self,
        now: Callable[[], Mapping[str, int]],
        name: str,
        help: str,
        label: str,
        values: Collection[str] = (),
    ) -> None:
        """``now``: what this process has counted by itself, by value of the label.

        ``values`` have a series from the start, so that their rates begin at zero.
        """
        self._now = now
        self._name, self._help, self._label = name, help, label
        self._values = values
        self._before: Mapping[str, int] = {}

    def __repr__(self) -> str:
        return f"<LabelCounts {self._name} {self.total()}>"

    def go_on_from(self, left: Mapping[str, int]) -> None:
        """Continue the counts of the process before this one."""
        self._before = left

    def total(self) -> dict[str, int]:
        """Counts by value: the known ones first, in their order."""
        return self._sum([])

    def family(self, others: Iterable[Mapping[str, int]]) -> Metric:
        """Counter family with the counts of other routers added."""
        family = CounterMetricFamily(self._name, self._help, labels=(self._label,))
        for value, count in self._sum(others).items():
            family.add_metric((value,), count)
        return family

    def _sum(self, others: Iterable[Mapping[str, int]]) -> dict[str, int]:
        counted = Counter(dict.fromkeys(self._values, 0))
        for counts in (self._before, self._now(), *others):
            counted.update(counts)
        return dict(counted)
