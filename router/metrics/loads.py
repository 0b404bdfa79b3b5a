"""Load of each instance, from its latest report (pure). Field names are SGLang's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from engine.messages import InstanceReport


class ServerLoad(msgspec.Struct):
    """Load of one router in vLLM's form: requests in flight."""

    server_load: int


class InstanceLoad(msgspec.Struct):
    """Load of one instance, under SGLang's names."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int
    num_waiting_tokens: int
    """Tokens not yet computed of all requests that wait or are in prefill."""
    num_used_blocks: int
    max_total_num_blocks: int
    token_usage: float
    """Used share of the KV cache; 1 is all."""
    cache_hit_rate: float
    """Share of prompt tokens found in the prefix cache, since the instance's start."""


class OlderLoad(msgspec.Struct):
    """Load of one instance in the form of SGLang's /get_load."""

    dp_rank: int
    num_reqs: int
    num_waiting_reqs: int
    num_tokens: int
    """Tokens in requests' KV cache (each block counted as full), and tokens that wait."""
    num_pending_tokens: int


class Aggregate(msgspec.Struct):
    """Load of all instances together."""

    total_running_reqs: int
    total_waiting_reqs: int
    total_reqs: int
    avg_token_usage: float


class Loads(msgspec.Struct):
    timestamp: float
    """Seconds since 1970."""
    dp_rank_count: int
    loads: list[InstanceLoad]
    aggregate: Aggregate

    @classmethod
    def of(cls, loads: Sequence[InstanceLoad], now: float) -> Loads:
        running = sum(load.num_running_reqs for load in loads)
        waiting = sum(load.num_waiting_reqs for load in loads)
        usage = sum(load.token_usage for load in loads) / max(1, len(loads))
        return cls(now, len(loads), list(loads), Aggregate(running, waiting, running + waiting, usage))


def loads_of(reports: Mapping[int, InstanceReport]) -> list[InstanceLoad]:
    """Loads of all instances, by rank."""
    return [_load(rank, report) for rank, report in sorted(reports.items())]


def older_loads_of(reports: Mapping[int, InstanceReport], block_size: int) -> list[OlderLoad]:
    """Loads of all instances in the older form, by rank."""
    return [
        OlderLoad(
            dp_rank=rank,
            num_reqs=report.running + report.waiting,
            num_waiting_reqs=report.waiting,
            num_tokens=report.blocks_used * block_size + report.waiting_tokens,
            num_pending_tokens=report.waiting_tokens,
        )
        for rank, report in sorted(reports.items())
    ]


def _load(rank: int, report: InstanceReport) -> InstanceLoad:
    return InstanceLoad(
        dp_rank=rank,
        num_running_reqs=report.running,
        num_waiting_reqs=report.waiting,
        num_total_reqs=report.running + report.waiting,
        num_waiting_tokens=report.waiting_tokens,
        num_used_blocks=report.blocks_used,
        max_total_num_blocks=report.blocks_total,
        token_usage=report.blocks_used / max(1, report.blocks_total),
        cache_hit_rate=report.counters.prefix_cache_hits / max(1, report.counters.prefix_cache_queries),
    )
