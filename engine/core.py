"""The step of one instance: take requests in, schedule, execute, hand tokens out. No sockets."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from coordinator.process.tracing import Tracing
from coordinator.rpc.rpc import MAX_MESSAGE_BYTES
from engine.config import EngineConfig
from engine.events.recording import EventRecorder
from engine.executor_contract import Executor
from engine.groups.step_profile import StepProfile
from engine.groups.stepping import Agreement, Alone, Stepping
from engine.inheritance.table import Publisher, Table
from engine.messages import (
    BlockEvents,
    CacheReset,
    Capacity,
    HandedOver,
    InstanceReport,
    LockstepCounters,
    Prefetch,
    Prefetched,
    RequestRefused,
    Submit,
    logprobs_bytes,
)
from engine.model.checkpoint import ModelInfo
from engine.sampling import BadParameter
from engine.scheduling.block_log import BlockLog
from engine.scheduling.blocks import BlockHash, BlockPool, hash_block
from engine.scheduling.grammar_compiler import GrammarCompiler
from engine.scheduling.outcomes import outgoing_tokens_of
from engine.scheduling.outgoing_tokens import OutgoingTokens
from engine.scheduling.report_policy import LoadSnapshot
from engine.scheduling.request import Request, RequestKey, from_submit
from engine.scheduling.rules import SchedulerRules
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.speculation import Speculation
from engine.step import Masks, Step
from engine.tiers.file_tier import FileTier
from engine.transfers.exchange import BlockExchange, Heir, Mover
from engine.transfers.messages import Holder
from engine.transfers.price import FetchPrice
from parallel.communicators.base import CollectiveError

Peer = bytes

BACKGROUND_PRIORITY = 2**63
"""Priority of requests that nobody waits for.

