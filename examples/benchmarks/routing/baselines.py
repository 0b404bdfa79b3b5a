"""Policies of other servers, written from their descriptions as pure functions.

Each knows what its original knows: its own dispatches, and what the instances last reported.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

from engine.messages import InstanceReport


class Baseline(Protocol):
    """A policy of one front end; ranks are 0 ... n - 1."""

    def choose(self, prompt: Sequence[int], now: float) -> int: ...
    def reported(self, rank: int, report: InstanceReport, now: float) -> None: ...
    def finished(self, rank: int) -> None: ...


class RoundRobin:
    def __init__(self, num_instances: int) -> None:
        self._num_instances = num_instances
        self._turn = -1

    def choose(self, prompt: Sequence[int], now: float) -> int:
        self._turn = (self._turn + 1) % self._num_instances
        return self._turn

    def reported(self, rank: int, report: InstanceReport, now: float) -> None:
        return

    def finished(self, rank: int) -> None:
        return


class _Counts:
    """Running and waiting requests per instance, as vLLM's front ends have them.

    The coordinator refreshes them every 100 ms, whatever was sent since.
    """

    REFRESH = 0.1

    def __init__(self, num_instances: int) -> None:
        self._newest = [(0, 0, 0.0)] * num_instances
        self.known = list(self._newest)
        self._refreshed_at = 0.0
        self._turn = 0

    def report(self, rank: int, report: InstanceReport) -> None:
        usage = report.blocks_used / report.blocks_total
        self._newest[rank] = (report.waiting, report.running, usage)

    def refresh(self, now: float) -> bool:
        if now - self._refreshed_at < self.REFRESH:
            return False
        self._refreshed_at = now - now % self.REFRESH
        self.known = list(self._newest)
        return True

    def lowest(self, scores: Sequence[float]) -> int:
        """The lowest score; equal ones take turns."""
        count = len(scores)
        self._turn = (self._turn + 1) % count
        return min(range(count), key=lambda rank: (scores[rank], (rank - self._turn) % count))


class VllmWaiting:
    """vLLM's older score: 4 times waiting plus running.

    What it sends counts as waiting until the refresh.
    """

    def __init__(self, num_instances: int) -> None:
        self._counts = _Counts(num_instances)

    def choose(self, prompt: Sequence[int], now: float) -> int:
        self._counts.refresh(now)
        rank = self._counts.lowest([4 * waiting + running for waiting, running, _ in self._counts.known])
        waiting, running, usage = self._counts.known[rank]
        self._counts.known[rank] = (waiting + 1, running, usage)
        return rank

    def reported(self, rank: int, report: InstanceReport, now: float) -> None:
        self._counts.report(rank, report)

    def finished(self, rank: int) -> None:
        return


class VllmInFlight:
    """vLLM's newer score: its own requests in flight, or waiting plus running if larger.

    Waiting requests add more while the KV cache is over half full.
    """

    def __init__(self, num_instances: int) -> None:
        self._counts = _Counts(num_instances)
        self._own = [0] * num_instances

    def choose(self, prompt: Sequence[int], now: float) -> int:
        self._counts.refresh(now)
        rank = self._counts.lowest(
            [
                max(own, waiting + running) + 6 * waiting * max(0.0, usage - 0.5)
                for own, (waiting, running, usage) in zip(self._own, self._counts.known, strict=True)
            ]
        )
        self._own[rank] += 1
        return rank

    def reported(self, rank: int, report: InstanceReport, now: float) -> None:
        self._counts.report(rank, report)

    def finished(self, rank: int) -> None:
        self._own[rank] -= 1


class SglangTotalTokens:
    """SGLang's ``total_tokens``: fewest tokens in cache and queue, then fewest requests.

    Of the requests, this router's own since the last report are counted.
    """

    def __init__(self, num_instances: int) -> None:
        self._tokens = [0] * num_instances
        self._requests = [0] * num_instances

    def choose(self, prompt: Sequence[int], now: float) -> int:
        ranks = range(len(self._tokens))
        rank = min(ranks, key=lambda each: (self._tokens[each], self._requests[each]))
        self._requests[rank] += 1
        self._tokens[rank] += len(prompt)
        return rank

    def reported(self, rank: int, report: InstanceReport, now: float) -> None:
        self._tokens[rank] = report.blocks_used * 16 + report.waiting_tokens
        self._requests[rank] = report.running + report.waiting

    def finished(self, rank: int) -> None:
        return


class SglangCacheAware:
    """SGLang's router: the longest prefix among those that it sent before.

    The prefix must be 0.3 of the prompt; otherwise the instance with the least text so far is chosen. The
    shortest queue is chosen while loads differ by more than 64 requests and a factor of 1.5.
    """

    CHUNK = 16
    """Tokens per step of the prefixes that are remembered."""
    MAX_CHUNKS = 200_000
    """Most chunks remembered per instance; the least recently used ones go first."""

    def __init__(self, num_instances: int) -> None:
        self._in_flight = [0] * num_instances
        self._seen: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_instances)]
        self._sizes: Counter[int] = Counter()

    def choose(self, prompt: Sequence[int], now: float) -> int:
        chunks = self._chunks(prompt)
        ranks = range(len(self._in_flight))
        most, least = max(self._in_flight), min(self._in_flight)
        if most - least > 64 and most > 1.5 * least:
            rank = self._in_flight.index(least)
        else:
            lengths = [self._length(rank, chunks) for rank in ranks]
            longest = max(lengths)
            if longest * self.CHUNK > 0.3 * len(prompt):
                rank = lengths.index(longest)
            else:
                rank = min(ranks, key=lambda each: self._sizes[each])
        seen = self._seen[rank]
        for chunk in chunks:
            self._sizes[rank] += chunk not in seen
            seen[chunk] = None
            seen.move_to_end(chunk)
        while len(seen) > self.MAX_CHUNKS:
            seen.popitem(last=False)
            self._sizes[rank] -= 1
        self._in_flight[rank] += 1
        return rank

    def reported(self, rank: int, report: InstanceReport, now: float) -> None:
        return

    def finished(self, rank: int) -> None:
        self._in_flight[rank] -= 1

    def _chunks(self, prompt: Sequence[int]) -> list[int]:
        chunks, parent = [], 0
        for start in range(0, len(prompt) - self.CHUNK + 1, self.CHUNK):
            parent = hash((parent, *prompt[start : start + self.CHUNK]))
            chunks.append(parent)
        return chunks

    def _length(self, rank: int, chunks: Sequence[int]) -> int:
        seen = self._seen[rank]
        return next((length for length, chunk in enumerate(chunks) if chunk not in seen), len(chunks))


BASELINES = {
    "round_robin": RoundRobin,
    "vllm_waiting": VllmWaiting,
    "vllm_in_flight": VllmInFlight,
    "sglang_total_tokens": SglangTotalTokens,
    "sglang_cache_aware": SglangCacheAware,
}
