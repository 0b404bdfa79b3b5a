"""Budgets of a step: rows, tokens, and the part for prompts (pure)."""

from __future__ import annotations

from itertools import chain, islice

from engine.config.scheduler import TAIL_DIVISOR
from engine.messages import BATCH_PRIORITY
from engine.pieces.pool import PiecePool
from engine.scheduling.lines_share import LinesShare
from engine.scheduling.lone_chunk import LoneChunk
from engine.scheduling.prompt_share import PromptShare
from engine.scheduling.request import Request, Status
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.step_making import StepRows
from engine.scheduling.waiting_queue import WaitingQueue
from engine.step import Step

PROMPT_LOGPROBS_CHUNK = 256
"""Tokens per step of all prompts whose log-probabilities are wanted.

Each needs a row of logits. Without chunked prefill, the last of these prompts may go beyond the bound.
"""
MOST_PUT_OFF = 8
"""Steps without room for a whole image, before it goes first."""
MOST_PASSED_OVER = 64
"""Waiting requests passed over in one step, as they alone lack room."""


class StepBudget:
    """Rows and tokens of the next step, by how long steps took so far."""

    def __init__(self, rules: SchedulerRules, pool: PiecePool, queues: RequestQueues) -> None:
        self._rules = rules
        self._pool = pool
        self._queues = queues
        self.others_run = False
        """Whether other instances in lockstep have rows, which wait for those here."""
        self.only_instance = True
        """Whether no other instance in lockstep had rows or waiting requests in the newest step.

        At most one instance may believe it in any step.
        """
        self._late: Request | None = None
        """Request whose image goes before the decode rows of the step in the making."""
        self._was_image_first = False
        """Whether that image got its rows in the newest step."""
        self.prompt_share = PromptShare(
            rules.prompt_tokens_beside_decodes or rules.max_num_batched_tokens,
            rules.prompt_seconds_beside_decodes,
        )
        self.lines = LinesShare(max(rules.max_num_batched_tokens, rules.largest_lone_chunk))
        self._lone_chunk = LoneChunk(
            rules.max_num_batched_tokens, rules.largest_lone_chunk, rules.lone_chunk_seconds
        )

    def __repr__(self) -> str:
        return f"<StepBudget {self.prompt_share!r}, {self._lone_chunk!r}>"

    def rows_per_step(self) -> int:
        """Most rows of a step, such that each step in flight gets its share."""
        if self._rules.micro_batches == 1:
            return self._rules.max_num_seqs
        could_run = len(self._queues.running) + min(len(self._queues.waiting), len(self._queues.free_slots))
        return -(-could_run // self._rules.micro_batches)

    def no_rows(self, *, somebody_decodes: bool) -> StepRows:
        """An empty step with its budgets."""
        rules = self._rules
        prompts = budget = rules.max_num_batched_tokens
        if (somebody_decodes or self.others_run) and rules.enable_chunked_prefill:
            prompts = self.prompt_share.tokens
        elif (start := self._start_of_lone_prompt()) is not None:
            prompts = budget = self._lone_chunk.tokens(start)
        return StepRows(budget, prompts, PROMPT_LOGPROBS_CHUNK)

    @property
    def _cuts_lines(self) -> bool:
        """Whether prompts of batch lines may be cut anywhere."""
        return self._rules.enable_chunked_prefill and not self._rules.images_are_whole

    def limit_lines(self, rows: StepRows) -> None:
        """Limit a step of batch lines alone, for other requests that may come meanwhile."""
        if self._cuts_lines:
            rows.budget = min(rows.budget, self.lines.tokens)

    def _start_of_lone_prompt(self) -> int | None:
        """Where the next chunk of the only request anywhere begins; None if others are there.

        In a pipeline, stages compute different chunks of a prompt at the same time; larger ones would hinder
        that.
        """
        rules = self._rules
        requests = self._queues.requests
        is_lone = len(requests) == 1 and self.only_instance and rules.micro_batches == 1
        if not is_lone or not rules.largest_lone_chunk or not rules.enable_chunked_prefill:
            return None
        request = next(iter(requests))
        if request.status is Status.RUNNING:
            return request.num_computed
        return len(self._pool.find_prefix(request.prefix_hashes(rules.block_size))) * rules.block_size

    def chunk(self, request: Request, rows: StepRows) -> int:
        """Tokens of this request that fit into what is left of the budget, with :data:`TAIL_DIVISOR`.

        A request whose output has begun may take the whole budget, not only the part of prompts: its client
        waits like those of decode rows.
        """
        rules, uncomputed = self._rules, request.num_uncomputed
        room = rows.budget if request.num_output else rows.prompt_budget
        count = min(uncomputed, room)
        if room <= 0 or rows.is_full_for(request):
            return 0
        if not rules.enable_chunked_prefill:
            return count if count == uncomputed else 0
        most = rules.max_num_batched_tokens
        if request.priority == BATCH_PRIORITY and self._cuts_lines:
            most = min(most, self.lines.tokens)
        if uncomputed <= room + most // TAIL_DIVISOR:
            count = uncomputed
        if rules.long_prefill_token_threshold:
            count = min(count, rules.long_prefill_token_threshold)
        if request.tells_prompt:
            count = min(count, rows.prompt_logprobs + request.num_before_scores)
        return self._without_cut(request, rows, count) if rules.images_are_whole else count

    def _without_cut(self, request: Request, rows: StepRows, count: int) -> int:
        """The tokens up to an image that they would cut, or all of it."""
        start = request.num_computed
        cut = next((each for each in request.images if each.first < start + count < each.end), None)
        if cut is not None:
            count = cut.first - start if cut.first > start else cut.end - start
        if cut is None or cut.first > start or count <= rows.budget:
            return count
        if request not in rows.put_off:  # it may be looked at several times
            rows.put_off.append(request)
            request.num_put_off += 1
        return 0

    def puts_first(self, in_order: list[Request], waiting: WaitingQueue) -> bool:
        """Put a running request whose image was put off too often before all others.

        At most one in every other step, so that decode rows are put off by no more than a step. Lines of
        batches that others hold are not late. Returns whether it is the next waiting one, which is to be
        admitted first.
        """
        if not self._rules.images_are_whole:
            return False
        late = None
        if not self._was_image_first:
            held = BATCH_PRIORITY if self._queues.holds_batches else None
            both = (each for each in chain(in_order, self._next_of(waiting)) if each.priority != held)
            late = next((each for each in both if each.num_put_off >= MOST_PUT_OFF), None)
        self._late, self._was_image_first = late, False
        in_order.sort(key=lambda request: request is not late)
        return late is not None and late.status is Status.WAITING

    def _next_of(self, waiting: WaitingQueue) -> list[Request]:
        """The waiting request that would be admitted next, if any.

        Those that lack a number for their adapter are passed over, and all behind them that have one.
        """
        lacks = False
        for request in islice(waiting, MOST_PASSED_OVER):
            lacks |= not self._queues.adapters.has_room(request.adapter)
            if not (lacks and request.adapter):
                return [request]
        return []

    def goes_first(self, request: Request) -> bool:
        """Whether a request goes before the decode rows of the step in the making."""
        return request is self._late

    def placed(self, request: Request) -> None:
        """Note that a request got rows; an image that lacks blocks stays due."""
        request.num_put_off = 0
        self._was_image_first |= request is self._late

    def took(self, step: Step, seconds: float, largest: int, own: float) -> None:
        """Take in how long a step with prompts took, for the lengths of prefill chunks.

        ``largest``: tokens of the largest step beside it, in lockstep. ``own``: seconds without a wait.
        """
        self.prompt_share.took(step.num_tokens, seconds, largest, own)
        if len(step.slots) == 1 and not step.drafts and largest <= step.num_tokens:
            self._lone_chunk.took(step.starts[0], step.num_tokens, seconds)
