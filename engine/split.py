"""Where the steps of a lockstep instance spend their time, summed up since its start (no torch)."""

from __future__ import annotations

from engine.executor.base import ExpertTimes
from engine.messages import LockstepCounters
from engine.pace import Agreement


class StepSplit:
    """Adds up agreements and step times; :meth:`counters` is what a report carries."""

    def __init__(self) -> None:
        self._steps = self._empty_steps = self._sleeps = 0
        self._wait = self._dispatch = self._experts = self._combine = self._rest = 0.0
        self._busiest = 0
        self._mean = 0.0

    def slept(self, agreement: Agreement) -> None:
        """The group agreed that there is nothing to do."""
        self._sleeps += 1
        self._wait += agreement.waited

    def stepped(self, agreement: Agreement, num_tokens: int, seconds: float, times: ExpertTimes) -> None:
        """A step was computed in ``seconds``, this instance having ``num_tokens`` of its rows."""
        self._steps += 1
        self._empty_steps += num_tokens == 0
        self._wait += agreement.waited
        self._dispatch += times.dispatch
        self._experts += times.experts
        self._combine += times.combine
        self._rest += max(0.0, seconds - times.dispatch - times.experts - times.combine)
        self._busiest += max(agreement.sizes)
        self._mean += sum(agreement.sizes) / len(agreement.sizes)

    def counters(self, tokens_per_expert: dict[int, int]) -> LockstepCounters:
        return LockstepCounters(
            steps=self._steps,
            empty_steps=self._empty_steps,
            sleeps=self._sleeps,
            wait_seconds=self._wait,
            attention_seconds=self._rest,
            dispatch_seconds=self._dispatch,
            experts_seconds=self._experts,
            combine_seconds=self._combine,
            busiest_tokens=self._busiest,
            mean_tokens=self._mean,
            tokens_per_expert=tokens_per_expert,
        )
