"""What Prometheus is told, under vLLM's names and labels, so that dashboards made for it work.

What requests experience is measured here (histograms, request_success); what instances report is read from
their latest report when Prometheus asks. Names beginning with ``lockstep:`` are our own.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from engine.messages import STEP_BOUNDS, FinishReason, Report
from router.faults import Faults
from router.mesh import Generation, Mesh
from router.sample import Sample
from router.shelf import Shelf, Snapshot, Totals, is_alive

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
LENGTH_BUCKETS = tuple(step * 10**power for power in range(7) for step in (1, 2, 5))
COUNT_BUCKETS = (1, 2, 5, 10, 20)

LABELS = ("model_name", "engine")


class Series:
    """Observations of one engine: much cheaper than prometheus_client's, and not thread-safe."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, totals: Totals) -> None:
        """Count in what another process observed; another version's buckets are left out."""
        if len(totals.counts) == len(self.counts):
            self.counts = [own + other for own, other in zip(self.counts, totals.counts, strict=True)]
            self.total += totals.total

    def totals(self) -> Totals:
        return Totals(self.counts, self.total)


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative, as Prometheus wants them."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


class Histogram:
    """One metric, a series per engine."""

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

    def totals(self) -> dict[str, Totals]:
        """By engine."""
        return {engine: series.totals() for engine, series in self._series.items()}

    def add(self, totals: Mapping[str, Totals]) -> None:
        for engine, of_engine in totals.items():
            self.of(engine).add(of_engine)

    def family(self, model: str, others: Iterable[Mapping[str, Totals]] = ()) -> Metric:
        """``others``: what other processes observed of the same."""
        whole = Histogram(self.name, self._help, self._bounds)
        for part in (self.totals(), *others):
            whole.add(part)
        family = HistogramMetricFamily(self.name, self._help, labels=LABELS)
        for engine, series in sorted(whole._series.items()):
            family.add_metric((model, engine), buckets(series.bounds, series.counts), series.total)
        return family


