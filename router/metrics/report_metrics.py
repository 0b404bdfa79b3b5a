"""Reports of instances as metrics, under vLLM's names where it has one (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

from engine.messages import (
    ITERATION_BOUNDS,
    STEP_BOUNDS,
    ImageCounters,
    InstanceReport,
    LockstepCounters,
    TransferCounters,
)
from router.metrics.file_metrics import of_files

LABELS = ("model_name", "engine")
CACHE_LABELS = ("block_size", "num_gpu_blocks")


def buckets(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulative buckets, which Prometheus expects."""
    names = [*map(floatToGoString, bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


def of_reports(
    model: str, reports: Mapping[int, InstanceReport], block_size: int | None = None
) -> Iterable[Metric]:
    """Metrics from the reports of instances, by rank.

    ``block_size``: tokens of a KV block, if that is known.
    """
    gauges = {
        "num_requests_running": "Requests in the running batch.",
        "num_requests_waiting": "Requests that wait.",
        "kv_cache_usage_perc": "Used part of the KV cache, 1 is all.",
    }
    counters = {
        "prompt_tokens": "Tokens of prompts, counted where the first token of their request was given.",
        "generation_tokens": "Tokens generated, also those that stop strings cut off.",
        "num_preemptions": "Requests set back for lack of KV blocks, or for others of higher priority.",
        "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
        "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
        "prompt_tokens_cached": "Part of prompt_tokens that was not computed: cached, or fetched.",
        "external_prefix_cache_queries": "Prompt tokens whose KV blocks were asked of others, or of files.",
        "external_prefix_cache_hits": "Of those, tokens whose blocks came.",
        "spec_decode_num_drafts": "Drafts of tokens computed ahead.",
        "spec_decode_num_draft_tokens": "Tokens that were drafted.",
        "spec_decode_num_accepted_tokens": "Of those, tokens that were the sampled ones.",
    }
    families: dict[str, GaugeMetricFamily | CounterMetricFamily] = {
        name: GaugeMetricFamily(f"vllm:{name}", help, labels=LABELS) for name, help in gauges.items()
    }
    families |= {
        name: CounterMetricFamily(f"vllm:{name}", help, labels=LABELS) for name, help in counters.items()
    }
    for rank, report in sorted(reports.items()):
        moved = report.transfers or TransferCounters()
        values = {
            "num_requests_running": report.running,
            "num_requests_waiting": report.waiting,
            "kv_cache_usage_perc": report.blocks_used / max(1, report.blocks_total),
            "prompt_tokens": report.counters.prompt_tokens,
            "generation_tokens": report.counters.generation_tokens,
            "num_preemptions": report.counters.preemptions,
            "prefix_cache_queries": report.counters.prefix_cache_queries,
            "prefix_cache_hits": report.counters.prefix_cache_hits,
            "prompt_tokens_cached": report.counters.prefix_cache_hits,
            "external_prefix_cache_queries": moved.queried_tokens,
            "external_prefix_cache_hits": moved.fetched_tokens,
            "spec_decode_num_drafts": report.counters.drafts,
            "spec_decode_num_draft_tokens": report.counters.drafted_tokens,
            "spec_decode_num_accepted_tokens": sum(report.counters.taken_by_place),
        }
        for name, value in values.items():
            families[name].add_metric((model, str(rank)), value)
    return [
        *families.values(),
        *_by_kind(model, reports, block_size),
        *_of_adapters(reports),
        *(metric for of_part in OF_PARTS for metric in of_part(model, reports)),
    ]


def _by_kind(model: str, reports: Mapping[int, InstanceReport], block_size: int | None) -> Iterable[Metric]:
    """vLLM's metrics with one more label, and the histogram of step sizes."""
    waiting = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason",
        "Requests that wait: for room (capacity), or held back (deferred).",
        labels=(*LABELS, "reason"),
    )
    asleep = GaugeMetricFamily(
        "vllm:engine_sleep_state", "1 in the state that the engine is in.", labels=(*LABELS, "sleep_state")
    )
    sources = CounterMetricFamily(
        "vllm:prompt_tokens_by_source",
        "Parts of prompt_tokens by where the instance of the first token had them from.",
        labels=(*LABELS, "source"),
    )
    sizes = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens of a step.", labels=LABELS)
    taken = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens that were the sampled ones, by their position in the draft.",
        labels=(*LABELS, "position"),
    )
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "Always 1; see its labels.",
        labels=(*LABELS, *CACHE_LABELS),
    )
    for rank, report in sorted(reports.items()):
        labels, counters = (model, str(rank)), report.counters
        if block_size is not None:
            cache.add_metric((*labels, str(block_size), str(report.blocks_total)), 1)
        waiting.add_metric((*labels, "capacity"), report.waiting)
        waiting.add_metric((*labels, "deferred"), 0)
        for state in ("awake", "weights_offloaded", "discard_all"):
            asleep.add_metric((*labels, state), float(state == "awake"))
        computed = counters.prompt_tokens - counters.prefix_cache_hits
        sources.add_metric((*labels, "local_compute"), max(0, computed))
        fetched = report.transfers.prompt_tokens if report.transfers is not None else 0
        sources.add_metric((*labels, "local_cache_hit"), max(0, counters.prefix_cache_hits - fetched))
        sources.add_metric((*labels, "external_kv_transfer"), fetched)
        for position, count in enumerate(counters.taken_by_place):
            taken.add_metric((*labels, str(position)), count)
        if counters.step_sizes:
            found = buckets(ITERATION_BOUNDS, counters.step_sizes)
            sizes.add_metric(labels, found, counters.scheduled_tokens)
    return [waiting, asleep, sources, sizes, taken, cache]


