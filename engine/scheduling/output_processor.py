"""Output processing: sampled tokens, accepted drafts and ends of requests (pure)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.messages import FinishReason, RoutedExperts, TokenLogprobs
from engine.pieces.pool import BlockHash
from engine.pooling_params import Pooled
from engine.scheduling.drafting import Drafting
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, Status
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.step_making import UnderWay
from engine.scheduling.totals import SchedulerTotals
from engine.step import ExtraTokens, StepResult

NOTHING_TAKEN = ExtraTokens([])
NOT_FINITE = "the model's result has numbers that are not finite (NaN or infinite)"
NOT_ENCODED = "an image of this request could not be encoded; the log of the instance says why"


class RowOutput(msgspec.Struct, frozen=True):
    """Output of a step for one request, which has ended if ``finish_reason`` is set."""

    request: Request
    token_ids: list[int]
    """Empty if the request failed; several tokens where a draft was taken."""
    logprobs: list[TokenLogprobs]
    """One for each, when asked for."""


class OutputProcessor:
    """Appends sampled tokens to their requests, and ends those that are complete."""

    def __init__(
        self, queues: RequestQueues, prefixes: PrefixCache, drafting: Drafting, totals: SchedulerTotals
    ) -> None:
        self._queues = queues
        self._prefixes = prefixes
        self._drafting = drafting
        self._totals = totals

    def __repr__(self) -> str:
        return f"<OutputProcessor of {self._queues!r}>"

    def process(self, oldest: UnderWay, result: StepResult, later: Iterable[UnderWay]) -> list[RowOutput]:
        """Take in the result of a step; returns the requests that got a token.

        ``later``: the steps under way behind it.
        """
        step = oldest.step
        outcomes: list[RowOutput] = []
        ended: list[Request] = []
        if result.failed_images:
            ended = self._without_images(oldest, result.failed_images, later)
        pooled_tokens: list[int] = []
        if result.prompt_logprobs:
            self._note_prompt_logprobs(oldest, result.prompt_logprobs)
        if result.routed_experts:
            self._note_experts(oldest, result.routed_experts)
        logprobs, drafts = result.logprobs, step.drafts
        for index, (slot, request, token_id) in enumerate(
            zip(step.slots, oldest.requests, result.tokens, strict=True)
        ):
            request.num_in_flight -= 1
            if token_id is None or request.slot != slot or request.error:  # aborted while it ran, or wrong
                continue
            if request.pooling is not None:
                outcomes.append(self._end_pooled(request, result.pooled.get(index)))
                pooled_tokens.append(request.num_prompt)
                continue
            found = [logprobs[index]] if index in logprobs else []
            outcome = self._append(request, token_id, found)
            outcomes.append(outcome)
            if request.num_in_flight and request.status is Status.RUNNING:
                self._prefixes.token_known(request)
            if drafts and index in drafts:
                self._take_draft(outcome, drafts[index], result.further.get(index, NOTHING_TAKEN))
            if index in result.proposals and request.drafter is not None:
                request.drafter.offer(len(request.token_ids), result.proposals[index])
        for request in ended:
            self._queues.finish(request, FinishReason.ERROR, is_wrong=True)
            outcomes.append(RowOutput(request, [], []))
        if pooled_tokens:
            self._totals.on_pooled(len(pooled_tokens), sum(pooled_tokens))
        return outcomes

    def _note_prompt_logprobs(self, under_way: UnderWay, by_row: dict[int, list[TokenLogprobs]]) -> None:
        for index, found in by_row.items():
            request = under_way.requests[index]
            if request.slot == under_way.step.slots[index] and request.prompt_logprobs is not None:
                request.prompt_logprobs.extend(found)

    def _note_experts(self, under_way: UnderWay, by_row: dict[int, RoutedExperts]) -> None:
        for index, found in by_row.items():
            request = under_way.requests[index]
            if request.slot == under_way.step.slots[index] and request.routed_until is not None:
                request.note_experts(found)

    def _without_images(
        self, under_way: UnderWay, failed: list[int], later: Iterable[UnderWay]
    ) -> list[Request]:
        """Requests whose rows lacked an image's, or that share a block with such a row.

        Blocks are named while they are computed, so others may have found them: with the same image. They
        are in this step or a later one, even if they were aborted meanwhile. All their names are dropped.
        """
        wrong: set[tuple[int, BlockHash]] = set()
        ended: list[Request] = []
        for index in failed:
            request, table = under_way.requests[index], under_way.tables[index]
            begin = under_way.step.starts[index] // self._prefixes.block_size
            wrong.update(zip(table[begin:], request.hashes[begin:], strict=False))
            self._prefixes.unname(request.hashes[begin:])
            if request.slot == under_way.step.slots[index]:
                ended.append(request)
        rows = (row for each in (under_way, *later) for row in zip(each.requests, each.tables, strict=True))
        for request, table in rows:
            named = list(zip(table, request.hashes, strict=False))
            begin = next((at for at, each in enumerate(named) if each in wrong), len(named))
            self._prefixes.unname(request.hashes[begin:])
            if begin < len(named) and request.status is Status.RUNNING and request not in ended:
                ended.append(request)
        for request in ended:
            request.error = NOT_ENCODED
        return ended

    def _end_pooled(self, request: Request, pooled: Pooled | None) -> RowOutput:
        """End a pooled request with its answer; None: it was not finite."""
        self._totals.on_first_token(request)
        request.pooled = pooled
        if pooled is None:
            self._totals.not_finite += 1
            request.error = NOT_FINITE
        self._queues.finish(request, FinishReason.ERROR if pooled is None else FinishReason.STOP)
        return RowOutput(request, [], [])

    def _append(self, request: Request, token_id: int, logprobs: list[TokenLogprobs]) -> RowOutput:
        if self._breaks_grammar(request, token_id):
            return RowOutput(request, [], [])
        if len(request.token_ids) == request.num_prompt:
            self._totals.on_first_token(request)
        self._add_token(request, token_id)
        return RowOutput(request, [token_id], logprobs)

    def _take_draft(self, outcome: RowOutput, draft: list[int], further: ExtraTokens) -> None:
        """Append the accepted tokens of a draft behind the row's first token."""
        request = outcome.request
        for index, token_id in enumerate(further.tokens):
            if request.status is not Status.RUNNING:
                break  # a token before ended the request
            if self._breaks_grammar(request, token_id):
                break
            self._prefixes.advance(request, 1)  # by the token before this one, which was drafted
            outcome.token_ids.append(token_id)
            outcome.logprobs.extend(further.logprobs[index : index + 1])
            self._add_token(request, token_id)
        self._drafting.taken(request, len(draft), len(further.tokens))

    def _breaks_grammar(self, request: Request, token_id: int) -> bool:
        """Whether a token does not follow its request's grammar, which ends the request."""
        grammar = request.grammar
        if grammar is None or (problem := grammar.take(token_id)) is None:
            return False
        request.error = problem
        self._queues.finish(request, FinishReason.ERROR)
        return True

    def _add_token(self, request: Request, token_id: int) -> None:
        grammar = request.grammar
        request.token_ids.append(token_id)
        if request.expected_blocks:
            self._queues.expected_blocks.settle(request)
        self._totals.generation_tokens += 1
        is_over = grammar is not None and grammar.ended  # also where its end was the only token left
        if is_over or (token_id in request.stop_ids and request.num_output >= request.params.min_tokens):
            request.stop_reason = token_id if token_id in request.stop_ids else None
            self._queues.finish(request, FinishReason.STOP)
        elif len(request.token_ids) - request.num_prompt >= request.max_output:
            self._queues.finish(request, FinishReason.LENGTH)