class Metrics:
    """All metrics of one router process and, over the shelf, of the front ends beside it. The callables
    tell of the mesh as it is when Prometheus asks."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        reports: Callable[[], Mapping[int, Report]] = dict,
        epoch: Callable[[], int | None] = lambda: None,
        instances: Callable[[], Mapping[str, int]] = dict,
        refused_peers: Callable[[], Mapping[str, int]] = dict,
        faults: Faults | None = None,
        shelf: Shelf | None = None,
        alone: bool = True,
    ) -> None:
        """``alone``: no other front end answers on this port, so that the process's own figures mean
        something."""
        self._mesh = mesh
        self.reports = reports
        self._epoch = epoch
        self._instances = instances
        self._refused_peers = refused_peers
        self._shelf = shelf
        self.faults = Faults() if faults is None else faults
        self.in_flight = 0
        self.ttft = Histogram(
            "vllm:time_to_first_token_seconds", "From the request to its first token.", TTFT_BUCKETS
        )
        self.itl = Histogram("vllm:inter_token_latency_seconds", "From token to token.", ITL_BUCKETS)
        self.e2e = Histogram(
            "vllm:e2e_request_latency_seconds", "From the request to its last token.", LATENCY_BUCKETS
        )
        self.prompt_tokens = Histogram("vllm:request_prompt_tokens", "Tokens of prompts.", LENGTH_BUCKETS)
        self.generation_tokens = Histogram(
            "vllm:request_generation_tokens", "Tokens generated per request.", LENGTH_BUCKETS
        )
        self.params_n = Histogram("vllm:request_params_n", "Samples asked for.", COUNT_BUCKETS)
        self.params_max_tokens = Histogram(
            "vllm:request_params_max_tokens", "Tokens asked for at most.", LENGTH_BUCKETS
        )
        self.success: dict[tuple[str, str], int] = {}
        """By engine and finish reason."""
        self._histograms = (
            self.ttft,
            self.itl,
            self.e2e,
            self.prompt_tokens,
            self.generation_tokens,
            self.params_n,
            self.params_max_tokens,
        )
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        if alone:
            ProcessCollector(registry=self._registry)
        if shelf is not None and (left := shelf.own()) is not None:
            self._go_on_from(left)

    def __repr__(self) -> str:
        return f"<Metrics {self.in_flight} in flight, {sum(self.success.values())} finished>"

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type, in the format that the scraper accepts."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """Called by the registry."""
        model = self._mesh.model.names[0] if self._mesh.model is not None else ""
        others = self._shelf.others() if self._shelf else []
        for histogram in self._histograms:
            yield histogram.family(model, [other.histograms.get(histogram.name, {}) for other in others])
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=(*LABELS, "finished_reason")
        )
        for (engine, reason), count in sorted(self._success_of_all(others).items()):
            success.add_metric((model, engine, reason), count)
        yield success
        yield from _of_reports(model, self.reports())
        yield from self._of_mesh(others)

    def snapshot(self) -> Snapshot:
        """What this process has counted, for the shelf."""
        success: dict[str, dict[str, int]] = {}
        for (engine, reason), count in self.success.items():
            success.setdefault(engine, {})[reason] = count
        return Snapshot(
            pid=os.getpid(),
            in_flight=self.in_flight,
            histograms={histogram.name: histogram.totals() for histogram in self._histograms},
            success=success,
            faults=self.faults,
        )

    def faults_of_all(self) -> Faults:
        """Of this process, the front ends beside it and the launcher."""
        others = self._shelf.others() if self._shelf else []
        return Faults.merged([self.faults, *(other.faults for other in others)])

    def _go_on_from(self, left: Snapshot) -> None:
        """Counters of a process that took over a dead one's place do not begin at zero again."""
        for histogram in self._histograms:
            histogram.add(left.histograms.get(histogram.name, {}))
        self.success = {
            (engine, reason): count
            for engine, reasons in left.success.items()
            for reason, count in reasons.items()
        }
        self.faults.counts, self.faults.recent = left.faults.counts, left.faults.recent

    def _success_of_all(self, others: Sequence[Snapshot]) -> dict[tuple[str, str], int]:
        total = dict(self.success)
        for other in others:
            for engine, reasons in other.success.items():
                for reason, count in reasons.items():
                    total[engine, reason] = total.get((engine, reason), 0) + count
        return total

    def _of_mesh(self, others: Sequence[Snapshot]) -> Iterator[Metric]:
        in_flight = self.in_flight + sum(other.in_flight for other in others if is_alive(other.pid))
        yield GaugeMetricFamily(
            "lockstep:requests_in_flight", "HTTP requests being generated for.", in_flight
        )
        faults = CounterMetricFamily(
            "lockstep:faults",
            "Losses detected, processes restarted, requests resumed.",
            labels=("event", "kind"),
        )
        for event, kinds in Faults.merged([self.faults, *(other.faults for other in others)]).counts.items():
            for kind, count in sorted(kinds.items()):
                faults.add_metric((event.value, kind), count)
        yield faults
        if (epoch := self._epoch()) is not None:
            yield GaugeMetricFamily("lockstep:epoch", "The number of the world.", epoch)
        instances = GaugeMetricFamily("lockstep:instances", "Instances by state.", labels=("state",))
        for state, count in sorted(self._instances().items()):
            instances.add_metric((state,), count)
        yield instances
        refused = CounterMetricFamily(
            "lockstep:refused_peers", "Connections without the mesh's key.", labels=("by",)
        )
        for by, count in sorted(self._refused_peers().items()):
            refused.add_metric((by,), count)
        yield refused


class Meter:
    """Measures one request; ``close`` counts each sample that ended, or was given up."""

    def __init__(self, metrics: Metrics, samples: Sequence[Sample], arrival: float) -> None:
        self._metrics = metrics
        self._samples = samples
        self._arrival = arrival
        self._last: list[float | None] = [None] * len(samples)
        self._itl: list[Series | None] = [None] * len(samples)
        self._engines = [""] * len(samples)
        metrics.in_flight += 1

    def begin(self, position: int, generation: Generation) -> None:
        """The mesh took a sample."""
        self._engines[position] = _engine(generation)

    def delta(self, position: int, generation: Generation, now: float) -> None:
        """A sample got tokens."""
        last, self._last[position] = self._last[position], now
        series = self._itl[position]
        if last is not None and series is not None:
            series.observe(now - last)
            return
        engine = self._engines[position] = _engine(generation) or self._engines[position]
        self._itl[position] = self._metrics.itl.of(engine)
        self._metrics.ttft.of(engine).observe(now - self._arrival)

    def close(self, now: float, num_started: int) -> None:
        """``num_started`` samples were taken by the mesh."""
        metrics = self._metrics
        metrics.in_flight -= 1
        for sample, engine in zip(self._samples[:num_started], self._engines, strict=False):
            reason = sample.finish_reason or FinishReason.ABORT.value
            key = (engine, str(reason))
            metrics.success[key] = metrics.success.get(key, 0) + 1
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                continue
            metrics.e2e.of(engine).observe(now - self._arrival)
            metrics.generation_tokens.of(engine).observe(sample.num_tokens)
            if sample.is_first_of_prompt:
                self._observe_prompt(sample, engine)

    def _observe_prompt(self, sample: Sample, engine: str) -> None:
        self._metrics.prompt_tokens.of(engine).observe(len(sample.prompt.prompt_ids))
        self._metrics.params_n.of(engine).observe(sample.num_samples)
        self._metrics.params_max_tokens.of(engine).observe(sample.prompt.params.max_tokens or 0)