def _of_adapters(reports: Mapping[int, InstanceReport]) -> Iterable[Metric]:
    """Low-rank adapters of each instance, in vLLM's form, which gateways read.

    Its value there is a time, by which the newest of several lines is found. Here there is one.
    """
    info = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "Low-rank adapters of running and of waiting requests.",
        labels=("max_lora", "waiting_lora_adapters", "running_lora_adapters", "engine"),
    )
    for rank, report in sorted(reports.items()):
        if (use := report.adapters) is not None:
            info.add_metric([str(use.most), ",".join(use.waiting), ",".join(use.running), str(rank)], 1.0)
    return [info] if info.samples else []


def _of_pooling(model: str, reports: Mapping[int, InstanceReport]) -> Iterable[Metric]:
    """Counts of pooling models, once there are any."""
    families = {
        name: CounterMetricFamily(f"lockstep:{name}", help, labels=LABELS)
        for name, help in {
            "pooling_requests": "Inputs of pooled requests that were computed.",
            "pooling_tokens": "Tokens of these inputs.",
            "pooling_steps": "Steps in which they were computed, many in one.",
            "pooling_not_finite": "Inputs whose result had NaN or infinities: they failed.",
        }.items()
    }
    for rank, report in sorted(reports.items()):
        counters = report.counters
        if not counters.pooled_requests:
            continue
        found = (counters.pooled_requests, counters.pooled_tokens, counters.pooled_steps, counters.not_finite)
        for family, count in zip(families.values(), found, strict=True):
            family.add_metric([model, str(rank)], count)
    return [family for family in families.values() if family.samples]


def _of_images(model: str, reports: Mapping[int, InstanceReport]) -> Iterable[Metric]:
    """Images by what was done for them; none of models that take none."""
    images = CounterMetricFamily(
        "lockstep:images",
        "Images of requests: run through the encoder, kept by it, cached with their prompt, or failed.",
        labels=(*LABELS, "outcome"),
    )
    for rank, report in sorted(reports.items()):
        if report.images is not None:
            for outcome in ImageCounters.__struct_fields__:
                images.add_metric([model, str(rank), outcome], getattr(report.images, outcome))
    return [images] if images.samples else []


def _of_transfers(model: str, reports: Mapping[int, InstanceReport]) -> Iterable[Metric]:
    """Metrics of KV blocks that instances fetch from each other."""
    outcomes = CounterMetricFamily(
        "lockstep:kv_fetches",
        "Transfers of KV blocks from other instances and from files, by how they ended.",
        labels=(*LABELS, "outcome"),
    )
    num_bytes = CounterMetricFamily(
        "lockstep:kv_fetched_bytes", "Bytes of KV blocks that came.", labels=LABELS
    )
    seconds = CounterMetricFamily(
        "lockstep:kv_fetch_seconds", "Time of transfers, from the question to the last block.", labels=LABELS
    )
    inherited = CounterMetricFamily(
        "lockstep:kv_inherited_tokens", "Tokens whose KV blocks came from a dead instance.", labels=LABELS
    )
    lent = CounterMetricFamily(
        "lockstep:kv_lent_blocks", "KV blocks that were held for other instances.", labels=LABELS
    )
    checked = CounterMetricFamily(
        "lockstep:kv_checked", "Fetched KV blocks that were computed as well, and compared.", labels=LABELS
    )
    wrong = CounterMetricFamily(
        "lockstep:kv_wrong",
        "KV blocks that came and were not what was computed, or had another digest.",
        labels=LABELS,
    )
    by_kind = (*LABELS, "kind")
    spot_checked = CounterMetricFamily(
        "lockstep:cache_checked",
        "Cached pieces that requests had found and spot checks computed again, by where they came from.",
        labels=by_kind,
    )
    spot_wrong = CounterMetricFamily(
        "lockstep:cache_wrong", "Those of them that were not what was computed.", labels=by_kind
    )
    price = GaugeMetricFamily(
        "lockstep:kv_fetch_price",
        "Measured time to fetch a token over that to compute one; 1: nothing is fetched.",
        labels=LABELS,
    )
    for rank, report in sorted(reports.items()):
        counters, labels = report.transfers, (model, str(rank))
        if counters is None:
            continue
        for outcome, count in sorted(counters.outcomes.items()):
            outcomes.add_metric((*labels, outcome), count)
        num_bytes.add_metric(labels, counters.fetched_bytes)
        inherited.add_metric(labels, counters.inherited_tokens)
        seconds.add_metric(labels, counters.fetch_seconds)
        lent.add_metric(labels, counters.lent_blocks)
        checked.add_metric(labels, counters.checked_blocks)
        wrong.add_metric(labels, counters.wrong_blocks)
        price.add_metric(labels, report.fetch_price)
        for family, counts in (spot_checked, counters.spot_checked), (spot_wrong, counters.spot_wrong):
            for kind, count in sorted(counts.items()):
                family.add_metric((*labels, kind), count)
    return [outcomes, num_bytes, seconds, inherited, lent, checked, wrong, spot_checked, spot_wrong, price]


