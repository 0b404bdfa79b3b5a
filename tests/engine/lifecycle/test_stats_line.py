from __future__ import annotations

from engine.lifecycle.stats_line import StatsLine, drain_line
from engine.messages import Counters
from engine.scheduling.report_policy import LoadSnapshot


def snapshot(running: int = 0, waiting: int = 0, blocks_used: int = 0) -> LoadSnapshot:
    return LoadSnapshot(running, waiting, 0, 0, 0, blocks_used, 0, 0)


def test_it_tells_what_was_done_since_the_last_time() -> None:
    line = StatsLine(num_blocks=200, now=100.0)
    assert (line.is_due(109.9), line.is_due(110.0)) == (False, True)
    first = Counters(prompt_tokens=500, generation_tokens=1000, prefix_cache_queries=500, steps=70)
    assert line.line(first, snapshot(3, 2, 30), 110.0) == (
        "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 100.0 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, KV cache usage: 15.0%, Prefix cache hit rate: 0.0%"
    )
    assert not line.is_due(119.0)
    second = Counters(
        prompt_tokens=700, generation_tokens=1100, prefix_cache_queries=700, prefix_cache_hits=50, steps=90
    )
    assert line.line(second, snapshot(1, 0, 10), 130.0) == (
        "Avg prompt throughput: 10.0 tokens/s, Avg generation throughput: 5.0 tokens/s, Running: 1 reqs, "
        "Waiting: 0 reqs, KV cache usage: 5.0%, Prefix cache hit rate: 25.0%"
    )


def test_rest_is_told_once() -> None:
    line = StatsLine(num_blocks=10, now=0.0)
    assert line.line(Counters(), snapshot(), 10.0) is None
    assert line.line(Counters(steps=1), snapshot(), 20.0) is not None
    last = line.line(Counters(steps=1), snapshot(), 30.0)
    assert last is not None
    assert "Avg generation throughput: 0.0 tokens/s, Running: 0 reqs" in last
    assert line.line(Counters(steps=1), snapshot(), 40.0) is None
    assert line.line(Counters(steps=1), snapshot(waiting=1), 50.0) is not None, "it hangs"


def test_a_drain_is_announced_with_what_is_left() -> None:
    assert drain_line(snapshot(), 120.0) == "draining: no request is left here"
    end = "for at most 120 s (--drain-timeout), or until its launcher ends it"
    assert drain_line(snapshot(1), 120.0) == f"draining 1 request {end}"
    assert drain_line(snapshot(3, 2), 120.0) == f"draining 5 requests {end}"
