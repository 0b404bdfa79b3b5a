"""Histograms of request times and lengths, added up over processes for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.metrics_core import HistogramMetricFamily, Metric

from router.metrics.report_metrics import LABELS, buckets
from router.metrics.shared_counts import SeriesTotals


class Series:
    """Histogram of one engine: cheaper than prometheus_client's, and not thread-safe."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, totals: SeriesTotals) -> None:
        """Add the observations of another process; another version's buckets are left out."""
        if len(totals.counts) == len(self.counts):
            self.counts = [own + other for own, other in zip(self.counts, totals.counts, strict=True)]
            self.total += totals.total

    def totals(self) -> SeriesTotals:
        return SeriesTotals(self.counts, self.total)


class Histogram:
    """Histogram metric with a series per engine."""

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name = name
        self._help = help
        self._bounds = bounds
        self._series: dict[str, Series] = {}

    def __repr__(self) -> str:
        return f"<Histogram {self.name} of engines {sorted(self._series)}>"

    def of(self, engine: str) -> Series:
        series = self._series.get(engine)
        if series is None:
            series = self._series[engine] = Series(self._bounds)
        return series

    def totals(self) -> dict[str, SeriesTotals]:
        """Totals by engine."""
        return {engine: series.totals() for engine, series in self._series.items()}

    def add(self, totals: Mapping[str, SeriesTotals]) -> None:
        for engine, of_engine in totals.items():
            self.of(engine).add(of_engine)

    def family(self, model: str, others: Iterable[Mapping[str, SeriesTotals]] = ()) -> Metric:
        """Metric family with the observations of other processes added."""
        whole = Histogram(self.name, self._help, self._bounds)
        for part in (self.totals(), *others):
            whole.add(part)
        family = HistogramMetricFamily(self.name, self._help, labels=LABELS)
        for engine, series in sorted(whole._series.items()):
            family.add_metric((model, engine), buckets(series.bounds, series.counts), series.total)
        return family