STEP_PARTS = ("wait", "attention", "dispatch", "experts", "combine", "rest")
"""Parts of a step that are timed: fields of :class:`LockstepCounters` before ``_seconds``."""
OF_STEPS = {
    "steps": "Steps taken in lockstep.",
    "empty_steps": "Of those, steps without tokens of this instance.",
    "sleeps": "Times that all instances agreed to sleep.",
    "busiest_tokens": "Sum over steps of the busiest instance's tokens; over mean_tokens: the imbalance.",
    "mean_tokens": "Sum over steps of the instances' mean tokens.",
    "attention_calls": "Layers of steps in which this instance computed attention.",
    "changes": "Groups that followed another by agreement: an instance came or left.",
    "recoveries": "Groups that followed another after a loss.",
}
"""Counters behind ``lockstep:``, each a field of :class:`LockstepCounters`, and their help."""
OF_STEPS_BY_LABEL = {
    "step_seconds": (
        "Time of steps by part: wait (for headers), attention, dispatch, experts, combine, rest.",
        ("part",),
    ),
    "recovery_seconds": (
        "Time from a loss noticed to the first step after it by part: form (the coordinator's plan), experts "
        "(reading the lost ones), group (forming it), step (the first one).",
        ("part",),
    ),
    "expert_tokens": ("Tokens computed by an expert, over all layers.", ("expert",)),
    "link_bytes": (
        "Bytes over links to another instance (peer, by its rank), sent or received (direction).",
        ("peer", "direction"),
    ),
    "link_wait_seconds": (
        "Time for which collectives and steps have waited for another instance (peer) over links.",
        ("peer",),
    ),
}
"""Counters behind ``lockstep:`` with labels of their own: help and labels."""


def _of_lockstep(model: str, reports: Mapping[int, InstanceReport]) -> Iterable[Metric]:
    """Metrics of the steps that instances take together."""
    counters = {
        name: CounterMetricFamily(f"lockstep:{name}", help, labels=LABELS) for name, help in OF_STEPS.items()
    }
    by_label = {
        name: CounterMetricFamily(f"lockstep:{name}", help, labels=(*LABELS, *labels))
        for name, (help, labels) in OF_STEPS_BY_LABEL.items()
    }
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
        if (totals := report.lockstep) is None:
            continue
        labels = (model, str(rank))
        for name, family in counters.items():
            family.add_metric(labels, getattr(totals, name))
        for name, own, value in _labelled(totals):
            by_label[name].add_metric((*labels, *own), value)
        durations.add_metric(labels, buckets(STEP_BOUNDS, totals.step_counts), totals.all_steps_seconds)
        longest.add_metric(labels, totals.longest_step_seconds)
        epoch.add_metric(labels, totals.epoch)
    of_links = [by_label.pop(name) for name in ("link_bytes", "link_wait_seconds")]
    return [*counters.values(), *by_label.values(), durations, longest, epoch, *of_links]


def _labelled(totals: LockstepCounters) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Metric of ``OF_STEPS_BY_LABEL``, labels and value of each count of an instance."""
    for part in STEP_PARTS:
        yield "step_seconds", (part,), getattr(totals, f"{part}_seconds")
    for part, spent in totals.recovery_seconds.items():
        yield "recovery_seconds", (part,), spent
    for expert, tokens in totals.tokens_per_expert.items():
        yield "expert_tokens", (str(expert),), tokens
    for peer, count in sorted(totals.links.items()):
        yield "link_bytes", (str(peer), "sent"), count.bytes_sent
        yield "link_bytes", (str(peer), "received"), count.bytes_received
        yield "link_wait_seconds", (str(peer),), count.seconds_waited


OF_PARTS = (_of_transfers, of_files, _of_pooling, _of_images, _of_lockstep)
"""Metrics of parts that not every instance has."""
