"""Scheduler: chooses the rows of the next step (pure: no sockets, no clock, no torch).

Iteration-level scheduling (Orca) with chunked prefill (Sarathi-Serve) over a paged KV cache: each step
takes every running request's next token first, then chunks of prompts, within a budget of tokens.
When blocks run out, the request that would go last gives its blocks back and is computed again later. So it
does where a waiting request of strictly higher priority lacks a slot or blocks.
Order is arrival, or (priority, arrival). Lines of batches get no row while any other request runs.
"""

from __future__ import annotations

from collections import deque
from itertools import takewhile

from engine.messages import BATCH_PRIORITY, Counters, FinishReason
from engine.pieces.pool import PiecePool
from engine.scheduling.ahead import SchedulingAhead, needs_tokens
from engine.scheduling.drafting import Drafting
from engine.scheduling.output_processor import OutputProcessor, RowOutput
from engine.scheduling.precedence import Room, giving_way
from engine.scheduling.prefix_cache import PrefixCache
from engine.scheduling.request import Request, RequestKey, Status
from engine.scheduling.request_queues import RequestQueues
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.step_budget import MOST_PASSED_OVER, StepBudget
from engine.scheduling.step_making import StepRows, UnderWay, admit_of, made_anew, slots_filled
from engine.scheduling.totals import SchedulerTotals
from engine.speculation.speculation import Speculation
from engine.step import Admit, Step, StepResult

LAST_OF_ALL = 1 << 64
"""Priority behind any request's."""