def _engine(generation: Generation) -> str:
    """The label of the instance where it runs; empty if it waits for one, or has ended."""
    return "" if generation.rank is None else str(generation.rank)


def _of_reports(model: str, reports: Mapping[int, Report]) -> Iterable[Metric]:
    """What instances say of themselves."""
    gauges = {
        "num_requests_running": "Requests in the running batch.",
        "num_requests_waiting": "Requests that wait.",
        "kv_cache_usage_perc": "Used part of the KV cache, 1 is all.",
    }
    counters = {
        "prompt_tokens": "Prompt tokens computed.",
        "generation_tokens": "Tokens generated.",
        "num_preemptions": "Requests set back for lack of KV blocks.",
        "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
        "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    }
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        name: GaugeMetricFamily(f"vllm:{name}", help, labels=LABELS) for name, help in gauges.items()
    }
    families |= {
        name: CounterMetricFamily(f"vllm:{name}", help, labels=LABELS) for name, help in counters.items()
    }
    for rank, report in sorted(reports.items()):
        values = {
            "num_requests_running": report.running,
            "num_requests_waiting": report.waiting,
            "kv_cache_usage_perc": report.blocks_used / max(1, report.blocks_total),
            "prompt_tokens": report.counters.prompt_tokens,
            "generation_tokens": report.counters.generation_tokens,
            "num_preemptions": report.counters.preemptions,
            "prefix_cache_queries": report.counters.prefix_cache_queries,
            "prefix_cache_hits": report.counters.prefix_cache_hits,
        }
        for name, value in values.items():
            families[name].add_metric((model, str(rank)), value)
    return [*families.values(), *_of_lockstep(model, reports)]


def _of_lockstep(model: str, reports: Mapping[int, Report]) -> Iterable[Metric]:
    """What instances say of the steps that they take together."""
    totals = {
        "steps": "Steps taken in lockstep.",
        "empty_steps": "Of those, steps without tokens of this instance.",
        "sleeps": "Times that all instances agreed to sleep.",
        "busiest_tokens": "Sum over steps of the busiest instance's tokens; over mean_tokens: the imbalance.",
        "mean_tokens": "Sum over steps of the instances' mean tokens.",
        "attention_calls": "Layers of steps in which this instance computed attention.",
        "changes": "Groups that followed another by agreement: somebody came or left.",
        "recoveries": "Groups that followed another after a loss.",
    }
    parts = ("wait", "attention", "dispatch", "experts", "combine", "rest")
    families = {
        name: CounterMetricFamily(f"lockstep:{name}", help, labels=LABELS) for name, help in totals.items()
    }
    seconds = CounterMetricFamily(
        "lockstep:step_seconds",
        "Time of steps by part: wait (for headers), attention, dispatch, experts, combine, rest.",
        labels=(*LABELS, "part"),
    )
    recovery = CounterMetricFamily(
        "lockstep:recovery_seconds",
        "Time from a loss noticed to the first step after it by part: form (the coordinator's word), experts "
        "(reading the lost ones), group (forming it), step (the first one).",
        labels=(*LABELS, "part"),
    )
    of_expert = CounterMetricFamily(
        "lockstep:expert_tokens", "Tokens computed by an expert, over all layers.", labels=(*LABELS, "expert")
    )
    durations = HistogramMetricFamily(
        "lockstep:step_duration_seconds",
        "Of steps and sleeps, from giving the header to having the result.",
        labels=LABELS,
    )
    longest = GaugeMetricFamily(
        "lockstep:longest_step_seconds", "The longest of them since the start.", labels=LABELS
    )
    epoch = GaugeMetricFamily(
        "lockstep:instance_epoch", "Of the group that the instance stepped in last.", labels=LABELS
    )
    for rank, report in sorted(reports.items()):
        counters = report.lockstep
        if counters is None:
            continue
        labels = (model, str(rank))
        for name, family in families.items():
            family.add_metric(labels, getattr(counters, name))
        for part, spent in counters.recovery_seconds.items():
            recovery.add_metric((*labels, part), spent)
        for part in parts:
            seconds.add_metric((*labels, part), getattr(counters, f"{part}_seconds"))
        for expert, tokens in counters.tokens_per_expert.items():
            of_expert.add_metric((*labels, str(expert)), tokens)
        durations.add_metric(labels, buckets(STEP_BOUNDS, counters.step_counts), counters.all_steps_seconds)
        longest.add_metric(labels, counters.longest_step_seconds)
        epoch.add_metric(labels, counters.epoch)
    return [*families.values(), seconds, recovery, of_expert, durations, longest, epoch]
