"""Steps under way: agreed with the group, begun, finished in order, or run again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import msgspec

from engine.core.busy_clock import BusyClock
from engine.core.cache_sharing import CacheSharing
from engine.executor_contract import Executor
from engine.groups.step_profile import StepProfile
from engine.groups.stepping import Agreement, Alone, Stepping
from engine.messages import LockstepCounters
from engine.scheduling.output_processor import RowOutput
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_making import filled_by
from engine.step import Masks, Step


class StepPipeline:
    """Keeps up to ``in_flight`` steps of one executor under way."""

    def __init__(self, executor: Executor, scheduler: Scheduler, sharing: CacheSharing) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._sharing = sharing
        self.stepping: Stepping = Alone()
        self.stands_still = False
        """Whether nothing new may be scheduled: the mesh is paused."""
        self._profile = StepProfile()
        self._others_ran: deque[bool] = deque(maxlen=executor.in_flight)
        """Whether other instances had rows in each of the last ``in_flight`` steps."""
        self._only_instance = False
        """Whether no other instance in lockstep had rows or a queue last."""
        self._under_way: deque[tuple[Step, Agreement]] = deque()
        """Steps that have begun, oldest first."""
        self._unfinished: deque[Step] = deque()
        """Steps to run before others are scheduled: they did not begin, or did not end."""
        self._clock = BusyClock(by_thread=not (executor.has_workers or executor.computes_apart))
        self._finished_at = 0.0
        """Time of the newest result, or of the first step under way if later."""

    def __repr__(self) -> str:
        return f"<StepPipeline {len(self._under_way)} under way, {len(self._unfinished)} to run again>"

    def __len__(self) -> int:
        """Steps that have begun and are not finished."""
        return len(self._under_way)

    @property
    def has_work(self) -> bool:
        """Whether a step of this instance's requests is under way, or to run again.

        So it is where a spot check of the cache would be the only work. In lockstep it waits for others'.
        """
        is_due = isinstance(self.stepping, Alone) and self._sharing.wants_check and not self.stands_still
        return is_due or bool(self._unfinished) or any(step.slots for step, _ in self._under_way)

    @property
    def overlaps(self) -> bool:
        """Whether the step loop is free meanwhile: others compute, and no instance is waited for."""
        return self._executor.computes_apart and isinstance(self.stepping, Alone)

    def begin(self, meanwhile: Callable[[], None]) -> bool:
        """Begin steps until enough are under way, or nothing more can run now.

        In lockstep some are without any rows of this instance. Returns whether no further step follows.
        """
        while len(self._under_way) < self._executor.in_flight:
            if self._under_way and self._sharing.is_checking:
                return False  # nothing may be ahead of the step whose results are compared
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

    def finish_oldest(self) -> list[RowOutput]:
        """Wait for the oldest step under way, and take in its results."""
        result = self._executor.finish()
        began, self._finished_at = self._finished_at, time.perf_counter()
        step, agreement = self._under_way.popleft()
        times = self._executor.expert_times()
        own = 0.0 if times is None else times.attention
        self._scheduler.timed(step, self._finished_at - began, max(agreement.sizes, default=0), own)
        exchange = self._sharing.exchange
        if exchange is not None:
            if len(step.slots) < step.num_tokens:
                exchange.sources.computed(step.num_tokens, self._finished_at - began)
            if not self._under_way:
                self._sharing.check(filled_by(step))
        if times is not None and agreement.sizes:
            self._profile.stepped(agreement, step.num_tokens, self._finished_at - began, times)
        outputs = self._scheduler.update(step, result)
        if self._scheduler.prices_step():
            busy = self._clock.step(self._finished_at - began, is_alone=isinstance(self.stepping, Alone))
            others = max(0, sum(agreement.sizes) - step.num_tokens)
            self._scheduler.priced(step, busy, result.proposal_seconds, others)
        return outputs

    def restart(self) -> None:
        """Run the steps under way again: a broken group cut them short."""
        self._under_way.clear()
        self._only_instance = False
        self._unfinished = deque(map(self._masked, self._scheduler.restart()))

    def lockstep_counters(self) -> LockstepCounters | None:
        """Totals of steps in lockstep and of group changes; None: the instance steps alone."""
        if isinstance(self.stepping, Alone):
            return None
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

    def _agree(self, step: Step) -> Agreement:
        if isinstance(self.stepping, Alone):
            return Agreement(runs=bool(step.slots))  # nobody wants to know the rest
        agreement = self.stepping.agree(
            step.num_tokens,
            queued_prefill=self._scheduler.queues.num_waiting_tokens,
            longest=max(step.ends, default=0),
            in_flight=sum(bool(begun.slots) for begun, _ in self._under_way),
        )
        self._others_ran.append(sum(agreement.sizes) > step.num_tokens)
        self._scheduler.budget.others_run = any(self._others_ran)
        self._only_instance = agreement.is_only_one
        return agreement

    def _schedule(self) -> Step | None:
        if self.stands_still:
            return None
        self._scheduler.budget.only_instance = self._only_instance or isinstance(self.stepping, Alone)
        self._sharing.begin_check()
        step = self._scheduler.schedule()
        if step is None:
            return None
        now = time.perf_counter()
        for admit in step.admits:
            request = self._scheduler.queues.holder(admit.slot)
            assert request is not None, "it was admitted just now"
            request.admitted_at = request.admitted_at or now
            if request.num_fetched and self._sharing.checks is not None:
                self._sharing.checks.admitted(request)
        return self._masked(step)

    def _masked(self, step: Step) -> Step:
        """The step, with masks for the rows that follow a grammar."""
        if not self._scheduler.queues.has_grammars:
            return step
        rows, bits = [], []
        for index, slot in enumerate(step.slots):
            request = self._scheduler.queues.holder(slot)  # nobody: aborted, and the answer will be dropped
            if request is not None and request.grammar is not None and index not in step.partial:
                if index in step.drafts:
                    found = request.grammar.draft_masks
                else:
                    mask = request.grammar.mask(request.num_output)
                    found = [] if mask is None else [mask]
                rows += [index] * len(found)
                bits += found
        return msgspec.structs.replace(step, masks=Masks(rows, b"".join(bits))) if rows else step