class Scheduler:
    """Owner of an instance's requests and of its block pool."""

    def __init__(
        self, rules: SchedulerRules, pool: PiecePool, speculation: Speculation | None = None
    ) -> None:
        """``speculation`` drafts tokens for decode rows."""
        self._rules = rules
        self._speculation = speculation
        self._pool = pool
        self._in_flight: deque[UnderWay] = deque()
        self.totals = SchedulerTotals()
        self.queues = RequestQueues(rules, pool, self.totals)
        self.prefixes = PrefixCache(pool, rules.block_size)
        self._ahead = SchedulingAhead(pool, rules.block_size, is_on=rules.runs_ahead)
        self.budget = StepBudget(rules, pool, self.queues)
        self._drafting = Drafting(rules, pool, self.queues, self.prefixes, speculation, self.totals)
        self._outputs = OutputProcessor(self.queues, self.prefixes, self._drafting, self.totals)
        # the queues' own, which change in place
        self._waiting, self._running = self.queues.waiting, self.queues.running
        self._free_slots = self.queues.free_slots
        self._boundaries = self.queues.boundaries

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._running)} running, {len(self._waiting)} waiting, {self._pool!r}>"

    def counters(self) -> Counters:
        """Totals so far; ``bad_messages`` is the server's."""
        return self.totals.counters()

    # ---- arrival and end of requests

    def problem_with(self, request: Request) -> str | None:
        """Why a request can never run here, None if it can."""
        return self._rules.problem_with(request, self._pool.num_blocks)

    def add(self, request: Request) -> None:
        """Queue a request that passes :meth:`problem_with`."""
        if self._speculation is not None:
            request.drafter = self._speculation.drafter()
        if self._ahead.is_on:
            request.needs_tokens = needs_tokens(request)
        self.queues.add(request)

    def abort(self, key: RequestKey) -> bool:
        """Forget a request, waiting or running; False if it is not here (any more)."""
        request = self.queues.find(key)
        if request is None:
            return False
        self.queues.finish(request, FinishReason.ABORT)
        return True

    def recall(self, key: RequestKey) -> bool:
        """Forget a request that has not begun; False if it has, or is not here."""
        request = self.queues.find(key)
        if request is None or request.status is not Status.WAITING or request.was_admitted:
            return False
        return self.abort(key)

    def set_back(self, request: Request) -> None:
        """Compute a running request anew, since blocks that it found in the cache are wrong.

        It is in no step but the one that is updated next, whose token for it is dropped.
        """
        if request.status is Status.RUNNING:
            self.queues.preempt(request, is_wrong=True)
            request.was_admitted, request.num_fetched = False, 0

    # ---- one step

    @property
    def num_in_flight(self) -> int:
        """Steps that were scheduled and not yet answered."""
        return len(self._in_flight)

    def schedule(self) -> Step | None:
        """Choose the rows of the next step; None if nothing can run.

        Other steps may be in flight. A request is not in the next step before its token is there, unless it
        may go ahead; a prompt's next chunk may follow the one before.
        """
        if self._in_flight and self._ahead.waits(self._running, self._waiting):
            return None
        has_boundaries = self._boundaries.step > 0
        if has_boundaries:
            self._boundaries.settle()
        self._make_way()
        most_rows = self.budget.rows_per_step()
        needs_more = [each.num_uncomputed > 1 for each in self._running_without_held()]
        rows = self.budget.no_rows(somebody_decodes=not all(needs_more))
        lacking = LAST_OF_ALL  # priority of the first running request that lacks blocks: it gets them first
        admits: list[Admit] = []
        drafts = self._drafting.drafts(most_rows)
        in_order = self.queues.decodes_then_prefills() if any(needs_more) else self._running[:]
        if self.budget.puts_first(in_order, self._waiting):
            admits += self._admit_waiting(rows, most_rows, LAST_OF_ALL, 1)
        if in_order and not self.queues.holds_batches:
            admits += self._admit_waiting(rows, most_rows, BATCH_PRIORITY)
        holds_batches = self._limit_lines(rows)
        for request in in_order:
            is_held = holds_batches and request.priority == BATCH_PRIORITY
            if is_held or request.status is not Status.RUNNING:  # preempted for a request before it
                continue
            uncomputed = len(request.token_ids) - request.num_computed
            if uncomputed > 1 and self._waiting.goes_before(request):
                admits += self._admit_waiting(rows, most_rows, min(lacking, request.priority))
            if len(rows) == most_rows or rows.budget <= 0:
                break
            count = uncomputed if uncomputed <= 1 else self.budget.chunk(request, rows)
            if count <= 0 and (count := self._ahead.follows(request)) == 0:
                continue
            draft = drafts.get(request.key) if drafts else None
            if draft is not None and self._drafting.fill(rows, request, draft):
                continue
            new_blocks: list[int] | None = []
            end = request.num_computed + count
            is_short = end > len(request.blocks) * self._rules.block_size
            if is_short or (has_boundaries and self._boundaries.lacks(request, end)):
                new_blocks, victims = self._grow(request, end, rows)
                if victims or new_blocks is None:
                    lacking = min(lacking, request.priority)
            if new_blocks is None:
                continue
            self._fill(rows, request, count, new_blocks)
        admits += self._admit_waiting(rows, most_rows, lacking)
        if not rows:
            return None
        self._drafting.ask(rows)
        step = rows.step(admits, tells_tokens=self._rules.tells_tokens)
        self.totals.on_step(step.num_tokens)
        tables = [request.blocks for request in rows.requests]
        self._in_flight.append(UnderWay(step, rows.requests, tables, rows.begins))
        if has_boundaries:
            self._boundaries.begun()
        return step

    def blocks_being_filled(self) -> set[int]:
        """Slots of pieces, blocks and others, that steps under way compute.

        They may have names already.
        """
        size = self._rules.block_size
        filled = {
            block
            for each in self._in_flight
            for start, end, table in zip(each.step.starts, each.step.ends, each.tables, strict=True)
            for block in table[start // size : -(-end // size)]
        }
        return filled.union(*(slots_filled(each.step) for each in self._in_flight))

    def blocks_in_flight(self) -> set[int]:
        """Slots of all pieces that steps under way read or write, also for aborted requests."""
        blocks = {block for each in self._in_flight for table in each.tables for block in table}
        read = (slots for each in self._in_flight for _, slots in each.begins)
        return blocks.union(*read, *(slots_filled(each.step) for each in self._in_flight))

    def restart(self) -> list[Step]:
        """Steps in flight, oldest first, to be run again by the workers.

        Workers may have done any part of them, so each row brings all that is known of its request. If the
        row's request was aborted, another one may have its slot by now; what the row fills may be a known
        prefix of others all the same.
        """
        known = map(self._ahead.known_part, self._in_flight)
        self._in_flight = deque(made_anew(each) for each in known if each is not None)
        return [each.step for each in self._in_flight]

    def update(self, step: Step, result: StepResult) -> list[RowOutput]:
        """Take in what the oldest step under way sampled.

        Returns the requests that got a token.
        """
        if not step.slots:
            return []
        oldest = self._in_flight.popleft()
        self._ahead.lacks_blocks &= bool(self._in_flight)
        assert oldest.step.slots is step.slots, "steps are answered in order"
        if self._boundaries.step:
            self._boundaries.answered()
        return self._outputs.process(oldest, result, self._in_flight)

    def timed(self, step: Step, seconds: float, largest: int = 0, own: float = 0.0) -> None:
        """Take in how long a step took, for the lengths of later ones.

        ``largest``: tokens of the largest step of any instance, in lockstep. ``own``: seconds of the step in
        which no other instance was waited for.
        """
        if self.queues.holds_batches:
            self.budget.lines.others_run()
        elif step.slots and self._has_lines():
            self.budget.lines.took(step.num_tokens, seconds, largest)
        if step.slots and not _only_decodes(step):
            self.budget.took(step, seconds, largest, own)

    def prices_step(self) -> bool:
        """Whether :meth:`priced` is to be called for the step that was taken in."""
        return self._speculation is not None and self._speculation.prices_step()

    def priced(self, step: Step, busy: float, proposing: float, others: int = 0) -> None:
        """Take in what a step cost, for drafts; its tokens are in already.

        ``busy``: its seconds as drafts are priced, of which some were spent on ``proposing``. ``others``:
        tokens of the other instances' steps in lockstep.
        """
        if self._speculation is None or not step.slots:
            return
        if _only_decodes(step):
            self._speculation.took(step, busy, proposing, others)
        else:
            self._speculation.paid(len(self._running), proposing)

    # ---- helpers of schedule

    def _running_without_held(self) -> list[Request]:
        """Running requests, without lines of batches where another request runs, or is about to."""
        running = self._running
        if not running or running[-1].priority != BATCH_PRIORITY:
            return running
        if not (self.queues.holds_batches or self._waiting.goes_before(running[-1])):
            return running
        return [each for each in running if each.priority != BATCH_PRIORITY]

    def _limit_lines(self, rows: StepRows) -> bool:
        """Limit a step of batch lines alone; returns whether other requests hold them."""
        holds = self.queues.holds_batches
        if not holds and self._has_lines():
            self.budget.limit_lines(rows)
        return holds

    def _has_lines(self) -> bool:
        """Whether a batch line is the first running request, or else the first waiting one."""
        first = self._running[0] if self._running else self._waiting[0] if self._waiting else None
        return first is not None and first.priority == BATCH_PRIORITY

    def _grow(self, request: Request, num_tokens: int, rows: StepRows) -> tuple[list[int] | None, int]:
        """Blocks that a running request lacks for ``num_tokens``, and how many were preempted.

        So it is where slots of boundary pieces lack.

        If need be, requests that would go after it and are in no step give theirs back. None if the request
        must wait; it may be preempted itself.
        """
        needed = self._rules.blocks_for(num_tokens) - len(request.blocks)
        victims = 0
        while self._boundaries.lacks(request, num_tokens) or (new_blocks := self._pool.take(needed)) is None:
            later = takewhile(lambda other: other is not request, reversed(self._running))
            victim = next((other for other in later if not other.num_in_flight), request)
            has_others = rows or (self.budget.goes_first(request) and len(self._running) > 1)
            if victim is request and (self._in_flight or (request.num_uncomputed > 1 and has_others)):
                self._ahead.lacks_blocks = bool(self._in_flight)
                return None, victims  # requests in flight will end or give way; keep what is computed
            self.queues.preempt(victim)
            victims += 1
            if victim is request:
                return None, victims
        request.blocks += new_blocks
        return new_blocks, victims

    def _fill(self, rows: StepRows, request: Request, count: int, new_blocks: list[int]) -> None:
        rows.add(request, count, new_blocks)
        self.budget.placed(request)
        if self._boundaries.step:
            self._boundaries.cross(request, rows, count)
        request.num_in_flight += 1
        self.prefixes.advance(request, count)

    def _make_way(self) -> None:
        """Preempt running requests for waiting ones of strictly higher priority."""
        if not (self._running and self._waiting.goes_before(self._running[-1])):
            return
        rules, whole = self._rules, not self._rules.enable_chunked_prefill
        share = self.budget.prompt_share
        tokens = rules.max_num_batched_tokens - len(self._running) if whole else share.tokens
        slots = len(self._free_slots)
        room = Room(self._running, self._pool, rules.block_size, slots=slots, tokens=tokens, whole=whole)
        for victim in giving_way(self._waiting, self._running, room):
            self.queues.preempt(victim)

    def _admit_waiting(
        self, rows: StepRows, most_rows: int, before: int, most: int = LAST_OF_ALL
    ) -> list[Admit]:
        """Admit waiting requests in order, up to the first that does not fit.

        Only those of a strictly higher priority than ``before`` are looked at, and ``most`` admitted.

        Requests that lack no more than room for the log-probabilities of their prompts are passed over. If
        the output of any waiting request has begun, so are those that lack no more than a share of the step,
        and behind one that lacks a number for its adapter all that have one, so that none overtakes it.
        Slots and blocks are kept for them.
        """
        admits: list[Admit] = []
        index = slots_kept = blocks_kept = 0
        adapters = self.queues.adapters
        adapter_waits = False
        while len(self._waiting) > index and len(self._free_slots) > slots_kept:
            if rows.budget <= 0 or len(rows) == most_rows or len(admits) == most:
                break
            request = self._waiting[index]
            is_held = request.priority == BATCH_PRIORITY and self.queues.holds_batches
            if request.priority >= before or is_held:
                break
            lacks_share = rows.prompt_budget <= 0 and not request.num_output
            if lacks_share and not self._waiting.num_begun:
                break
            adapter_waits |= not adapters.has_room(request.adapter)
            lacks_adapter = adapter_waits and bool(request.adapter)
            if lacks_share or lacks_adapter or rows.is_full_for(request):
                if lacks_share or lacks_adapter:
                    slots_kept += 1
                    blocks_kept += self._rules.blocks_for(len(request.token_ids))
                index += 1
                if index == MOST_PASSED_OVER:
                    break
                continue
            known, part = self.prefixes.find(request)
            here = known if part is None else [*known, part]
            count = self.budget.chunk(request, rows)
            in_all = self._rules.blocks_for(len(request.token_ids))
            lacks = self._boundaries.lacks_beside(request, count)
            if count == 0 or lacks or self._pool.num_free_beside(here) < in_all - len(here) + blocks_kept:
                request.num_computed = 0
                break
            self._pool.hold(known)
            self._boundaries.admit(request, len(known))
            if part is not None:
                self._pool.go_on_in(part)
            taken = self._pool.take(self._rules.blocks_for(request.num_computed + count) - len(here))
            assert taken is not None
            self.queues.admit(request, here + taken)
            self.prefixes.admitted(request)
            assert request.slot is not None
            admits.append(admit_of(request, request.slot, request.num_computed))
            self._fill(rows, request, count, request.blocks[:])
        return admits


def _only_decodes(step: Step) -> bool:
    """Whether no row is a prompt's: those come last."""
    return step.counts[-1] == 1 or len(step.counts) - 1 in step.drafts
