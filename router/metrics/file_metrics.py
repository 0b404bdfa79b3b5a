"""Metrics of KV blocks in files, under vLLM's names where it has one (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from engine.messages import InstanceReport

LABELS = ("model_name", "engine")
TIER = "fs"
"""The only tier behind an instance's memory."""
OF_TIER = {
    "block_queries": ("queried_blocks", "KV blocks that were looked up in files."),
    "block_hits": ("found_blocks", "Of those, blocks that had a file."),
    "read_bytes": ("read_bytes", "Bytes of KV blocks read from files."),
    "read_time": ("read_seconds", "Seconds for that, all tries together."),
    "write_bytes": ("written_bytes", "Bytes of KV blocks written to files."),
    "write_time": ("write_seconds", "Seconds for that."),
    "promotion_job_failures": ("read_failures", "Reads that ended by an error of the system."),
    "cascade_job_failures": ("write_failures", "KV blocks that could not be written to a file."),
}
"""vLLM's names behind ``vllm:kv_offload_tiering_``: fields of :class:`engine.messages.FileCounters`, help."""


def of_files(model: str, reports: Mapping[int, InstanceReport]) -> Iterable[Metric]:
    """Metrics from the reports of instances that keep blocks in files, by rank."""
    families = {
        field: CounterMetricFamily(f"vllm:kv_offload_tiering_{name}", help, labels=(*LABELS, "tier"))
        for name, (field, help) in OF_TIER.items()
    }
    skipped = CounterMetricFamily(
        "lockstep:kv_files_skipped",
        "KV blocks that were not written: evicted before, too many at once, or behind a failure.",
        labels=LABELS,
    )
    dropped = CounterMetricFamily(
        "lockstep:kv_files_dropped", "Files of KV blocks deleted, as the directory was full.", labels=LABELS
    )
    size = GaugeMetricFamily(
        "lockstep:kv_cache_dir_bytes",
        "Bytes of all files of KV blocks in the directory, as far as the instance knows.",
        labels=LABELS,
    )
    hung = GaugeMetricFamily(
        "lockstep:kv_cache_dir_hung_seconds",
        "Seconds for which the disk of KV blocks has not answered; 0: it answers, or was not asked.",
        labels=LABELS,
    )
    for rank, report in sorted(reports.items()):
        if (counters := report.files) is None:
            continue
        labels = (model, str(rank))
        for field, family in families.items():
            family.add_metric((*labels, TIER), getattr(counters, field))
        skipped.add_metric(labels, counters.skipped_blocks)
        dropped.add_metric(labels, counters.dropped_files)
        size.add_metric(labels, counters.directory_bytes)
        hung.add_metric(labels, counters.hung_seconds)
    return [*families.values(), skipped, dropped, size, hung]
