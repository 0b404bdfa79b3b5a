"""Metrics for Prometheus, under vLLM's names and labels, which its dashboards expect.

What requests experience is kept here (histograms, request_success) and measured by
:mod:`router.metrics.meter`; what instances report is read from their latest report when Prometheus asks.
Names beginning with ``lockstep:`` are our own.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics

from engine.messages import FinishReason, InstanceReport
from router.faults import KINDS, Faults
from router.mesh import MeshFacts, ShadowResult
from router.metrics.balance_metrics import LastChange, balance_metrics
from router.metrics.http_counts import HttpCounts
from router.metrics.label_counts import OUTCOMES, LabelCounts
from router.metrics.pooling_counts import CACHE_EVENTS, PoolingCounts
from router.metrics.report_metrics import LABELS, of_reports
from router.metrics.request_histograms import CountedRequests
from router.metrics.shared_counts import SharedCounts, Snapshot, is_alive
from router.metrics.store_counts import STORE_EVENTS, StoreCounts

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


def _openmetrics(registry: CollectorRegistry) -> bytes:
    """Metrics page in OpenMetrics format, with colons kept in names.

    Left to choose, prometheus_client 0.23 and later writes vllm:x as vllm_x for every Prometheus before 3.0,
    and no dashboard would find it.
    """
    encode: Callable[..., bytes] = openmetrics.generate_latest
    as_they_are = {"escaping": "allow-utf-8"} if "escaping" in inspect.signature(encode).parameters else {}
    return encode(registry, **as_they_are)


class Metrics(CountedRequests):
    """All metrics of one router process and, over shared counts, of the routers beside it."""

    def __init__(
        self,
        mesh: MeshFacts,
        *,
        faults: Faults | None = None,
        shared: SharedCounts | None = None,
        alone: bool = True,
    ) -> None:
        """``mesh`` is asked at each scrape.

        ``alone``: no other router answers on this port, so that the process's own figures mean something.
        """
        super().__init__()
        self._mesh = mesh
        self._shared = shared
        self.store = StoreCounts()
        self.pooling = PoolingCounts()
        self._label_counts = _label_counts(mesh, self.store, self.pooling)
        self.faults = Faults() if faults is None else faults
        self.http = HttpCounts()
        self._last_change = LastChange()
        self._histograms = self.requests.all()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        if alone:
            ProcessCollector(registry=self._registry)
        if shared is not None and (left := shared.own()) is not None:
            self._go_on_from(left)

    def reports(self) -> Mapping[int, InstanceReport]:
        """The newest report of each instance, by rank."""
        return self._mesh.reports()

    def block_size(self) -> int | None:
        """Tokens of a KV block, if that is known."""
        return self._mesh.block_size()

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """Metrics page and its content type, in the format that the scraper accepts."""
        if "application/openmetrics-text" in accept:
            return _openmetrics(self._registry), OPENMETRICS
        return generate_latest(self._registry), TEXT

    def collect(self) -> Iterator[Metric]:
        """All metrics, for the registry."""
        model = self._mesh.model.names[0] if self._mesh.model is not None else ""
        others: list[Snapshot] = []
        if self._shared is not None:
            self._shared.write(self.snapshot())  # a count that a scrape has seen does not fall again
            others = self._shared.others()
        reports = self.reports()
        engines = [str(rank) for rank in sorted(reports)]
        for histogram in self._histograms:
            for engine in engines:
                histogram.of(engine)  # a series that is there from the start has a rate from the start
            yield histogram.family(model, [other.histograms.get(histogram.name, {}) for other in others])
        success = CounterMetricFamily(
            "vllm:request_success", "Requests that ended.", labels=(*LABELS, "finished_reason")
        )
        none = {(engine, reason.value): 0 for engine in engines for reason in FinishReason}
        for (engine, reason), count in sorted((none | self._success_of_all(others)).items()):
            success.add_metric((model, engine, reason), count)
        yield success
        yield from of_reports(model, reports, self.block_size())
        yield from self.http.families(other.http for other in others)
        yield from self._of_mesh(others)

    def snapshot(self) -> Snapshot:
        """Counts of this process, to be shared with other routers."""
        success: dict[str, dict[str, int]] = {}
        for (engine, reason), count in self.success.items():
            success.setdefault(engine, {})[reason] = count
        return Snapshot(
            pid=os.getpid(),
            in_flight=self.in_flight,
            histograms={histogram.name: histogram.totals() for histogram in self._histograms},
            success=success,
            faults=self.faults,
            http=self.http.totals(),
            **{name: counts.total() for name, counts in self._label_counts.items()},
        )

    def faults_of_all(self) -> Faults:
        """Faults seen by this process, the routers beside it and the launcher."""
        others = self._shared.others() if self._shared else []
        return Faults.merged([self.faults, *(other.faults for other in others)])

    def in_flight_of_all(self) -> int:
        """HTTP requests being generated for, here and at the routers beside this one."""
        return self.in_flight + _in_flight(self._shared.others() if self._shared else [])

    def _go_on_from(self, left: Snapshot) -> None:
        """Continue the counters of a process that this one replaces."""
        for histogram in self._histograms:
            histogram.add(left.histograms.get(histogram.name, {}))
        for engine, reasons in left.success.items():
            self.success.update({(engine, reason): count for reason, count in reasons.items()})
        for name, counts in self._label_counts.items():
            counts.go_on_from(getattr(left, name))
        self.http.add(left.http)
        self.faults.counts, self.faults.recent = left.faults.counts, left.faults.recent

    def _success_of_all(self, others: Sequence[Snapshot]) -> dict[tuple[str, str], int]:
        total = dict(self.success)
        for other in others:
            for engine, reasons in other.success.items():
                for reason, count in reasons.items():
                    total[engine, reason] = total.get((engine, reason), 0) + count
        return total

    def _of_mesh(self, others: Sequence[Snapshot]) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "lockstep:requests_in_flight",
            "HTTP requests being generated for.",
            self.in_flight + _in_flight(others),
        )
        faults = CounterMetricFamily(
            "lockstep:faults",
            "Losses detected, processes restarted, requests resumed.",
            labels=("event", "kind"),
        )
        for event, kinds in Faults.merged([self.faults, *(other.faults for other in others)]).counts.items():
            for kind, count in sorted((dict.fromkeys(KINDS[event], 0) | kinds).items()):
                faults.add_metric((event.value, kind), count)
        yield faults
        for name, counted in self._label_counts.items():
            yield counted.family([getattr(other, name) for other in others])
        if self.store.num_bytes is not None:
            help = "Bytes of stored answers, files and batches."
            yield GaugeMetricFamily("lockstep:store_bytes", help, self.store.num_bytes)
        if self.pooling.num_bytes is not None:
            help = "Bytes of pooled answers that are kept."
            yield GaugeMetricFamily("lockstep:pooling_cache_bytes", help, self.pooling.num_bytes)
        if (epoch := self._mesh.epoch()) is not None:
            yield GaugeMetricFamily("lockstep:epoch", "The number of the world.", epoch)
        instances = GaugeMetricFamily("lockstep:instances", "Instances by state.", labels=("state",))
        for state, count in sorted(self._mesh.instances_by_state().items()):
            instances.add_metric((state,), count)
        yield instances
        numerics = GaugeMetricFamily(
            "lockstep:numerics_class",
            "Instances of each numerics class, whose answers to one seed are equal.",
            labels=("fingerprint", "kernels", "dtype", "invariant"),
        )
        for each, ranks in sorted(self._mesh.numerics().items(), key=lambda item: item[1]):
            invariant = str(each.invariant).lower()
            numerics.add_metric((each.fingerprint, each.kernels, each.dtype, invariant), len(ranks))
        yield numerics
        roles = GaugeMetricFamily(
            "lockstep:instance_role", "1 for the role that an instance has.", labels=("engine", "role")
        )
        for rank, role in sorted(self._mesh.roles().items()):
            roles.add_metric((str(rank), role.value), 1)
        yield roles
        refused = CounterMetricFamily(
            "lockstep:refused_peers",
            "Connections that were refused, most for want of the mesh's key.",
            labels=("by",),
        )
        for by, count in sorted(self._mesh.refused_peers().items()):
            refused.add_metric((by,), count)
        yield refused
        if (balance := self._mesh.balance()) is not None:
            since = self._last_change.look(balance.changes, time.monotonic())
            yield from balance_metrics(balance, since)


def _label_counts(mesh: MeshFacts, store: StoreCounts, pooling: PoolingCounts) -> dict[str, LabelCounts]:
    """Counters with one label that mesh and store keep, by their field of :class:`Snapshot`."""
    return {
        "store_events": LabelCounts(
            lambda: store.events,
            "lockstep:store_events",
            "Stored answers, batches and their lines, by what became of them.",
            "event",
            STORE_EVENTS,
        ),
        "pooling_cache": LabelCounts(
            lambda: pooling.events,
            "lockstep:pooling_cache",
            "Inputs found and not found in the cache of pooled answers, and answers that were let go.",
            "event",
            CACHE_EVENTS,
        ),
        "choices": LabelCounts(
            mesh.choices, "lockstep:choices", "How choices of instances came out.", "outcome", OUTCOMES
        ),
        "numerics_changes": LabelCounts(
            mesh.numerics_changes,
            "lockstep:numerics_changes",
            "Requests that went on in another numerics class, by whether their answers were promised equal.",
            "promised",
            ("true", "false"),
        ),
        "shadow_checks": LabelCounts(
            mesh.shadow_checks,
            "lockstep:shadow_checks",
            "Requests that another instance computed again, by what came of it.",
            "result",
            tuple(ShadowResult),
        ),
        "shadow_differences": LabelCounts(
            mesh.shadow_differences,
            "lockstep:shadow_differences",
            "Shadow checks in which an instance computed otherwise than two others.",
            "rank",
        ),
    }


def _in_flight(others: Sequence[Snapshot]) -> int:
    return sum(other.in_flight for other in others if is_alive(other.pid))
