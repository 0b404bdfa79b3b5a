"""The step of one instance: take requests in, schedule, execute, hand tokens out. No sockets."""

from __future__ import annotations

import time
from collections import defaultdict, deque

import msgspec

from engine.blocks import BlockPool
from engine.checkpoint import ModelInfo
from engine.config import EngineConfig
from engine.executor.base import Executor
from engine.messages import Delta, LockstepCounters, Refused, Report, Submit
from engine.pace import Alone, Pace
from engine.request import Request, from_submit
from engine.sampling import BadParameter
from engine.scheduler import Outcome, Scheduler, SchedulerRules
from engine.split import StepSplit
from engine.step import Step, StepResult

Peer = bytes


class EngineCore:
    """Requests of all routers, in one batch."""

    def __init__(
        self,
        config: EngineConfig,
        info: ModelInfo,
        executor: Executor,
        pace: Pace | None = None,
        *,
        num_blocks: int,
        max_model_len: int,
    ) -> None:
        self._config = config
        self._info = info
        self._executor = executor
        self._max_model_len = max_model_len
        self.pace: Pace = pace or Alone()
        self._split = StepSplit()
        self._pool = BlockPool(num_blocks, enable_prefix_caching=config.cache.enable_prefix_caching)
        self.scheduler = Scheduler(
            SchedulerRules(
                max_num_seqs=config.scheduler.max_num_seqs,
                max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
                block_size=config.cache.block_size,
                enable_chunked_prefill=config.scheduler.enable_chunked_prefill,
                long_prefill_token_threshold=config.scheduler.long_prefill_token_threshold,
                micro_batches=executor.in_flight,
                tells_tokens=executor.needs_tokens,
            ),
            self._pool,
        )
        self._arrivals = 0
        self._unfinished: Step | None = None
        """A step that was scheduled and did not run to its end, because the group broke or changed."""
        self._steps: deque[Step] = deque()
        """Under way in a pipeline, oldest first."""

    def __repr__(self) -> str:
        return f"<EngineCore {self.scheduler!r}>"

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self._unfinished is not None or bool(self._steps)

    def submit(self, peer: Peer, submit: Submit) -> Refused | None:
        """Queue a request of a router, or say why not."""
        if self._is_full() and not submit.output_ids:  # who is in the middle of an answer was let in before
            return Refused(submit.request, "the instance's queue is full", retry=True)
        problem = self._problem_with(submit)
        if problem is not None:
            return Refused(submit.request, problem, retry=False)
        if self.scheduler.knows((peer, submit.request)):
            return Refused(submit.request, "a request of this number is here already", retry=False)
        request = self._request_of(peer, submit)
        problem = self.scheduler.problem_with(request)
        if problem is not None:
            return Refused(submit.request, problem, retry=False)
        self.scheduler.add(request)
        return None

    def abort(self, peer: Peer, numbers: list[int]) -> None:
        """Forget some requests of a router; those not known are ignored."""
        for number in numbers:
            self.scheduler.abort((peer, number))

    def abort_all(self, peer: Peer) -> int:
        """Forget all requests of a router that is gone; returns how many."""
        numbers = [request.key[1] for request in self.scheduler.requests if request.key[0] == peer]
        self.abort(peer, numbers)
        return len(numbers)

    def step(self) -> dict[Peer, list[Delta]]:
        """Run one step, in lockstep once all agree on it; the new tokens by router. Empty if nothing runs.

        A step that does not come to its end is kept and runs the next time, before anything else is
        scheduled, also if its requests are aborted meanwhile: others may rely on the blocks that it fills.
        So nothing has to be taken back, and nothing was handed out.

        Raises:
            parallel.communicators.base.CollectiveError: in lockstep, a peer is lost.
            engine.executor.base.WorkerLost: a worker of this instance is.
        """
        if self._executor.in_flight > 1:
            return self._step_of_pipeline()
        step = self._unfinished or self.scheduler.schedule() or Step([], [])
        self._unfinished = step if step.rows else None
        agreement = self.pace.agree(
            step.num_tokens,
            queued_prefill=self.scheduler.num_waiting_tokens,
            longest=max((row.start + row.count for row in step.rows), default=0),
        )
        if not agreement.runs:
            self._split.slept(agreement)
            return {}
        began = time.perf_counter()
        result = self._executor.execute(step, agreement.sizes)
        self._unfinished = None
        times = self._executor.expert_times()
        if times is not None:
            self._split.stepped(agreement, step.num_tokens, time.perf_counter() - began, times)
        return self._take_in(step, result)

    def _step_of_pipeline(self) -> dict[Peer, list[Delta]]:
        """Fill the pipeline, then wait for the step that is furthest."""
        while len(self._steps) < self._executor.in_flight:
            step = self.scheduler.schedule()
            if step is None:
                break
            self._executor.begin(step)
            self._steps.append(step)
        if not self._steps:
            return {}
        result = self._executor.finish()
        return self._take_in(self._steps.popleft(), result)

    def _take_in(self, step: Step, result: StepResult) -> dict[Peer, list[Delta]]:
        deltas: dict[Peer, list[Delta]] = defaultdict(list)
        for outcome in self.scheduler.update(step, result):
            deltas[outcome.request.key[0]].append(_delta(outcome))
        return deltas

    def report(self, last_dispatch: int, bad_messages: int) -> Report:
        """The state after the last step."""
        return Report(
            last_dispatch=last_dispatch,
            running=self.scheduler.num_running,
            waiting=self.scheduler.num_waiting,
            waiting_tokens=self.scheduler.num_waiting_tokens,
            blocks_used=self._pool.num_used,
            blocks_total=self._pool.num_blocks,
            counters=msgspec.structs.replace(self.scheduler.counters(), bad_messages=bad_messages),
            lockstep=None if isinstance(self.pace, Alone) else self._lockstep_counters(),
        )

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

    def _is_full(self) -> bool:
        """Tokens are counted before a request is added: a long one finds room in an empty queue."""
        limits = self._config.scheduler
        most_tokens = limits.max_num_queued_tokens
        return self.scheduler.num_waiting >= limits.max_num_queued_reqs or (
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
        try:
            submit.params.check(vocab_size=vocab_size, max_logprobs=vocab_size)
        except BadParameter as error:
            return str(error)
        return None

    def _request_of(self, peer: Peer, submit: Submit) -> Request:
        self._arrivals += 1
        if self._config.scheduler.scheduling_policy == "fcfs":
            submit = msgspec.structs.replace(submit, priority=0)
        return from_submit(
            submit,
            peer,
            arrival=self._arrivals,
            eos_ids=self._info.eos_token_ids,
            max_model_len=self._max_model_len,
        )


def _delta(outcome: Outcome) -> Delta:
    request = outcome.request
    prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    return Delta(
        request=request.key[1],
        token_ids=[outcome.token_id],
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
        logprobs=[outcome.logprobs] if outcome.logprobs is not None else None,
        prompt_logprobs=prompt_logprobs,
        num_cached_tokens=request.num_cached,
    )