It is behind that of any client, which has 64 bits.
"""
BESIDE_LOGPROBS = 1 << 16
"""Bytes of a message beside the log-probabilities of a prompt."""


class EngineCore:
    """Schedules the requests of all routers in one batch, and runs its steps."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        executor: Executor,
        stepping: Stepping | None = None,
        *,
        num_blocks: int,
        max_model_len: int,
        tracing: Tracing | None = None,
        at_once: float | None = None,
        speculation: Speculation | None = None,
        has_gpu: bool = False,
        is_native: bool = False,
    ) -> None:
        """``speculation``: None makes what the settings ask for. ``has_gpu``: whether the model is on one.

        ``is_native``: whether native kernels compute it: for them memory is left for larger prefill chunks.
        """
        if speculation is None and config.scheduler.speculative is not None:
            speculation = Speculation(config.scheduler.speculative)
        self._config = config
        self._info = info
        self._executor = executor
        self._max_model_len = max_model_len
        self._at_once = at_once
        self.stepping: Stepping = stepping or Alone()
        self._profile = StepProfile()
        self._blocks = BlockLog()
        self._pool = BlockPool(
            num_blocks, enable_prefix_caching=config.cache.enable_prefix_caching, observer=self._blocks
        )
        self.scheduler = Scheduler(
            SchedulerRules(
                max_num_seqs=config.scheduler.most_requests(),
                max_num_batched_tokens=config.scheduler.token_budget(),
                block_size=config.cache.block_size,
                enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
                long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
                prompt_tokens_beside_decodes=config.scheduler.prompt_tokens_beside_decodes(has_gpu),
                prompt_seconds_beside_decodes=config.scheduler.prompt_seconds_beside_decodes(has_gpu),
                largest_lone_chunk=config.scheduler.largest_lone_chunk(has_gpu) if is_native else 0,
                lone_chunk_seconds=config.scheduler.lone_chunk_seconds(),
                micro_batches=executor.in_flight,
                tells_tokens=executor.needs_tokens,
            ),
            self._pool,
            speculation,
        )
        self.grammars = GrammarCompiler(info)
        self.exchange: BlockExchange | None = None
        """Transfers of KV blocks, where there are any."""
        self._tier: FileTier | None = None
        self._publisher: Publisher | None = None
        self._inherited_at = ""
        self._recorder: EventRecorder | None = None
        self._resets: list[tuple[Peer, int]] = []
        """Wishes to reset the prefix cache that are not answered yet."""
        self.routers: dict[Peer, str] = {}
        """Names of the routers that are connected."""
        self._blocks_at = self._cache_identity = ""
        self._arrivals = 0
        self._tracing = tracing
        self._others_ran: deque[bool] = deque(maxlen=executor.in_flight)
        """Whether other instances had rows in each of the last ``in_flight`` steps."""
        self._only_instance = False
        """Whether no other instance in lockstep had rows or a queue last."""
        self._under_way: deque[tuple[Step, Agreement]] = deque()
        """Steps that have begun, oldest first."""
        self._unfinished: deque[Step] = deque()
        """Steps to run before others are scheduled: they did not begin, or did not end."""
        self._outgoing: dict[Peer, OutgoingTokens] = {}
        """Tokens of steps that ended before a later one failed."""
        self._finished_at = 0.0
        """Time of the newest result, or of the first step under way if later."""

    def __repr__(self) -> str:
        return f"<EngineCore {self.scheduler!r}>"

    @property
    def has_work(self) -> bool:
        kept = self._unfinished or self._outgoing or any(step.slots for step, _ in self._under_way)
        return self.scheduler.queues.has_work or bool(kept)

    @property
    def is_empty(self) -> bool:
        """Whether there are no requests, not even ones that wait beside the scheduler."""
        return not self.has_work and not self.grammars and not self.exchange

    @property
    def is_lending(self) -> bool:
        """Whether blocks are held for a transfer, in either direction."""
        return self.exchange is not None and not self.exchange.is_idle

    def exchange_blocks(
        self,
        mover: Mover,
        *,
        address: str,
        identity: str,
        token_bytes: float,
        checks: bool = False,
        tier: FileTier | None = None,
        heir: Heir | None = None,
    ) -> None:
        """Fetch KV blocks from other instances from now on, and lend them blocks.

        ``address`` is where they ask for them; ``token_bytes`` those of one token in the cache. ``checks``:
        bits do not depend on the batch, so some fetched blocks are computed as well, and compared. ``tier``:
        blocks in files. ``heir``: those of dead instances.
        """
        size, checks = self._config.cache.block_size, checks and self._executor.in_flight == 1
        price = FetchPrice(token_bytes)
        self.exchange = BlockExchange(
            self._pool, mover, price, size, checks=checks, tier=tier, heir=heir,
            in_flight=self.scheduler.blocks_in_flight,
        )  # fmt: skip
        self._tier = tier
        self._blocks_at, self._cache_identity = address, identity

    def publish_blocks(self, address: str, table: Table) -> None:
        """Say in memory that outlives this process, found at ``address``, which blocks are whole."""
        self._inherited_at = address
        self._publisher = Publisher(self._pool, table)
        self._pool.observe(self._publisher)

    def record_events(self) -> EventRecorder:
        """Record changes of the prefix cache from now on, before any request has come."""
        self._recorder = self.scheduler.prefixes.contents = recorder = EventRecorder(
            self._config.cache.block_size
        )
        self._pool.observe(recorder)
        return recorder

    def submit(self, peer: Peer, submit: Submit) -> RequestRefused | None:
        """Queue a request of a router, or return its refusal."""
        if self._is_full(submit) and not (submit.owed or submit.output_ids):
            return RequestRefused(submit.request, "the instance's queue is full", retry=True)
        problem = self._problem_with(submit)
        if problem is not None:
            return RequestRefused(submit.request, problem, retry=False)
        if self._knows((peer, submit.request)):
            return RequestRefused(submit.request, "a request of this number is here already", retry=False)
        request = self._request_of(peer, submit)
        problem = self.scheduler.problem_with(request)
        if problem is not None:
            return RequestRefused(submit.request, problem, retry=False)
        if submit.params.grammar is not None:
            self.grammars.begin(request, submit.params.grammar)
        else:
            self._queue(request)
        return None

    def prefetch(self, peer: Peer, wish: Prefetch) -> None:
        """Fetch the blocks of a request that is to move here; :meth:`take_fetched` has the answer."""
        vocab_size, ids = self._info.vocab_size, wish.token_ids
        is_valid = 0 < len(ids) <= self._max_model_len and min(ids) >= 0 and max(ids) < vocab_size
        size = self._config.cache.block_size
        names: list[BlockHash] = []
        for start in range(0, (len(ids) - 1) // size * size if is_valid else 0, size):
            parent = names[-1] if names else None
            names.append(hash_block(parent, ids[start : start + size], wish.cache_salt))
        if self.exchange is None:
            return
        key = peer, wish.number
        if wish.request and is_valid and peer in self.routers:
            holder = self.routers[peer], wish.request
            self.exchange.take_over(key, names, wish.blocks_at, holder)
        else:
            self.exchange.copy(key, names, wish.blocks_at)

    def take_fetched(self) -> list[tuple[Peer, Prefetched | HandedOver]]:
        """Act on what transfers of KV blocks did, and queue requests whose blocks have come.

        Returns answers to :class:`engine.messages.Prefetch`, and requests that were handed over. All tokens
        of these are to be sent first.
        """
        if self.exchange is None:
            return []
        if self._publisher is not None:
            self._publisher.turn(self.scheduler.blocks_being_filled)
        for request in self.exchange.turn(self.scheduler.blocks_being_filled, self._holder):
            self.scheduler.add(request)
        found: list[tuple[Peer, Prefetched | HandedOver]] = []
        for key in self.exchange.take_handed_over():
            self.scheduler.abort(key)
            found.append((key[0], HandedOver(key[1])))
        for (peer, number), size, is_taken in self.exchange.take_copied():
            found.append((peer, Prefetched(number, size, is_taken)))
        return found

    def _holder(self, holder: Holder) -> Request | None:
        """The request of a router with this name.

        None if tokens for the router are kept since a step failed.
        """
        name, number = holder
        peer = next((peer for peer, router in self.routers.items() if router == name), None)
        if peer is None or peer in self._outgoing:
            return None
        return self.scheduler.queues.find((peer, number))

    @property
    def pool(self) -> BlockPool:
        """The blocks of the cache."""
        return self._pool

    def reset_cache(self, peer: Peer, number: int) -> None:
        """Forget all cached prefixes; :meth:`take_resets` has the answer."""
        if self._recorder is not None:
            self._recorder.clear()
        if self.exchange is not None:
            self.exchange.reset()
        else:
            self._pool.unname(list(self._pool.known))
        if self._tier is not None:
            self._tier.clear()
        self._resets.append((peer, number))

    def take_resets(self) -> list[tuple[Peer, CacheReset]]:
        """Answers to wishes that are fulfilled."""
        if not self._resets or (self._tier is not None and not self._tier.is_clear):
            return []
        found, self._resets = self._resets, []
        return [(peer, CacheReset(number)) for peer, number in found]

    @property
    def lends(self) -> bool:
        """Whether other instances can fetch KV blocks from here."""
        return self.exchange is not None and self.exchange.is_open

    def take_compiled(self) -> list[tuple[Peer, RequestRefused]]:
        """Queue requests whose grammars are ready; returns refusals of failed ones."""
        refused = []
        for compiled in self.grammars.take():
            peer, number = compiled.request.key
            if compiled.problem is None:
                self._queue(compiled.request)
            else:
                reason = f"structured outputs: {compiled.problem}"
                refused.append((peer, RequestRefused(number, reason, retry=False)))
        return refused

    def abort(self, peer: Peer, numbers: list[int]) -> None:
        """Forget some requests of a router; those not known are ignored."""
        for number in numbers:
            if not self._forget((peer, number)):
                self.scheduler.abort((peer, number))
        if (tokens := self._outgoing.pop(peer, None)) and (kept := tokens.without(numbers)):
            self._outgoing[peer] = kept

    def recall(self, peer: Peer, numbers: list[int]) -> list[int]:
        """Forget those of these requests that have not begun, and return their numbers."""
        keys = ((peer, number) for number in numbers)
        return [key[1] for key in keys if self._forget(key) or self.scheduler.recall(key)]

    def abort_all(self, peer: Peer) -> int:
        """Forget all requests of a router that is gone; returns how many."""
        here = [*self.scheduler.queues.requests, *self.grammars.requests]
        if self.exchange is not None:
            here += self.exchange.requests
            self.exchange.forget_copies(peer)
        numbers = [request.key[1] for request in here if request.key[0] == peer]
        self.abort(peer, numbers)
        self._outgoing.pop(peer, None)  # also of requests that have ended
        return len(numbers)

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`step` has time for something else: others compute, and no instance is waited for."""
        return self._executor.computes_apart and isinstance(self.stepping, Alone)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> dict[Peer, OutgoingTokens]:
        """Begin steps until ``in_flight`` are under way, then finish the oldest.

        Returns the new tokens by router, none if nothing runs. In lockstep each step begins once all agree on
        it. Where no further step follows for now, all that are under way are finished. Where it
        :attr:`overlaps`, ``meanwhile`` is called while workers or a device compute; before a device gets a
        step with prompts, too.

        A step that does not come to its end is kept and runs again before anything else is scheduled, also
        if its requests are aborted meanwhile: others may rely on the blocks that it fills. So nothing has to
        be taken back, and nothing was handed out.

        Raises:
            parallel.communicators.base.CollectiveError: in lockstep, a peer is lost.
            engine.executor_contract.WorkerLost: a worker of this instance is.
        """
        try:
            pauses = self._begin_steps(meanwhile)
            if self.overlaps:
                meanwhile()
            for _ in range(len(self._under_way) if pauses else min(1, len(self._under_way))):
                self._keep(self._finish_oldest())
        except CollectiveError:
            self._restart()
            raise
        outgoing, self._outgoing = self._outgoing, {}
        return outgoing

    def run_again(self) -> None:
        """After entering a new group: steps lost with the old one run first."""
        if self._under_way:
            self._restart()

    def _restart(self) -> None:
        self._under_way.clear()
        self._only_instance = False
        self._unfinished = deque(map(self._masked, self.scheduler.restart()))

    def _keep(self, outgoing: dict[Peer, OutgoingTokens]) -> None:
        for peer, tokens in outgoing.items():
            if peer in self._outgoing:
                for delta in tokens:
                    self._outgoing[peer].add(delta)
            else:
                self._outgoing[peer] = tokens

    def _begin_steps(self, meanwhile: Callable[[], None]) -> bool:
        """Begin steps until enough are under way, or nothing more can run now.

        In lockstep some are without any rows of this instance. Returns whether no further step follows.
        """
        while len(self._under_way) < self._executor.in_flight:
            step = self._unfinished.popleft() if self._unfinished else self._schedule() or Step()
            agreement = self._agree(step)
            if not agreement.runs:
                if step.slots:
                    self._unfinished.appendleft(step)
                if agreement.pauses or not self._under_way:
                    self._profile.slept(agreement)
                return agreement.pauses
            if not self._under_way:
                self._finished_at = time.perf_counter()
            if self.overlaps and not self._executor.has_workers and step.num_tokens > len(step.slots):
                meanwhile()  # its many launches would keep tokens back for as long as it computes
            self._executor.begin(step, agreement.sizes)
            self._under_way.append((step, agreement))
        return False

    def _agree(self, step: Step) -> Agreement:
        if isinstance(self.stepping, Alone):
            return Agreement(runs=bool(step.slots))  # nobody wants to know the rest
        agreement = self.stepping.agree(
            step.num_tokens,
            queued_prefill=self.scheduler.queues.num_waiting_tokens,
            longest=max(step.ends, default=0),
            in_flight=sum(bool(begun.slots) for begun, _ in self._under_way),
        )
        self._others_ran.append(sum(agreement.sizes) > step.num_tokens)
        self.scheduler.budget.others_run = any(self._others_ran)
        self._only_instance = agreement.is_only_one
        return agreement

    def _finish_oldest(self) -> dict[Peer, OutgoingTokens]:
        result = self._executor.finish()
        began, self._finished_at = self._finished_at, time.perf_counter()
        step, agreement = self._under_way.popleft()
        self.scheduler.timed(step, self._finished_at - began)
        if self.exchange is not None and len(step.slots) < step.num_tokens:
            self.exchange.computed(step.num_tokens, self._finished_at - began)
        if self.exchange is not None:
            for request in self.exchange.wrong_requests(self.scheduler.queues.running):
                self.scheduler.set_back(request)
        times = self._executor.expert_times()
        if times is not None and agreement.sizes:
            self._profile.stepped(agreement, step.num_tokens, self._finished_at - began, times)
        return outgoing_tokens_of(self.scheduler.update(step, result), self._tracing)

    def _schedule(self) -> Step | None:
        self.scheduler.budget.only_instance = self._only_instance or isinstance(self.stepping, Alone)
        step = self.scheduler.schedule()
        if step is None:
            return None
        now = time.perf_counter()
        for admit in step.admits:
            request = self.scheduler.queues.holder(admit.slot)
            assert request is not None, "it was admitted just now"
            request.admitted_at = request.admitted_at or now
            if request.num_fetched and self.exchange is not None:
                self.exchange.admitted(request)
        return self._masked(step)

    def _masked(self, step: Step) -> Step:
        """The step, with masks for the rows that follow a grammar."""
        if not self.scheduler.queues.has_grammars:
            return step
        rows, bits = [], []
        for index, slot in enumerate(step.slots):
            request = self.scheduler.queues.holder(slot)  # nobody: aborted, and the answer will be dropped
            if request is not None and request.grammar is not None and index not in step.partial:
                mask = request.grammar.mask(request.num_output)
                if mask is not None:
                    rows.append(index)
                    bits.append(mask)
        return msgspec.structs.replace(step, masks=Masks(rows, b"".join(bits))) if rows else step

    @property
    def snapshot(self) -> LoadSnapshot:
        """Load after the last step, in short."""
        waiting_tokens, uncached_tokens = self.scheduler.queues.num_tokens_ahead
        waiting = len(self.scheduler.queues.waiting) + len(self.grammars)
        if self.exchange:
            waiting += len(self.exchange)
            waiting_tokens += self.exchange.num_tokens
            uncached_tokens += self.exchange.num_uncached
        return LoadSnapshot(
            running=len(self.scheduler.queues.running),
            waiting=waiting,
            waiting_tokens=waiting_tokens,
            uncached_tokens=uncached_tokens,
            queued=self.scheduler.queues.num_queued,
            blocks_used=self._pool.num_used,
            generation_tokens=self.scheduler.totals.generation_tokens,
            steps=self.scheduler.totals.steps,
        )

    def report(self, last_dispatch: int, bad_messages: int) -> InstanceReport:
        """Full report of the instance, for one router."""
        snapshot, fetched = self.snapshot, self.scheduler.totals.fetched_tokens
        return InstanceReport(
            last_dispatch=last_dispatch,
            running=snapshot.running,
            waiting=snapshot.waiting,
            waiting_tokens=snapshot.waiting_tokens,
            blocks_used=snapshot.blocks_used,
            blocks_total=self._pool.num_blocks,
            counters=msgspec.structs.replace(self.scheduler.counters(), bad_messages=bad_messages),
            lockstep=None if isinstance(self.stepping, Alone) else self._lockstep_counters(),
            uncached_tokens=snapshot.uncached_tokens,
            queued=snapshot.queued,
            fetch_price=1.0 if self.exchange is None else round(self.exchange.price_now(), 2),
            transfers=None if self.exchange is None else self.exchange.counters(fetched),
            files=None if self._tier is None else self._tier.counters(),
        )

    @property
    def capacity(self) -> Capacity:
        limits = self._config.scheduler
        return Capacity(
            block_size=self._config.cache.block_size,
            num_blocks=self._pool.num_blocks,
            max_num_seqs=limits.most_requests(),
            max_num_batched_tokens=limits.token_budget(),
            max_num_queued_reqs=limits.max_num_queued_reqs,
            max_num_queued_tokens=limits.max_num_queued_tokens,
            at_once=self._at_once,
            caches_prefixes=self._pool.is_caching,
            blocks_at=self._blocks_at,
            cache_identity=self._cache_identity,
            inherited_at=self._inherited_at,
        )

    @property
    def num_block_changes(self) -> int:
        """Number of the next change of the prefix cache."""
        return self._blocks.next

    def block_events(self, number: int | None) -> BlockEvents | None:
        """Changes of the prefix cache from ``number`` on, for a router that has those before."""
        return self._blocks.since(number, self._pool.known)

    def _lockstep_counters(self) -> LockstepCounters:
        counters = self._profile.counters(self._executor.tokens_per_expert())
        times = self.stepping.times
        return msgspec.structs.replace(
            counters,
            epoch=times.epoch,
            changes=times.changes,
            recoveries=times.recoveries,
            recovery_seconds=dict(times.seconds),
            links=self.stepping.link_totals(),
        )

    def _knows(self, key: RequestKey) -> bool:
        is_fetching = self.exchange is not None and key in self.exchange
        return is_fetching or self.scheduler.queues.knows(key) or key in self.grammars

    def _queue(self, request: Request) -> None:
        """Queue a request, at once or when blocks of it have been fetched."""
        if self.exchange is None or not self.exchange.takes(request):
            self.scheduler.add(request)

    def _forget(self, key: RequestKey) -> bool:
        """Forget a request that waits beside the scheduler; False if it does not."""
        is_fetching = self.exchange is not None and self.exchange.forget(key)
        return is_fetching or self.grammars.forget(key)

    def _is_full(self, submit: Submit) -> bool:
        """Whether the queue is full for one more request.

        It would wait for longer than the next step, and too many do already. Tokens are counted before a
        request is added: a long one finds room in an empty queue.
        """
        limits = self._config.scheduler
        most_tokens = limits.max_num_queued_tokens
        num_tokens = len(submit.prompt_ids) + len(submit.output_ids)
        queued = self.scheduler.queues.num_queued_with(num_tokens) + self.grammars.num_under_way
        return queued > limits.max_num_queued_reqs or (
            most_tokens is not None and self.scheduler.queues.num_waiting_tokens >= most_tokens
        )

    def _problem_with(self, submit: Submit) -> str | None:
        num_prompt = len(submit.prompt_ids)
        if num_prompt == 0:
            return "the prompt is empty"
        if num_prompt >= self._max_model_len:
            return f"the prompt has {num_prompt} tokens; the context length is {self._max_model_len}"
        if num_prompt + len(submit.output_ids) >= self._max_model_len:
            return f"prompt and output fill the context length of {self._max_model_len} already"
        vocab_size = self._info.vocab_size
        ids = (submit.prompt_ids, submit.output_ids)
        if any(min(part) < 0 or max(part) >= vocab_size for part in ids if part):
            return f"a token id is outside the vocabulary of {vocab_size}"
        if submit.params.max_tokens is not None and len(submit.output_ids) >= submit.params.max_tokens:
            return "the request was complete already"
        most = submit.params.prompt_logprobs
        if most is not None and num_prompt * logprobs_bytes(most) > MAX_MESSAGE_BYTES - BESIDE_LOGPROBS:
            return f"{most} prompt_logprobs for each of {num_prompt} tokens are too much: ask for fewer"
        try:
            submit.params.check(vocab_size=vocab_size, max_logprobs=vocab_size)
        except BadParameter as error:
            return str(error)
        return None

    def _request_of(self, peer: Peer, submit: Submit) -> Request:
        self._arrivals += 1
        if submit.background:
            submit = msgspec.structs.replace(submit, priority=BACKGROUND_PRIORITY)
        elif self._config.scheduler.scheduling_policy == "fcfs":
            submit = msgspec.structs.replace(submit, priority=0)
        request = from_submit(
            submit,
            peer,
            arrival=self._arrivals,
            eos_ids=self._info.eos_token_ids,
            max_model_len=self._max_model_len,
        )
        request.arrived_at = request.began_at = time.perf_counter()
        return request
