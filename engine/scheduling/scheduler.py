"""Scheduler: chooses the rows of the next step (pure: no sockets, no clock, no torch).

Iteration-level scheduling (Orca) with chunked prefill (Sarathi-Serve) over a paged KV cache: each step
takes every running request's next token first, then chunks of prompts, within a budget of tokens.
When blocks run out, the request that would go last gives its blocks back and is computed again later. So it
does where a waiting request of strictly higher priority lacks a slot or blocks.
Order is arrival, or (priority, arrival).
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Protocol

import msgspec

from engine.messages import Counters, FinishReason, TokenLogprobs
from engine.scheduling.blocks import BlockHash, BlockPool
from engine.scheduling.expected_prefix_blocks import ExpectedPrefixBlocks
from engine.scheduling.lone_chunk import LoneChunk
from engine.scheduling.precedence import Room, giving_way
from engine.scheduling.prompt_share import PromptShare
from engine.scheduling.request import Request, RequestKey, Status
from engine.scheduling.speculation import Speculation
from engine.scheduling.step_making import StepRows, UnderWay, admit_of, made_anew
from engine.scheduling.totals import Totals
from engine.scheduling.waiting_queue import WaitingQueue
from engine.step import CRUMBS, Admit, Further, Step, StepResult

PROMPT_LOGPROBS_CHUNK = 256
"""Tokens per step of all prompts whose log-probabilities are wanted.

Each needs a row of logits. Without chunked prefill, the last of these prompts may go beyond the bound.
"""
NOTHING_TAKEN = Further([])
DRAFTS_BESIDE_PROMPTS = 4
"""Divisor of the budget left for drafts while prompts are to be computed."""
PENALISED_DRAFTS = 1 << 14
"""Bound on a request's tokens times its drafted tokens, where it has penalties."""
LAST_OF_ALL = 1 << 64
"""Priority behind any request's."""
MOST_PASSED_OVER = 64
"""Waiting requests passed over in one step, for want of room for them alone."""


