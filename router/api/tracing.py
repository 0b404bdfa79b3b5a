"""Span of one request at the router.

Without tracing, only the client's trace context is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.process.tracing import Attributes, Tracing, usable
from engine.messages import FinishReason
from router.text.output_stream import OutputStream

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RequestTrace:
    """Trace of a request from its arrival to the end of its last sample."""

    def __init__(
        self, traceparent: str = "", tracing: Tracing | None = None, span: Span | None = None
    ) -> None:
        self.traceparent = traceparent
        """Trace context for the instances."""
        self._tracing = tracing
        self._span = span

    @classmethod
    def begin(
        cls, tracing: Tracing | None, path: str, given: str | None, arrival: float, facts: Attributes
    ) -> RequestTrace:
        """``given`` is the client's traceparent; ``arrival`` is on the clock of ``time.perf_counter``."""
        traceparent = usable(given)
        if tracing is None:
            return cls(traceparent)
        span = tracing.begin(f"POST {path}", traceparent, arrival)
        span.set_attributes(facts)
        return cls(tracing.traceparent(span), tracing, span)

    def end(
        self, samples: Sequence[OutputStream], arrival: float, first_at: float | None, ended: float
    ) -> None:
        """``first_at``: when the first token came, if one did."""
        if self._tracing is None or self._span is None:
            return
        prompts = [sample for sample in samples if sample.is_first_of_prompt]
        attributes: Attributes = {
            "gen_ai.usage.prompt_tokens": sum(len(sample.prompt.prompt_ids) for sample in prompts),
            "gen_ai.usage.completion_tokens": sum(sample.num_tokens for sample in samples),
            "gen_ai.latency.e2e": ended - arrival,
        }
        if first_at is not None:
            attributes["gen_ai.latency.time_to_first_token"] = first_at - arrival
        reasons = {sample.finish_reason or FinishReason.ABORT.value for sample in samples}
        failed = FinishReason.ERROR.value in reasons
        self._tracing.end(self._span, attributes, "the request failed" if failed else "")

    def end_with(self, error: Exception) -> None:
        """End the span of a request that is refused before anything of it runs."""
        if self._tracing is not None and self._span is not None:
            self._tracing.end(self._span, {}, str(error))


UNTRACED = RequestTrace()
