"""Time profile of a lockstep instance's steps, summed since its start (no torch)."""

from __future__ import annotations

from bisect import bisect_left

from engine.executor_contract import ExpertTimes
from engine.groups.stepping import Agreement
from engine.messages import STEP_BOUNDS, LockstepCounters


class StepProfile:
    """Sums of agreements and step times; :meth:`counters` has them for reports."""

    def __init__(self) -> None:
        self._steps = self._empty_steps = self._sleeps = 0
        self._wait = self._attention = self._dispatch = self._experts = self._combine = self._rest = 0.0
        self._attention_calls = self._busiest = 0
        self._mean = 0.0
        self._counts = [0] * (len(STEP_BOUNDS) + 1)
        self._seconds = self._longest = 0.0

    def slept(self, agreement: Agreement) -> None:
        """Count an agreement to sleep, as no instance has work."""
        self._sleeps += 1
        self._wait += agreement.waited
        self._lasted(agreement.waited)

    def stepped(self, agreement: Agreement, num_tokens: int, seconds: float, times: ExpertTimes) -> None:
        """Count a step that was computed in ``seconds``, this instance having ``num_tokens`` of its rows."""
        self._steps += 1
        self._empty_steps += num_tokens == 0
        self._wait += agreement.waited
        self._attention += times.attention
        self._attention_calls += times.attention_calls
        self._dispatch += times.dispatch
        self._experts += times.experts
        self._combine += times.combine
        parts = times.attention + times.dispatch + times.experts + times.combine
        self._rest += max(0.0, seconds - parts)
        self._busiest += max(agreement.sizes)
        self._mean += sum(agreement.sizes) / len(agreement.sizes)
        self._lasted(agreement.waited + seconds)

    def _lasted(self, seconds: float) -> None:
        self._counts[bisect_left(STEP_BOUNDS, seconds)] += 1
        self._seconds += seconds
        self._longest = max(self._longest, seconds)

    def counters(self, tokens_per_expert: dict[int, int]) -> LockstepCounters:
        return LockstepCounters(
            steps=self._steps,
            empty_steps=self._empty_steps,
            sleeps=self._sleeps,
            wait_seconds=self._wait,
            attention_seconds=self._attention,
            dispatch_seconds=self._dispatch,
            experts_seconds=self._experts,
            combine_seconds=self._combine,
            busiest_tokens=self._busiest,
            mean_tokens=self._mean,
            tokens_per_expert=tokens_per_expert,
            rest_seconds=self._rest,
            attention_calls=self._attention_calls,
            step_counts=list(self._counts),
            all_steps_seconds=self._seconds,
            longest_step_seconds=self._longest,
        )
