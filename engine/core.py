"""The step of one instance: take requests in, schedule, execute, hand tokens out. No sockets."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable

import msgspec

from coordinator.process.tracing import Tracing
from coordinator.rpc.rpc import MAX_MESSAGE_BYTES
from engine.config import EngineConfig
from engine.executor_contract import Executor
from engine.groups.step_profile import StepProfile
from engine.groups.stepping import Agreement, Alone, Stepping
from engine.messages import (
    BlockEvents,
    Capacity,
    InstanceReport,
    LockstepCounters,
    RequestRefused,
    Submit,
    logprobs_bytes,
)
from engine.model.checkpoint import ModelInfo
from engine.sampling import BadParameter
from engine.scheduling.block_log import BlockLog
from engine.scheduling.blocks import BlockPool
from engine.scheduling.grammar_compiler import GrammarCompiler
from engine.scheduling.outcomes import outgoing_tokens_of
from engine.scheduling.outgoing_tokens import OutgoingTokens
from engine.scheduling.report_policy import LoadSnapshot
from engine.scheduling.request import Request, from_submit
from engine.scheduling.scheduler import Scheduler, SchedulerRules
from engine.scheduling.speculation import Speculation
from engine.step import Masks, Step, StepResult
from parallel.communicators.base import CollectiveError

Peer = bytes

BESIDE_LOGPROBS = 1 << 16
"""Bytes of a message with log-probabilities of a prompt that may be for other things."""


class EngineCore:
    """Requests of all routers, in one batch."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        executor: Executor,
        pace: Stepping | None = None,
        *,
        num_blocks: int,
        max_model_len: int,
        tracing: Tracing | None = None,
        at_once: float | None = None,
        speculation: Speculation | None = None,
        has_gpu: bool = False,
    ) -> None:
        """``speculation``: None makes what the settings ask for. ``has_gpu``: whether the model is on one."""
        if speculation is None and config.scheduler.speculative is not None:
            speculation = Speculation(config.scheduler.speculative)
        self._config = config
        self._info = info
        self._executor = executor
        self._max_model_len = max_model_len
        self._at_once = at_once
        self.pace: Stepping = pace or Alone()
        self._split = StepProfile()
        self._blocks = BlockLog()
        self._pool = BlockPool(
            num_blocks, enable_prefix_caching=config.cache.enable_prefix_caching, observer=self._blocks
        )
        self.scheduler = Scheduler(
            SchedulerRules(
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.token_budget(),
                block_size=config.cache.block_size,
                enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
                long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
                prompt_tokens_beside_decodes=config.scheduler.prompt_tokens_beside_decodes(has_gpu),
                fewer_where_slow=config.scheduler.fewer_where_slow(has_gpu),
                micro_batches=executor.in_flight,
                tells_tokens=executor.needs_tokens,
            ),
            self._pool,
            speculation,
        )
        self.grammars = GrammarCompiler(info)
        self._arrivals = 0
        self._tracing = tracing
        self._unfinished: Step | None = None
        """A step that was scheduled and did not run to its end, because the group broke or changed."""
        self._others_ran: deque[bool] = deque(maxlen=executor.in_flight)
        """Of so many last steps, whether other instances had rows in them."""
        self._steps: deque[tuple[Step, Agreement]] = deque()
        """Under way in a pipeline, oldest first."""
        self._again: deque[Step] = deque()
        """To run in the pipeline before anything else is scheduled: they did not come to their end."""
        self._handouts: dict[Peer, OutgoingTokens] = defaultdict(OutgoingTokens)
        """Of steps of the pipeline that ended before one after them failed."""
        self._finished_at = 0.0
        """When the newest result of the pipeline came, or its first step began."""

    def __repr__(self) -> str:
        return f"<EngineCore {self.scheduler!r}>"

    @property
    def has_work(self) -> bool:
        kept = self._unfinished is not None or self._again or self._handouts
        return self.scheduler.has_work or bool(kept) or any(step.slots for step, _ in self._steps)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is here, not even requests that wait for their grammar."""
        return not self.has_work and not self.grammars

    def submit(self, peer: Peer, submit: Submit) -> RequestRefused | None:
        """Queue a request of a router, or say why not."""
        if self._is_full(submit) and not (submit.owed or submit.output_ids):
            return RequestRefused(submit.request, "the instance's queue is full", retry=True)
        problem = self._problem_with(submit)
        if problem is not None:
            return RequestRefused(submit.request, problem, retry=False)
        if self.scheduler.knows((peer, submit.request)) or (peer, submit.request) in self.grammars:
            return RequestRefused(submit.request, "a request of this number is here already", retry=False)
        request = self._request_of(peer, submit)
        problem = self.scheduler.problem_with(request)
        if problem is not None:
            return RequestRefused(submit.request, problem, retry=False)
        if submit.params.grammar is not None:
            self.grammars.begin(request, submit.params.grammar)
        else:
            self.scheduler.add(request)
        return None

    def take_compiled(self) -> list[tuple[Peer, RequestRefused]]:
        """Queue the requests whose grammars are ready; those that never will be, for their routers."""
        refused = []
        for compiled in self.grammars.take():
            peer, number = compiled.request.key
            if compiled.problem is None:
                self.scheduler.add(compiled.request)
            else:
                reason = f"structured outputs: {compiled.problem}"
                refused.append((peer, RequestRefused(number, reason, retry=False)))
        return refused

    def abort(self, peer: Peer, numbers: list[int]) -> None:
        """Forget some requests of a router; those not known are ignored."""
        for number in numbers:
            if not self.grammars.forget((peer, number)):
                self.scheduler.abort((peer, number))
        if (handout := self._handouts.pop(peer, None)) and (kept := handout.without(numbers)):
            self._handouts[peer] = kept

    def recall(self, peer: Peer, numbers: list[int]) -> list[int]:
        """Forget those of these requests that have not begun; returns them."""
        keys = ((peer, number) for number in numbers)
        return [key[1] for key in keys if self.grammars.forget(key) or self.scheduler.recall(key)]

    def abort_all(self, peer: Peer) -> int:
        """Forget all requests of a router that is gone; returns how many."""
        here = [*self.scheduler.requests, *self.grammars.requests]
        numbers = [request.key[1] for request in here if request.key[0] == peer]
        self.abort(peer, numbers)
        return len(numbers)

    @property
    def overlaps(self) -> bool:
        """Whether :meth:`step` has time for something else: others compute, and no instance is waited for."""
        return self._executor.computes_apart and isinstance(self.pace, Alone)

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> dict[Peer, OutgoingTokens]:
        """Run one step, in lockstep once all agree on it; the new tokens by router.

        Empty if nothing runs. Where it :attr:`overlaps`, ``meanwhile`` is called once workers compute it.

        A step that does not come to its end is kept and runs the next time, before anything else is
        scheduled, also if its requests are aborted meanwhile: others may rely on the blocks that it fills.
        So nothing has to be taken back, and nothing was handed out.

        Raises:
            parallel.communicators.base.CollectiveError: in lockstep, a peer is lost.
            engine.executor_contract.WorkerLost: a worker of this instance is.
        """
        if self._executor.in_flight > 1:
            return self._step_of_pipeline(meanwhile)
        step = self._unfinished or self._schedule() or Step()
        self._unfinished = step if step.slots else None
        agreement = self._agree(step)
        if not agreement.runs:
            self._split.slept(agreement)
            return {}
        began = time.perf_counter()
        if self.overlaps:
            self._executor.begin(step, agreement.sizes)
            meanwhile()
            result = self._executor.finish()
        else:
            result = self._executor.execute(step, agreement.sizes)
        self._unfinished = None
        seconds = time.perf_counter() - began
        self.scheduler.timed(step, seconds)
        times = self._executor.expert_times()
        if times is not None:
            self._split.stepped(agreement, step.num_tokens, seconds, times)
        return self._take_in(step, result)

    def run_again(self) -> None:
        """Another group has taken the place of the one before: what is under way in a pipeline was lost with
        it, and is the first to run in the new one."""
        if self._steps:
            self._steps.clear()
            self._again = deque(map(self._masked, self.scheduler.restart()))

    def _step_of_pipeline(self, meanwhile: Callable[[], None]) -> dict[Peer, OutgoingTokens]:
        """Fill the pipeline, then wait for the step that is furthest.

        Where no further one follows for now, for all.
        """
        try:
            pauses = self._fill_pipeline()
            if self.overlaps:
                meanwhile()
            for _ in range(len(self._steps) if pauses else min(1, len(self._steps))):
                for peer, handout in self._finish_oldest().items():
                    for delta in handout:
                        self._handouts[peer].add(delta)
        except CollectiveError:
            self._steps.clear()
            self._again = deque(map(self._masked, self.scheduler.restart()))
            raise
        handouts, self._handouts = self._handouts, defaultdict(OutgoingTokens)
        return handouts

    def _fill_pipeline(self) -> bool:
        """Begin steps until enough are under way, or nothing more can run now.

        In lockstep each once all agree on it, some without any rows of this instance. Returns whether no
        further one follows.
        """
        while len(self._steps) < self._executor.in_flight:
            step = self._again.popleft() if self._again else self._schedule() or Step()
            agreement = self._agree(step)
            if not agreement.runs:
                if step.slots:
                    self._again.appendleft(step)
                if agreement.pauses:
                    self._split.slept(agreement)
                return agreement.pauses
            if not self._steps:
                self._finished_at = time.perf_counter()
            self._executor.begin(step, agreement.sizes)
            self._steps.append((step, agreement))
        return False

    def _agree(self, step: Step) -> Agreement:
        if isinstance(self.pace, Alone):
            return Agreement(runs=bool(step.slots))  # nobody wants to know the rest
        agreement = self.pace.agree(
            step.num_tokens,
            queued_prefill=self.scheduler.num_waiting_tokens,
            longest=max(step.ends, default=0),
            in_flight=sum(bool(under_way.slots) for under_way, _ in self._steps),
        )
        self._others_ran.append(sum(agreement.sizes) > step.num_tokens)
        self.scheduler.others_run = any(self._others_ran)
        return agreement

    def _finish_oldest(self) -> dict[Peer, OutgoingTokens]:
        result = self._executor.finish()
        began, self._finished_at = self._finished_at, time.perf_counter()
        step, agreement = self._steps.popleft()
        self.scheduler.timed(step, self._finished_at - began)
        times = self._executor.expert_times()
        if times is not None and agreement.sizes:
            self._split.stepped(agreement, step.num_tokens, self._finished_at - began, times)
        return self._take_in(step, result)

    def _schedule(self) -> Step | None:
        step = self.scheduler.schedule()
        if step is None:
            return None
        now = time.perf_counter()
        for admit in step.admits:
            request = self.scheduler.holder(admit.slot)
            assert request is not None, "it was admitted just now"
            request.admitted_at = request.admitted_at or now
        return self._masked(step)

    def _masked(self, step: Step) -> Step:
        """The step, with masks for the rows that follow a grammar."""
        if not self.scheduler.has_grammars:
            return step
        rows, bits = [], []
        for index, slot in enumerate(step.slots):
            request = self.scheduler.holder(slot)  # nobody: aborted, and the answer will be dropped
            if request is not None and request.grammar is not None and index not in step.partial:
                mask = request.grammar.mask(request.num_output)
                if mask is not None:
                    rows.append(index)
                    bits.append(mask)
        return msgspec.structs.replace(step, masks=Masks(rows, b"".join(bits))) if rows else step

    def _take_in(self, step: Step, result: StepResult) -> dict[Peer, OutgoingTokens]:
        return outgoing_tokens_of(self.scheduler.update(step, result), self._tracing)

    @property
    def standing(self) -> LoadSnapshot:
        """The state after the last step, in short."""
        waiting_tokens, uncached_tokens = self.scheduler.num_tokens_ahead
        return LoadSnapshot(
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting + len(self.grammars),
            waiting_tokens=waiting_tokens,
            uncached_tokens=uncached_tokens,
            queued=self.scheduler.num_queued,
            blocks_used=self._pool.num_used,
            generation_tokens=self.scheduler.num_generated,
            steps=self.scheduler.num_steps,
        )

    def report(self, last_dispatch: int, bad_messages: int) -> InstanceReport:
        """The same in full."""
        standing = self.standing
        return InstanceReport(
            last_dispatch=last_dispatch,
            running=standing.running,
            waiting=standing.waiting,
            waiting_tokens=standing.waiting_tokens,
            blocks_used=standing.blocks_used,
            blocks_total=self._pool.num_blocks,
            counters=msgspec.structs.replace(self.scheduler.counters(), bad_messages=bad_messages),
            lockstep=None if isinstance(self.pace, Alone) else self._lockstep_counters(),
            uncached_tokens=standing.uncached_tokens,
            queued=standing.queued,
        )

    @property
    def capacity(self) -> Capacity:
        limits = self._config.scheduler
        return Capacity(
            block_size=self._config.cache.block_size,
            num_blocks=self._pool.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.token_budget(),
            max_num_queued_reqs=limits.max_num_queued_reqs,
            max_num_queued_tokens=limits.max_num_queued_tokens,
            at_once=self._at_once,
            caches_prefixes=self._pool.is_caching,
        )

    @property
    def num_block_changes(self) -> int:
        """Of the prefix cache so far: the number of the next one."""
        return self._blocks.next

    def block_events(self, number: int | None) -> BlockEvents | None:
        """What a router has to be told of the prefix cache that has all changes before ``number``."""
        return self._blocks.since(number, self._pool.known)

    def _lockstep_counters(self) -> LockstepCounters:
        counters = self._split.counters(self._executor.tokens_per_expert())
        times = self.pace.times
        return msgspec.structs.replace(
            counters,
            epoch=times.epoch,
            changes=times.changes,
            recoveries=times.recoveries,
            recovery_seconds=dict(times.seconds),
        )

    def _is_full(self, submit: Submit) -> bool:
        """Whether one more would wait for longer than the next step, and too many do already. Tokens are
        counted before a request is added: a long one finds room in an empty queue."""
        limits = self._config.scheduler
        most_tokens = limits.max_num_queued_tokens
        num_tokens = len(submit.prompt_ids) + len(submit.output_ids)
        queued = self.scheduler.num_queued_with(num_tokens) + self.grammars.num_under_way
        return queued > limits.max_num_queued_reqs or (
            most_tokens is not None and self.scheduler.num_waiting_tokens >= most_tokens
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
        if self._config.scheduler.scheduling_policy == "fcfs":
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