class SchedulerRules(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one instance."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    prompt_tokens_beside_decodes: int | None = None
    """Most prompt tokens of a step while requests decode, with chunked prefill.

    Requests that decode wait for no more tokens of others' prompts. None: as many as the budget has.
    """
    prompt_seconds_beside_decodes: float | None = None
    """Seconds that those prompt tokens may take; None: no limit.

    Where they take longer, there are fewer.
    """
    largest_lone_chunk: int = 0
    """Most tokens of a step while there is one request only (in lockstep, anywhere).

    0: ``max_num_batched_tokens``, as always.
    """
    lone_chunk_seconds: float = 0.5
    """Seconds that such a step may take beyond ``max_num_batched_tokens``: who arrives waits for its rest."""
    micro_batches: int = 1
    """Steps of different requests that are in flight at once.

    Each takes its share of the requests.
    """
    tells_tokens: bool = False
    """Whether decode rows carry their tokens, for workers that do not sample."""


class Outcome(msgspec.Struct, frozen=True):
    """Result of a step for one request. ``request.finish_reason`` tells whether it has ended."""

    request: Request
    token_ids: list[int]
    """Empty if the request failed; several tokens where a draft was taken."""
    logprobs: list[TokenLogprobs]
    """One for each, when asked for."""


class Contents(Protocol):
    """Wants to know which tokens named blocks have (:class:`engine.events.recording.EventRecorder`)."""

    @property
    def lacks_tokens(self) -> bool: ...
    def tell(
        self, hashes: Sequence[BlockHash], token_ids: Sequence[int], salt: str, first: int, end: int
    ) -> None: ...


class Scheduler:
    """Owner of an instance's requests and of its block pool."""

    def __init__(
        self, rules: SchedulerRules, pool: BlockPool, speculation: Speculation | None = None
    ) -> None:
        """``speculation`` drafts tokens for decode rows."""
        self._rules = rules
        self._speculation = speculation
        self._pool = pool
        self._requests: dict[RequestKey, Request] = {}
        self._waiting = WaitingQueue(rules.block_size)
        self._running: list[Request] = []
        self._by_slot: dict[int, Request] = {}
        self._free_slots = list(range(rules.max_num_seqs))[::-1]
        self._in_flight: deque[UnderWay] = deque()
        self._num_grammars = 0
        self.contents: Contents | None = None
        self.others_run = False
        """Whether other instances in lockstep have rows, which wait for those here."""
        self.only_instance = True
        """Whether no other instance in lockstep had rows or waiting requests in the newest step.

        At most one instance may believe it in any step.
        """
        self._blocks_for_drafts = 0
        """Blocks that drafts of the step in the making may take."""
        self._expected_blocks = ExpectedPrefixBlocks(pool, rules.block_size)
        self.totals = Totals()
        self._prompt_share = PromptShare(
            rules.prompt_tokens_beside_decodes or rules.max_num_batched_tokens,
            rules.prompt_seconds_beside_decodes,
        )
        self._lone_chunk = LoneChunk(
            rules.max_num_batched_tokens, rules.largest_lone_chunk, rules.lone_chunk_seconds
        )

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting, {self._pool!r}>"

    # ---- arrival and end of requests

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> Sequence[Request]:
        """Requests that have a slot."""
        return self._running

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to compute of waiting requests, and of partly computed prompts."""
        return self._waiting.num_tokens + self._in_prefill()

    @property
    def num_tokens_ahead(self) -> tuple[int, int]:
        """``num_waiting_tokens``, and the same without expected prefix cache hits.

        Hits are blocks in the cache, and blocks that requests further ahead will have put there.
        """
        in_prefill = self._in_prefill()
        return self._waiting.num_tokens + in_prefill, self._waiting.num_uncached + in_prefill

    @property
    def num_queued(self) -> int:
        """Waiting requests for which the next step has no slot, or maybe no blocks."""
        return self._num_queued(len(self._waiting), self._waiting.num_blocks)

    def num_queued_with(self, num_tokens: int) -> int:
        """``num_queued`` if a request of so many tokens came now."""
        return self._num_queued(
            len(self._waiting) + 1, self._waiting.num_blocks + self._blocks_for(num_tokens)
        )

    def _num_queued(self, num_waiting: int, blocks: int) -> int:
        return num_waiting if blocks > self._pool.num_free else max(0, num_waiting - len(self._free_slots))

    @property
    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    def holder(self, slot: int) -> Request | None:
        """The request in a slot."""
        return self._by_slot.get(slot)

    @property
    def has_grammars(self) -> bool:
        """Whether the output of any request here must follow a grammar."""
        return self._num_grammars > 0

    def find(self, key: RequestKey) -> Request | None:
        """This request, waiting or running."""
        return self._requests.get(key)

    def knows(self, key: RequestKey) -> bool:
        """Whether this request is here, waiting or running."""
        return key in self._requests

    @property
    def num_generated(self) -> int:
        """Tokens generated since the start."""
        return self.totals.generation_tokens

    @property
    def num_steps(self) -> int:
        """Steps scheduled since the start."""
        return self.totals.steps

    def counters(self) -> Counters:
        """Totals so far; ``bad_messages`` is the server's."""
        return self.totals.counters()

    def problem_with(self, request: Request) -> str | None:
        """Why a request can never run here, None if it can."""
        most_tokens = request.num_prompt + request.max_output
        if request.max_output < 1:
            return f"the prompt has {request.num_prompt} tokens, which leaves no room to generate"
        capacity = self._pool.num_blocks * self._rules.block_size
        if most_tokens > capacity:
            return f"the request may need {most_tokens} tokens, but the KV cache holds only {capacity}"
        budget = self._rules.max_num_batched_tokens
        if not self._rules.enable_chunked_prefill and most_tokens > budget:
            return (
                f"the request may need {most_tokens} tokens in one step, more than the budget of {budget}, "
                "and chunked prefill is off"
            )
        return None

    def add(self, request: Request) -> None:
        """Queue a request that passes :meth:`problem_with`."""
        assert request.key not in self._requests, f"{request!r} was added twice"
        self._requests[request.key] = request
        self._num_grammars += request.grammar is not None
        if self._speculation is not None and request.grammar is None:
            request.drafter = self._speculation.drafter()
        self._enqueue(request)

    def abort(self, key: RequestKey) -> bool:
        """Forget a request, waiting or running; False if it is not here (any more)."""
        request = self._requests.get(key)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    def recall(self, key: RequestKey) -> bool:
        """Forget a request that has not begun; False if it has, or is not here."""
        request = self._requests.get(key)
        if request is None or request.status is not Status.WAITING or request.was_admitted:
            return False
        return self.abort(key)

    def set_back(self, request: Request) -> None:
        """Compute a running request anew: what it found in the cache is wrong.

        It is in no step but the one that is updated next, whose token for it is dropped.
        """
        if request.status is Status.RUNNING:
            self._preempt(request)
            request.was_admitted, request.num_fetched = False, 0

    # ---- one step

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and not yet answered."""
        return len(self._in_flight)

    def schedule(self) -> Step | None:
        """Choose the rows of the next step; None if nothing can run.

        Other steps may be in flight. A request is not in the next step before its token is there, but a
        prompt's next chunk may follow the one before.
        """
        if self._running and self._waiting.goes_before(self._running[-1]):
            self._make_way()
        block_size = self._rules.block_size
        most_rows = self._rows_per_step()
        needs_more = [len(request.token_ids) - request.num_computed > 1 for request in self._running]
        rows = self._no_rows(somebody_decodes=not all(needs_more))
        lacking = LAST_OF_ALL  # priority of the first running request that lacks blocks: it gets them first
        admits: list[Admit] = []
        drafts = self._drafts(most_rows)
        for request in self._decodes_then_prefills() if any(needs_more) else self._running[:]:
            if request.status is not Status.RUNNING:
                continue  # preempted for a request before it
            uncomputed = len(request.token_ids) - request.num_computed
            if uncomputed > 1 and self._waiting.goes_before(request):
                admits += self._admit_waiting(rows, most_rows, min(lacking, request.priority))
            if len(rows) == most_rows or rows.budget <= 0:
                break
            count = uncomputed if uncomputed <= 1 else self._chunk(request, rows)
            if count == 0:
                continue
            draft = drafts.get(request.key) if drafts else None
            if draft is not None and self._fill_with_draft(rows, request, draft):
                continue
            new_blocks: list[int] | None = []
            if request.num_computed + count > len(request.blocks) * block_size:
                new_blocks, victims = self._grow(request, request.num_computed + count, rows)
                if victims or new_blocks is None:
                    lacking = min(lacking, request.priority)
            if new_blocks is None:
                continue
            self._fill(rows, request, count, new_blocks)
        admits += self._admit_waiting(rows, most_rows, lacking)
        if not rows:
            return None
        step = rows.step(admits, tells_tokens=self._rules.tells_tokens)
        self.totals.on_step(step.num_tokens)
        requests = rows.requests
        self._in_flight.append(UnderWay(step, requests, [request.blocks for request in requests]))
        return step

    def blocks_being_filled(self) -> set[int]:
        """Blocks whose tokens are computed by steps under way.

        They may have names already.
        """
        size = self._rules.block_size
        return {
            block
            for each in self._in_flight
            for start, end, table in zip(each.step.starts, each.step.ends, each.tables, strict=True)
            for block in table[start // size : -(-end // size)]
        }

    def blocks_in_flight(self) -> set[int]:
        """All blocks that steps under way read or write, also for aborted requests."""
        return {block for each in self._in_flight for table in each.tables for block in table}

    def restart(self) -> list[Step]:
        """Steps in flight, oldest first, to be run again by the workers.

        Workers may have done any part of them, so each row brings all that is known of its request. If the
        row's request was aborted, another one may have its slot by now; what the row fills may be a known
        prefix of others all the same.
        """
        self._in_flight = deque(made_anew(each) for each in self._in_flight)
        return [each.step for each in self._in_flight]

    def update(self, step: Step, result: StepResult) -> list[Outcome]:
        """Take in what the oldest step under way sampled.

        Returns the requests that got a token.
        """
        outcomes: list[Outcome] = []
        if not step.slots:
            return outcomes
        oldest = self._in_flight.popleft()
        assert oldest.step.slots is step.slots, "steps are answered in order"
        if result.prompt_logprobs:
            self._note_prompt_logprobs(oldest, result.prompt_logprobs)
        logprobs, drafts = result.logprobs, step.drafts
        for index, (slot, request, token_id) in enumerate(
            zip(step.slots, oldest.requests, result.tokens, strict=True)
        ):
            request.num_in_flight -= 1
            if token_id is None or request.slot != slot:  # it was aborted while the step ran
                continue
            found = [logprobs[index]] if index in logprobs else []
            outcome = self._append(request, token_id, found)
            outcomes.append(outcome)
            if drafts and index in drafts:
                self._take_draft(outcome, drafts[index], result.further.get(index, NOTHING_TAKEN))
        return outcomes

    def timed(self, step: Step, seconds: float) -> None:
        """Take in how long a step took, for the lengths of drafts and prefill chunks."""
        if not step.slots:
            return
        if not _only_decodes(step):
            self._prompt_share.took(step.num_tokens, seconds)
            if len(step.slots) == 1 and not step.drafts:
                self._lone_chunk.took(step.starts[0], step.num_tokens, seconds)
        elif self._speculation is not None:
            self._speculation.took(step.num_tokens, bool(step.drafts), seconds)

    def _note_prompt_logprobs(self, under_way: UnderWay, by_row: dict[int, list[TokenLogprobs]]) -> None:
        for index, found in by_row.items():
            request = under_way.requests[index]
            if request.slot == under_way.step.slots[index] and request.prompt_logprobs is not None:
                request.prompt_logprobs.extend(found)

    # ---- helpers of schedule

    def _rows_per_step(self) -> int:
        """Most rows of a step, such that each step in flight gets its share."""
        if self._rules.micro_batches == 1:
            return self._rules.max_num_seqs
        could_run = len(self._running) + min(len(self._waiting), len(self._free_slots))
        return -(-could_run // self._rules.micro_batches)

    def _no_rows(self, *, somebody_decodes: bool) -> StepRows:
        """An empty step with its budgets."""
        rules = self._rules
        prompts = budget = rules.max_num_batched_tokens
        if (somebody_decodes or self.others_run) and rules.enable_chunked_prefill:
            prompts = self._prompt_share.tokens
        elif (start := self._start_of_lone_prompt()) is not None:
            prompts = budget = self._lone_chunk.tokens(start)
        return StepRows(budget, prompts, PROMPT_LOGPROBS_CHUNK)

    def _start_of_lone_prompt(self) -> int | None:
        """Where the next chunk of the only request anywhere begins; None if others are there.

        In a pipeline, stages compute different chunks of a prompt at the same time; larger ones would hinder
        that.
        """
        rules = self._rules
        is_lone = len(self._requests) == 1 and self.only_instance and rules.micro_batches == 1
        if not is_lone or not rules.largest_lone_chunk or not rules.enable_chunked_prefill:
            return None
        request = next(iter(self._requests.values()))
        if request.status is Status.RUNNING:
            return request.num_computed
        return len(self._pool.find_prefix(request.prefix_hashes(rules.block_size))) * rules.block_size

    def _decodes_then_prefills(self) -> list[Request]:
        """Running requests, those that need one token before partly computed prompts.

        So a long prompt never starves them. They are in order otherwise.
        """
        return sorted(self._running, key=lambda request: request.num_uncomputed > 1)

    def _chunk(self, request: Request, rows: StepRows) -> int:
        """Tokens of this request that fit into what is left of the budget, with :data:`CRUMBS`.

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
        if uncomputed <= room + rules.max_num_batched_tokens // CRUMBS:
            count = uncomputed
        if rules.long_prefill_token_threshold:
            count = min(count, rules.long_prefill_token_threshold)
        if request.tells_prompt:
            count = min(count, rows.prompt_logprobs)
        return count

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._rules.block_size)

    def _grow(self, request: Request, num_tokens: int, rows: StepRows) -> tuple[list[int] | None, int]:
        """Blocks that a running request lacks for ``num_tokens``, and how many were preempted.

        If need be, requests that would go after it and are in no step give theirs back. None if the request
        must wait; it may be preempted itself.
        """
        needed = self._blocks_for(num_tokens) - len(request.blocks)
        victims = 0
        while (new_blocks := self._pool.take(needed)) is None:
            later = takewhile(lambda other: other is not request, reversed(self._running))
            victim = next((other for other in later if not other.num_in_flight), request)
            if victim is request and (self._in_flight or (request.num_uncomputed > 1 and rows)):
                return None, victims  # requests in flight will end or give way; keep what is computed
            self._preempt(victim)
            victims += 1
            if victim is request:
                return None, victims
        request.blocks += new_blocks
        return new_blocks, victims

    def _fill(self, rows: StepRows, request: Request, count: int, new_blocks: list[int]) -> None:
        rows.add(request, count, new_blocks)
        request.num_in_flight += 1
        self._advance(request, count)

    def _advance(self, request: Request, count: int) -> None:
        request.num_computed += count
        if request.num_computed >= (request.num_named + 1) * self._rules.block_size:
            self._name_full_blocks(request)

    def _drafts(self, most_rows: int) -> dict[RequestKey, list[int]]:
        """Drafts behind the newest tokens, by request.

        They get what is left of the budget. That is little where prompts are to be computed, since drafts
        only hasten what comes anyway.
        """
        running = len(self._running)
        if self._speculation is None or self._speculation.is_off(running):
            return {}
        room = max(0, self._rules.max_num_batched_tokens - running)
        self._blocks_for_drafts = max(0, self._pool.num_free - running)  # each may need one in this step
        if self._waiting or self._in_prefill():
            room = room // DRAFTS_BESIDE_PROMPTS if self._rules.enable_chunked_prefill else 0
            self._blocks_for_drafts = 0
        keys, texts = [], []
        for request in self._running:
            if request.drafter is not None and len(request.token_ids) - request.num_computed == 1:
                keys.append(request.key)
                texts.append((request.drafter, request.token_ids, _most_drafted(request)))
                if len(keys) == most_rows:
                    break
        drafts = self._speculation.draft(texts, min(running, most_rows), room)
        return {key: draft for key, draft in zip(keys, drafts, strict=True) if draft}

    def _fill_with_draft(self, rows: StepRows, request: Request, draft: list[int]) -> bool:
        """Add a request's newest token and its draft; False if blocks are lacking.

        No request waits or is preempted for a draft.
        """
        count = 1 + len(draft)
        needed = self._blocks_for(request.num_computed + count) - len(request.blocks)
        if needed > self._blocks_for_drafts:
            return False
        self._blocks_for_drafts -= needed
        new_blocks = self._pool.take(needed)
        assert new_blocks is not None
        request.blocks += new_blocks
        rows.add(request, count, new_blocks, draft)
        request.num_in_flight += 1
        self._advance(request, 1)  # whether drafted tokens count is not known yet
        self.totals.on_draft(len(draft))
        return True

    def _take_draft(self, outcome: Outcome, draft: list[int], further: Further) -> None:
        """Append the taken tokens of a draft, behind the first one that its row gave.

        Blocks of tokens that were not taken are released.
        """
        request = outcome.request
        for index, token_id in enumerate(further.tokens):
            if request.status is not Status.RUNNING:
                break  # a token before ended the request
            self._advance(request, 1)  # by the token before this one, which was drafted
            outcome.token_ids.append(token_id)
            outcome.logprobs.extend(further.logprobs[index : index + 1])
            self._add_token(request, token_id)
        self.totals.on_taken(len(further.tokens))
        if request.drafter is not None and self._speculation is not None:
            self._speculation.learn(request.drafter, len(draft), len(further.tokens))
        if request.status is Status.RUNNING:
            surplus = request.blocks[self._blocks_for(request.num_computed) :]
            if surplus:
                request.blocks = request.blocks[: -len(surplus)]
                self._pool.release(surplus)

    def _name_full_blocks(self, request: Request) -> None:
        """Put the blocks that this step fills into the prefix index.

        Every layer writes all rows' keys and values before it reads any, so another row of the same step may
        already share them.
        """
        num_full = request.num_computed // self._rules.block_size
        hashes = request.hashes_up_to(num_full, self._rules.block_size)
        for index in range(request.num_named, num_full):
            self._pool.name(request.blocks[index], hashes[index])
        if self.contents is not None and request.num_named < num_full:
            self._tell_contents(request, request.num_named, num_full)
        request.num_named = num_full

    def _tell_contents(self, request: Request, first: int, end: int) -> None:
        if self.contents is not None and self.contents.lacks_tokens:
            self.contents.tell(request.hashes, request.token_ids, request.cache_salt, first, end)

    def _make_way(self) -> None:
        """Preempt running requests for waiting ones of strictly higher priority."""
        rules, whole = self._rules, not self._rules.enable_chunked_prefill
        tokens = rules.max_num_batched_tokens - len(self._running) if whole else self._prompt_share.tokens
        slots = len(self._free_slots)
        room = Room(self._running, self._pool, rules.block_size, slots=slots, tokens=tokens, whole=whole)
        for victim in giving_way(self._waiting, self._running, room):
            self._preempt(victim)

    def _admit_waiting(self, rows: StepRows, most_rows: int, before: int) -> list[Admit]:
        """Admit waiting requests in order, up to the first that does not fit.

        Only those of a strictly higher priority than ``before`` are looked at.

        Requests that lack no more than room for the log-probabilities of their prompts are passed over. If
        the output of any waiting request has begun, so are those that lack no more than a share of the step.
        Slots and blocks are kept for them.
        """
        admits: list[Admit] = []
        index = slots_kept = blocks_kept = 0
        while len(self._waiting) > index and len(self._free_slots) > slots_kept:
            if rows.budget <= 0 or len(rows) == most_rows:
                break
            request = self._waiting[index]
            if request.priority >= before:
                break
            lacks_share = rows.prompt_budget <= 0 and not request.num_output
            if lacks_share and not self._waiting.num_begun:
                break
            if lacks_share or rows.is_full_for(request):
                if lacks_share:
                    slots_kept += 1
                    blocks_kept += self._blocks_for(len(request.token_ids))
                index += 1
                if index == MOST_PASSED_OVER:
                    break
                continue
            known = self._pool.find_prefix(request.prefix_hashes(self._rules.block_size))
            if request.most_cached is not None:
                known = known[: request.most_cached]
            request.num_computed = len(known) * self._rules.block_size
            part = self._part_behind(request)
            here = known if part is None else [*known, part]
            count = self._chunk(request, rows)
            in_all = self._blocks_for(len(request.token_ids))
            if count == 0 or self._pool.num_free_beside(here) < in_all - len(here) + blocks_kept:
                request.num_computed = 0
                break
            self._pool.hold(known)
            if part is not None:
                self._pool.go_on_in(part)
            taken = self._pool.take(self._blocks_for(request.num_computed + count) - len(here))
            assert taken is not None
            admits.append(self._admit(request, here, taken))
            self._fill(rows, request, count, request.blocks[:])
        return admits

    def _part_behind(self, request: Request) -> int | None:
        """The partly filled block that came along as a request was handed over.

        It has all that the request's cached blocks lack, but its newest token.
        """
        size, before = self._rules.block_size, len(request.token_ids) - 1
        if not request.copy or request.num_computed != before // size * size:
            return None
        name = request.name_of_part(size)
        part = None if name is None else self._pool.part(name)
        if part is not None:
            request.num_computed = before
        return part

    def _admit(self, request: Request, known: list[int], taken: list[int]) -> Admit:
        self._waiting.remove(request)
        insort(self._running, request, key=lambda other: other.order)
        request.status = Status.RUNNING
        request.slot = self._free_slots.pop()
        self._by_slot[request.slot] = request
        request.blocks = known + taken
        request.num_named = request.num_computed // self._rules.block_size
        self._tell_contents(request, 0, request.num_named)
        if not request.was_admitted:
            request.was_admitted = True
            request.num_cached = min(request.num_computed, request.num_prompt)
            request.num_cached_output = request.num_computed - request.num_cached
        return admit_of(request, request.slot)

    # ---- changes of state

    def _enqueue(self, request: Request) -> None:
        request.status = Status.WAITING
        self._expected_blocks.expect(request)  # first: the queue counts what it expects of the prefix cache
        self._waiting.add(request)

    def _in_prefill(self) -> int:
        """Tokens still to compute of prompts that are partly computed."""
        left = [len(request.token_ids) - request.num_computed for request in self._running]
        return sum(left) - left.count(1)  # a request that needs its next token is in no prefill

    def _preempt(self, request: Request) -> None:
        """Preempt a request: back to the queue, to be computed again.

        A known prefix may spare part of it.
        """
        self.totals.preemptions += 1
        self._vacate(request)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        self._enqueue(request)

    def _vacate(self, request: Request) -> None:
        """Give back the slot and the blocks of a running request."""
        assert request.slot is not None
        self._running.remove(request)
        del self._by_slot[request.slot]
        self._free_slots.append(request.slot)
        self._pool.release(request.blocks)
        self._expected_blocks.settle(request)
        request.slot, request.blocks = None, []
        request.num_computed = request.num_named = 0

    def _append(self, request: Request, token_id: int, logprobs: list[TokenLogprobs]) -> Outcome:
        grammar = request.grammar
        if grammar is not None and (problem := grammar.take(token_id)) is not None:
            request.error = problem
            self._finish(request, FinishReason.ERROR)
            return Outcome(request, [], [])
        if len(request.token_ids) == request.num_prompt:
            self.totals.on_first_token(request)
        self._add_token(request, token_id)
        return Outcome(request, [token_id], logprobs)

    def _add_token(self, request: Request, token_id: int) -> None:
        grammar = request.grammar
        request.token_ids.append(token_id)
        if request.expected_blocks:
            self._expected_blocks.settle(request)
        self.totals.generation_tokens += 1
        is_over = grammar is not None and grammar.ended  # also where its end was the only token left
        if is_over or (token_id in request.stop_ids and request.num_output >= request.params.min_tokens):
            request.stop_reason = token_id if token_id in request.stop_ids else None
            self._finish(request, FinishReason.STOP)
        elif len(request.token_ids) - request.num_prompt >= request.max_output:
            self._finish(request, FinishReason.LENGTH)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is Status.RUNNING:
            self._vacate(request)
        else:
            self._waiting.remove(request)
            self._expected_blocks.settle(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        del self._requests[request.key]
        self._num_grammars -= request.grammar is not None


def _most_drafted(request: Request) -> int:
    """Most tokens worth drafting: one of its output comes in any case.

    Penalties look at the whole text for each token.
    """
    left = request.max_output - request.num_output - 1
    if request.params.shapes_logits_by_history:
        left = min(left, PENALISED_DRAFTS // len(request.token_ids))
    return left


def _only_decodes(step: Step) -> bool:
    """Whether no row is a prompt's: those come last."""
    return step.counts[-1] == 1 or len(step.counts) - 1 in step.drafts
