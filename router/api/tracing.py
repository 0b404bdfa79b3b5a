"""Span of one request at the router.

Without tracing, only the client's trace context is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.requests import Request

from coordinator.process.tracing import Attributes, Tracing, usable
from engine.messages import FinishReason
from router.api.understanding import Understood
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
        cls, tracing: Tracing | None, request: Request, id: str, understood: Understood
    ) -> RequestTrace:
        """The trace of a request, which goes on from the client's.

        ``id`` is that of the answer.
        """
        traceparent = usable(request.headers.get("traceparent"))
        if tracing is None:
            return cls(traceparent)
        span = tracing.begin(f"POST {request.url.path}", traceparent, request.state.arrival)
        span.set_attributes(_attributes(id, understood))
        return cls(tracing.traceparent(span), tracing, span)

    def end(
        self, samples: Sequence[OutputStream], arrival: float, first_at: float | None, ended: float
    ) -> None:
        """End the span of a request; ``first_at``: when its first token came, if one did."""
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


def _attributes(id: str, understood: Understood) -> Attributes:
    """Facts about a request, under the names that vLLM gives them."""
    params = understood.params
    return {
        "gen_ai.request.id": id,
        "gen_ai.response.model": understood.model.name,
        "gen_ai.request.n": params.n,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.max_tokens": params.max_tokens or 0,
    }


UNTRACED = RequestTrace()
