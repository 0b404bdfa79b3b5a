"""Deltas for routers, and trace spans, from the row outputs of a step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable

from coordinator.process.tracing import Tracing
from engine.messages import Delta
from engine.scheduling.outgoing_tokens import OutgoingTokens
from engine.scheduling.output_processor import RowOutput
from engine.scheduling.request import Request


def outgoing_tokens_of(
    outcomes: Iterable[RowOutput], tracing: Tracing | None = None
) -> dict[bytes, OutgoingTokens]:
    """Outgoing tokens by router; requests that have ended get a trace span."""
    outgoing: dict[bytes, OutgoingTokens] = defaultdict(OutgoingTokens)
    for outcome in outcomes:
        request, token_ids = outcome.request, outcome.token_ids
        peer, number = request.key
        has_more = (  # than its token: it is its first delta, or its last, or has log-probabilities
            request.finish_reason is not None
            or request.arrived_at
            or outcome.logprobs
            or request.prompt_logprobs is not None
            or request.routed
        )
        if len(token_ids) == 1 and not has_more:
            outgoing[peer].add_token(number, token_ids[0])
            continue
        outgoing[peer].add(_delta(outcome))
        if request.finish_reason is not None and tracing is not None:
            _trace(tracing, request)
    return outgoing


def _delta(outcome: RowOutput) -> Delta:
    request = outcome.request
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return Delta(
        request=request.key[1],
        token_ids=outcome.token_ids,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=outcome.logprobs or None,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=request.num_cached,
        times=_times(request) if request.arrived_at else None,
        error=request.error,
        num_cached_output=request.num_cached_output,
        routed_experts=request.take_experts(),
        pooled=request.pooled,
    )


def _trace(tracing: Tracing, request: Request) -> None:
    """Record a span from a request's arrival to its last token."""
    now = time.perf_counter()
    tracing.record(
        "lockstep.instance",
        request.traceparent,
        request.began_at,
        now,
        {
            "gen_ai.request.id": request.request_id,
            "gen_ai.usage.prompt_tokens": request.num_prompt,
            "gen_ai.usage.completion_tokens": request.num_output - request.num_emitted,
            "gen_ai.latency.time_in_queue": request.admitted_at - request.began_at,
            "gen_ai.latency.time_in_model_inference": now - request.admitted_at,
            "lockstep.cached_tokens": request.num_cached,
            "lockstep.resumed_tokens": request.num_emitted,
            "lockstep.finish_reason": str(request.finish_reason),
        },
    )


def _times(request: Request) -> tuple[float, float]:
    """Queue time and compute time of a request in seconds, at its first token."""
    arrived_at, request.arrived_at = request.arrived_at, 0.0
    return request.admitted_at - arrived_at, time.perf_counter() - request.admitted_at
