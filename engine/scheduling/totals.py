"""Counters of an instance since its start (pure), as reports carry them."""

from __future__ import annotations

from bisect import bisect_left

from engine.messages import ITERATION_BOUNDS, Counters
from engine.scheduling.request import Request


class SchedulerTotals:
    """Counts that only rise."""

    def __init__(self) -> None:
        self.generation_tokens = 0
        self.preemptions = 0
        self.steps = 0
        self.not_finite = 0
        """Pooled requests whose result was no finite number."""
        self._pooled = (0, 0, 0)
        """Pooled requests, their tokens, and the steps in which they were computed."""
        self.fetched_tokens = 0
        """Tokens of prompts whose blocks were fetched; a part of the cache hits."""
        self._prompt_tokens = 0
        self._cache_hits = 0
        self._scheduled_tokens = 0
        self._step_sizes = [0] * (len(ITERATION_BOUNDS) + 1)
        self._drafts = 0
        self._drafted_tokens = 0
        self._taken_by_place: list[int] = []

    def on_first_token(self, request: Request) -> None:
        """Count the prompt of a request that has its first token, as vLLM does.

        An instance where a request goes on does not count it: its prompt was counted before.
        """
        self._prompt_tokens += request.num_prompt
        self._cache_hits += request.num_cached
        self.fetched_tokens += min(request.num_fetched, request.num_cached)

    def on_step(self, num_tokens: int) -> None:
        """Count a scheduled step of so many tokens."""
        self.steps += 1
        self._scheduled_tokens += num_tokens
        self._step_sizes[bisect_left(ITERATION_BOUNDS, num_tokens)] += 1

    def on_pooled(self, num_requests: int, num_tokens: int) -> None:
        """Count a step in which pooled requests were computed."""
        requests, tokens, steps = self._pooled
        self._pooled = (requests + num_requests, tokens + num_tokens, steps + 1)

    def on_draft(self, num_tokens: int) -> None:
        """Count tokens drafted for a request."""
        self._drafts += 1
        self._drafted_tokens += num_tokens

    def on_taken(self, num_tokens: int) -> None:
        """Count the leading tokens of a draft that were taken."""
        self._taken_by_place += [0] * (num_tokens - len(self._taken_by_place))
        for position in range(num_tokens):
            self._taken_by_place[position] += 1

    def counters(self) -> Counters:
        """The counters of a report; ``bad_messages`` is the server's."""
        return Counters(
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self.generation_tokens,
            preemptions=self.preemptions,
            prefix_cache_queries=self._prompt_tokens,
            prefix_cache_hits=self._cache_hits,
            steps=self.steps,
            scheduled_tokens=self._scheduled_tokens,
            step_sizes=self._step_sizes[:],
            drafts=self._drafts,
            drafted_tokens=self._drafted_tokens,
            taken_by_place=self._taken_by_place[:],
            not_finite=self.not_finite,
            pooled_requests=self._pooled[0],
            pooled_tokens=self._pooled[1],
            pooled_steps=self._pooled[2],
        )
