"""Requests of one instance: those that wait, and those that hold a slot (pure).

A request moves between the two by its admission and by preemption, and leaves by its end. What routers choose
an instance by is counted here.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection

from engine.messages import BATCH_PRIORITY, FinishReason
from engine.pieces.pool import PiecePool
from engine.scheduling.adapter_numbers import AdapterNumbers
from engine.scheduling.adapter_turns import AdapterTurns
from engine.scheduling.boundaries import Boundaries
from engine.scheduling.prefix_cache import ExpectedPrefixBlocks
from engine.scheduling.request import Request, RequestKey, Status
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.totals import SchedulerTotals
from engine.scheduling.waiting_queue import WaitingQueue


class RequestQueues:
    """Waiting and running requests of an instance, with their slots."""

    def __init__(self, rules: SchedulerRules, pool: PiecePool, totals: SchedulerTotals) -> None:
        self._rules = rules
        self._pool = pool
        self._totals = totals
        self._requests: dict[RequestKey, Request] = {}
        self.waiting = WaitingQueue(rules.block_size)
        self.running: list[Request] = []
        """Requests that have a slot, in order; always this list."""
        self._by_slot: dict[int, Request] = {}
        self.free_slots = list(range(rules.max_num_seqs))[::-1]
        self.adapters = AdapterNumbers(rules.max_loras)
        self._turns = AdapterTurns() if rules.max_loras else None
        """None: no request has an adapter."""
        self._num_grammars = 0
        self.expected_blocks = ExpectedPrefixBlocks(pool, rules.block_size)
        self.boundaries = Boundaries(pool, rules.block_size)

    def __repr__(self) -> str:
        return f"<RequestQueues {len(self.running)} running, {len(self.waiting)} waiting>"

    # ---- load

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens still to compute of waiting requests, and of partly computed prompts."""
        return self.waiting.num_tokens + self.in_prefill()

    @property
    def num_tokens_ahead(self) -> tuple[int, int]:
        """``num_waiting_tokens``, and the same without expected prefix cache hits.

        Hits are blocks in the cache, and blocks that requests further ahead will have put there.
        """
        in_prefill = self.in_prefill()
        return self.waiting.num_tokens + in_prefill, self.waiting.num_uncached + in_prefill

    @property
    def num_queued(self) -> int:
        """Waiting requests for which the next step has no slot, or maybe no blocks."""
        return self._num_queued(len(self.waiting), self.waiting.num_blocks)

    def num_queued_with(self, num_tokens: int) -> int:
        """``num_queued`` if a request of so many tokens came now."""
        return self._num_queued(
            len(self.waiting) + 1, self.waiting.num_blocks + self._rules.blocks_for(num_tokens)
        )

    def _num_queued(self, num_waiting: int, blocks: int) -> int:
        return num_waiting if blocks > self._pool.num_free else max(0, num_waiting - len(self.free_slots))

    def in_prefill(self) -> int:
        """Tokens still to compute of prompts that are partly computed."""
        left = [len(request.token_ids) - request.num_computed for request in self.running]
        # a request that needs its next token is in no prefill, nor is one with a row ahead
        return sum(left) - left.count(1) + left.count(-1)

    # ---- look-ups

    @property
    def holds_batches(self) -> bool:
        """Whether a request runs that lines of batches would slow down."""
        return bool(self.running) and self.running[0].priority < BATCH_PRIORITY

    @property
    def requests(self) -> Collection[Request]:
        return self._requests.values()

    def holder(self, slot: int) -> Request | None:
        """Request that holds a slot; None if nobody does."""
        return self._by_slot.get(slot)

    @property
    def has_grammars(self) -> bool:
        """Whether the output of any request here must follow a grammar."""
        return self._num_grammars > 0

    def find(self, key: RequestKey) -> Request | None:
        """Request with this key, waiting or running; None if it is not here."""
        return self._requests.get(key)

    def knows(self, key: RequestKey) -> bool:
        """Whether this request is here, waiting or running."""
        return key in self._requests

    def decodes_then_prefills(self) -> list[Request]:
        """Running requests: decoding ones first, then those with partly computed prompts.

        So a long prompt never starves them. They are in order otherwise.
        """
        return sorted(self.running, key=lambda request: request.num_uncomputed > 1)

    # ---- changes of state

    def add(self, request: Request) -> None:
        """Queue a new request."""
        assert request.key not in self._requests, f"{request!r} was added twice"
        self._requests[request.key] = request
        self._num_grammars += request.grammar is not None
        if self._turns is not None:
            request.turn = self._turns.take(request.adapter)
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Let a request wait for its admission."""
        request.status = Status.WAITING
        self.expected_blocks.expect(request)  # first: the queue counts what it expects of the prefix cache
        self.waiting.add(request)

    def leave(self, request: Request) -> None:
        """Take a waiting request out, to be queued again under other names."""
        self.waiting.remove(request)
        self.expected_blocks.settle(request)

    def withdraw(self, request: Request) -> None:
        """Forget a waiting request, which may be added again."""
        self.leave(request)
        self._forget(request)

    def admit(self, request: Request, blocks: list[int]) -> None:
        """Give a waiting request a slot and these blocks."""
        self.waiting.remove(request)
        insort(self.running, request, key=lambda other: other.order)
        request.status = Status.RUNNING
        request.slot = self.free_slots.pop()
        request.adapter_number = self.adapters.take(request.adapter)
        if self._turns is not None:
            self._turns.admitted(request.turn)
        self._by_slot[request.slot] = request
        request.blocks = blocks

    def preempt(self, request: Request, *, is_wrong: bool = False) -> None:
        """Preempt a request: back to the queue, to be computed again.

        A known prefix may spare part of it. ``is_wrong``: what it has computed is not to be found by others.
        """
        self._totals.preemptions += 1
        self._vacate(request, is_wrong=is_wrong)
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = request.no_scores()
        self.enqueue(request)

    def _vacate(self, request: Request, *, is_wrong: bool = False) -> None:
        """Give back the slot and the pieces of a running request."""
        assert request.slot is not None
        self.running.remove(request)
        del self._by_slot[request.slot]
        self.free_slots.append(request.slot)
        self.adapters.give_back(request.adapter)
        self._pool.release(request.blocks)
        self.boundaries.vacate(request, is_wrong=is_wrong)
        self.expected_blocks.settle(request)
        request.slot, request.blocks = None, []
        request.num_computed = request.num_named = request.num_put_off = 0

    def finish(self, request: Request, reason: FinishReason, *, is_wrong: bool = False) -> None:
        """End a request, waiting or running, and forget it; ``is_wrong``: see :meth:`preempt`."""
        if request.status is Status.RUNNING:
            self._vacate(request, is_wrong=is_wrong)
        else:
            self.leave(request)
        request.status, request.finish_reason = Status.FINISHED, reason
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.key]
        self._num_grammars -= request.grammar is not None
