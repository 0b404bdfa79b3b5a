"""Measures one request into the histograms of :mod:`router.metrics.metrics`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import cast

from engine.messages import FinishReason
from router.mesh import Generation
from router.metrics.histograms import Series
from router.metrics.request_histograms import CountedRequests
from router.text.output_stream import OutputStream


class Gaps:
    """Observes the time between the tokens of one sample."""

    __slots__ = ("_bounds", "_counts", "_lasts", "_position", "_series")

    def __init__(self, series: Series, lasts: list[float], position: int) -> None:
        """``lasts``: times of the newest tokens of all samples, by position.

        The one at ``position`` is kept up to date here.
        """
        self._series, self._bounds, self._counts = series, series.bounds, series.counts
        self._lasts, self._position = lasts, position

    def tick(self, now: float) -> None:
        """Observe a token that came at ``now``, a time of ``time.perf_counter``.

        This is :meth:`.Series.observe` written out, as nearly every token comes here.
        """
        gap = now - self._lasts[self._position]
        self._lasts[self._position] = now
        self._counts[bisect_left(self._bounds, gap)] += 1
        self._series.total += gap


class Meter:
    """Meter of one request; ``close`` counts each sample that ended, or was given up."""

    def __init__(self, metrics: CountedRequests, samples: Sequence[OutputStream], arrival: float) -> None:
        self._metrics = metrics
        self._samples = samples
        self._arrival = arrival
        self._first: list[float] = [arrival] * len(samples)
        self._prefill: list[float | None] = [None] * len(samples)
        self._last: list[float | None] = [None] * len(samples)
        self._itl: list[Series | None] = [None] * len(samples)
        self._engines = [""] * len(samples)
        metrics.in_flight += 1

    @property
    def first_at(self) -> float | None:
        """Time of the first token of any sample; None before it."""
        came = [at for at, last in zip(self._first, self._last, strict=True) if last is not None]
        return min(came, default=None)

    def begin(self, position: int, generation: Generation) -> None:
        """Record that the mesh took a sample."""
        self._engines[position] = _engine(generation)

    def delta(
        self, position: int, generation: Generation, now: float, times: tuple[float, float] | None = None
    ) -> None:
        """Observe tokens of a sample. ``times``: those that come with a first delta."""
        last, self._last[position] = self._last[position], now
        if not self._metrics.has_times:
            self._engines[position] = _engine(generation) or self._engines[position]
            self._first[position] = now if last is None else self._first[position]
            return
        series = self._itl[position]
        if last is not None and series is not None:
            series.observe(now - last)
            return
        engine = self._engines[position] = _engine(generation) or self._engines[position]
        self._itl[position] = self._metrics.requests.itl.of(engine)
        self._metrics.requests.ttft.of(engine).observe(now - self._arrival)
        self._first[position] = now
        if times is not None:
            waited, self._prefill[position] = times
            self._metrics.requests.queue.of(engine).observe(waited)
            self._metrics.requests.prefill.of(engine).observe(times[1])

    def gaps(self, position: int) -> Gaps | None:
        """A cheaper :meth:`delta` for tokens after the first delta; None where times do not count."""
        if not self._metrics.has_times:
            return None
        series = self._itl[position]
        assert series is not None
        return Gaps(series, cast(list[float], self._last), position)

    def close(self, now: float, num_started: int) -> None:
        """Count the request, of which the mesh took ``num_started`` samples."""
        metrics = self._metrics
        metrics.in_flight -= 1
        for position, (sample, engine) in enumerate(
            zip(self._samples[:num_started], self._engines, strict=False)
        ):
            reason = sample.finish_reason or FinishReason.ABORT.value
            key = (engine, str(reason))
            metrics.success[key] = metrics.success.get(key, 0) + 1
            if reason in (FinishReason.ABORT, FinishReason.ERROR):
                continue
            metrics.requests.generation_tokens.of(engine).observe(sample.num_tokens)
            if metrics.has_times:
                metrics.requests.e2e.of(engine).observe(now - self._arrival)
                self._observe_decode(position, sample, engine)
            if sample.is_first_of_prompt:
                self._observe_prompt(sample, engine)

    def _observe_decode(self, position: int, sample: OutputStream, engine: str) -> None:
        last, prefill = self._last[position], self._prefill[position]
        if last is None:
            return
        decode = last - self._first[position]
        self._metrics.requests.decode.of(engine).observe(decode)
        if prefill is not None:
            self._metrics.requests.inference.of(engine).observe(prefill + decode)
        if sample.num_tokens > 1:
            self._metrics.requests.tpot.of(engine).observe(decode / (sample.num_tokens - 1))

    def _observe_prompt(self, sample: OutputStream, engine: str) -> None:
        self._metrics.requests.prompt_tokens.of(engine).observe(len(sample.prompt.prompt_ids))
        num_spared = sample.num_cached_tokens if sample.needs_mesh else len(sample.prompt.prompt_ids)
        self._metrics.requests.computed.of(engine).observe(len(sample.prompt.prompt_ids) - num_spared)
        longest = max(
            other.num_tokens for other in self._samples if other.prompt.prompt_ids is sample.prompt.prompt_ids
        )
        self._metrics.requests.most_tokens.of(engine).observe(longest)
        self._metrics.requests.params_n.of(engine).observe(sample.num_samples)
        self._metrics.requests.params_max_tokens.of(engine).observe(sample.prompt.params.max_tokens or 0)


def _engine(generation: Generation) -> str:
    """Label of the instance that computes a sample.

    Empty if it waits for one, or has ended.
    """
    return "" if generation.rank is None else str(generation.rank)
