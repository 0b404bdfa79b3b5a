"""Log lines about the load of an instance, every ten seconds and at drains (pure)."""

from __future__ import annotations

from engine.messages import Counters
from engine.scheduling.report_policy import LoadSnapshot

INTERVAL = 10.0
"""Seconds between two lines about throughput and load."""


class StatsLine:
    """Same wording as vLLM's line, for people and programs that read it."""

    def __init__(self, num_blocks: int, now: float) -> None:
        self._num_blocks = num_blocks
        self._at = now
        self._counters = Counters()
        self._was_busy = False

    def __repr__(self) -> str:
        return f"<StatsLine since {self._at}>"

    def is_due(self, now: float) -> bool:
        return now - self._at >= INTERVAL

    def line(self, counters: Counters, snapshot: LoadSnapshot, now: float) -> str | None:
        """Line for the time since the last call; None if twice nothing was done."""
        before, seconds = self._counters, now - self._at
        self._counters, self._at = counters, now
        is_busy = counters.steps > before.steps or snapshot.running + snapshot.waiting > 0
        was_busy, self._was_busy = self._was_busy, is_busy
        if not (is_busy or was_busy):
            return None
        prompts = (counters.prompt_tokens - before.prompt_tokens) / seconds
        output = (counters.generation_tokens - before.generation_tokens) / seconds
        looked_up = counters.prefix_cache_queries - before.prefix_cache_queries
        found = counters.prefix_cache_hits - before.prefix_cache_hits
        return (
            f"Avg prompt throughput: {prompts:.1f} tokens/s, "
            f"Avg generation throughput: {output:.1f} tokens/s, "
            f"Running: {snapshot.running} reqs, Waiting: {snapshot.waiting} reqs, "
            f"KV cache usage: {snapshot.blocks_used / self._num_blocks:.1%}, "
            f"Prefix cache hit rate: {found / looked_up if looked_up else 0.0:.1%}"
        )


def drain_line(load: LoadSnapshot, seconds: float) -> str:
    """The log line of a drain that begins, with what is left and how long."""
    if not (requests := load.running + load.waiting):
        return "draining: no request is left here"
    # A launcher that ends altogether has its routers end all requests first, and waits for less.
    return (
        f"draining {requests} request{'s' * (requests > 1)} for at most {seconds:.0f} s (--drain-timeout), "
        "or until its launcher ends it"
    )
