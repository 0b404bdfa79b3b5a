"""A simulated process around a real :class:`engine.core.EngineCore`.

Its step loop is :meth:`engine.serving.server.Server.run`'s, its workers compute no model: steps are under way, as many
as a pipeline has, when a member dies, when all enter another group, and when a request gives way to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from coordinator.messages import Evidence, GroupPlan, State
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.groups.recovery_times import RecoveryTimes
from engine.groups.stepping import Agreement
from engine.messages import Abort, RequestRefused, Submit
from engine.model.checkpoint import ModelInfo
from engine.step import Step, StepResult
from parallel.communicators.base import CollectiveError
from parallel.links.counts import LinkCount
from parallel.lockstep import RunStep, Sleep, StepHeader, Switch, is_only_one
from tests.engine.simulated_executor import VOCAB, SimulatedExecutor, next_token
from tests.simulator.elastic.checker import Rule
from tests.simulator.elastic.fiber import Fiber
from tests.simulator.elastic.group import Group
from tests.simulator.elastic.instance import Instance, Phase

if TYPE_CHECKING:
    from tests.simulator.elastic.streams import StreamWorld

ROUTER = b"router"
BLOCK_SIZE = 4
BUDGET, MAX_ROWS = 12, 3
"""Tokens and rows of a step: some requests wait, and long prompts take several steps."""
MAX_MODEL_LEN = 48
CONFIG = EngineConfig(
    cache=CacheConfig(block_size=BLOCK_SIZE),
    scheduler=SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=MAX_ROWS),
)
INFO = ModelInfo(
    directory="", architecture="", model_type="", vocab_size=VOCAB, context_length=MAX_MODEL_LEN,
    dtype="float32", eos_token_ids=(VOCAB - 1,), num_experts=0,
)  # fmt: skip


def drawn_token(token_ids: list[int], seed: int) -> int:
    """The token that follows these in a stream: a function of context and seed alone."""
    return (next_token(token_ids) + seed) % VOCAB


class Workers(SimulatedExecutor):
    """Workers of one instance, whose results depend on others of the group."""

    def __init__(self, instance: ServingInstance, in_flight: int) -> None:
        super().__init__(
            block_size=BLOCK_SIZE, budget=BUDGET, max_rows=MAX_ROWS, in_flight=in_flight,
            checks_reads=False, computes_apart=in_flight > 1, runs_ahead=instance.world.runs_ahead,
        )  # fmt: skip
        self._instance = instance
        self._seeds: dict[int, int] = {}

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        """Computed at once, answered when the others have taken part."""
        assert len(self._results) < self.in_flight
        self._seeds |= {admit.slot: admit.seed for admit in step.admits}
        self._results.append(self._compute(step) if step.slots else StepResult([]))

    def finish(self) -> StepResult:
        if not self._results:
            self._instance.world.checker.broken(Rule.BEGUN, repr(self._instance))
        self._instance.compute()
        return super().finish()

    def _sample(self, slot: int, start: int, count: int, sample: bool) -> int | None:
        if super()._sample(slot, start, count, sample) is None:
            return None
        ids = self._tokens[slot]
        ids[-1] = (ids[-1] + self._seeds[slot]) % VOCAB
        return ids[-1]


class Agreeing:
    """The :class:`engine.groups.stepping.Stepping` of a simulated instance, as far as a core asks it."""

    def __init__(self, instance: ServingInstance) -> None:
        self._instance = instance
        self.times = RecoveryTimes()

    def link_totals(self) -> dict[int, LinkCount]:
        return {}

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        return self._instance.agree(num_tokens, queued_prefill, longest, in_flight)


class ServingInstance(Instance):
    """A process whose requests, blocks and steps are real."""

    world: StreamWorld
    core_class: type[EngineCore] = EngineCore

    def __init__(self, world: StreamWorld, number: int, rank: int | None) -> None:
        super().__init__(world, number, rank)
        self.workers = Workers(self, world.in_flight)
        stepping: Any = Agreeing(self)
        executor: Any = self.workers
        self.core = world.core_class(
            CONFIG, INFO, executor, num_blocks=world.num_blocks, max_model_len=MAX_MODEL_LEN
        )
        self.core.stepping = stepping
        self.inbox: deque[Submit | Abort] = deque()
        """Messages of the router."""
        self._is_fenced = False
        self.fiber = Fiber(self._steps)
        self._is_stepping = False

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} {self.core!r} {len(self.inbox)} unread>"

    @property
    def num_requests(self) -> int:
        return len(list(self.core.scheduler.queues.requests))

    @property
    def is_busy(self) -> bool:
        return not self.core.is_empty

    # ---- between two steps

    def receive(self, message: Submit | Abort) -> None:
        """A message of the router has come; it is read between two steps."""
        self.inbox.append(message)
        self.world.step_after(self, 0, self._poke)

    def loop(self) -> None:
        if self.alive:
            self._take_in()
        super().loop()

    def _take_in(self) -> None:
        if self._is_fenced:
            self._is_fenced = False
            self.core.abort_all(ROUTER)
        while self.inbox:
            match self.inbox.popleft():
                case Submit() as submit if self.draining or self.member_state.state is not State.READY:
                    self.world.to_router(self, RequestRefused(submit.request, "it leaves", retry=True))
                case Submit() as submit:
                    refused = self.core.submit(ROUTER, submit)
                    assert refused is None, refused
                case Abort(numbers):
                    self.core.abort(ROUTER, numbers)

    def _drop_requests(self) -> None:
        self._is_fenced = True

    def _enter(self, form: GroupPlan) -> None:
        under_way = self.core.scheduler.num_in_flight
        self.world.checker.counts["groups entered with steps under way"] += under_way > 0
        super()._enter(form)
        self.workers.forget()
        self.core.run_again()

    # ---- a step

    def _begin_step(self) -> None:
        assert self.lockstep is not None
        lockstep = self.lockstep
        if self.core.has_work or self.recovery.switch_pending:
            wake = lockstep.wake()
            if wake is not None:
                self._send_wake(lockstep, wake)
        if not lockstep.awake:
            self.phase = Phase.ASLEEP
            return
        self._is_stepping = True
        self._go_on_inside(None)

    def _go_on_inside(self, given: object) -> None:
        self.fiber.go_on(given)
        if not self._is_stepping and not isinstance(given, CollectiveError):
            self.loop()

    def _steps(self) -> None:
        """In the fiber: steps, as :meth:`engine.serving.server.Server._step` has them."""
        while True:
            try:
                outgoing = self.core.step()
            except CollectiveError:
                self.workers.forget()
            except (AssertionError, KeyError) as error:
                self.world.checker.error(f"{self.name}: {error!r}")
            else:
                for tokens in outgoing.values():
                    self.world.to_router(self, tokens)
            self._is_stepping = False
            self.fiber.wait()

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int) -> Agreement:
        """In the fiber: settle the next step with the others.

        Raises:
            CollectiveError: one of them is lost.
        """
        assert self.lockstep is not None
        assert self.group is not None
        if not self.group.is_open_at(self):  # aborted since the step before, of the same turn of the loop
            raise CollectiveError("the group is aborted")
        header = self.lockstep.header(
            num_tokens,
            queued_prefill=queued_prefill,
            longest=longest,
            ready_epoch=self.recovery.ready_epoch,
            in_flight=in_flight,
        )
        self.world.checker.counts["headers with steps under way"] += in_flight > 0
        self.world.note(self.name, header)
        self.world.checker.header_sent(self, header)
        self.phase = Phase.HEADERS
        self.group.call(self, header)
        headers: list[StepHeader] = self.fiber.wait()
        decision = self.lockstep.advance(headers)
        self.world.note(self.name, decision)
        self.world.checker.decided(self, decision)
        if not isinstance(decision, RunStep) and self.core.scheduler.num_in_flight:
            self.world.provoke("end of steps under way", self)
        match decision:
            case RunStep(sizes):
                if any(sizes) and self._windows is not None:
                    self._count(sum(sizes), self._windows)
                if not any(sizes):
                    self._pause()
                return Agreement(any(sizes), sizes, is_only_one=is_only_one(headers, self.lockstep.rank))
            case Sleep():
                return Agreement(runs=False, pauses=True)
            case Switch(epoch):
                self.world.provoke("switch", self)
                self._carry_out(self.recovery.switched(epoch))
                if self.recovery.broken:
                    self.world.checker.interrupted(self, f"cannot follow the others into epoch {epoch}")
                return Agreement(runs=False, switches_to=epoch, pauses=True)

    def _pause(self) -> None:
        """In the fiber: wait a moment, as nobody has tokens."""
        self.phase = Phase.COMPUTING
        self.world.step_after(self, 1, self._go_on_inside, None)
        self.fiber.wait()

    def compute(self) -> None:
        """In the fiber: compute the oldest step under way, and its experts with the others."""
        self.phase = Phase.COMPUTING
        delay = 1 + self.world.up_to(self.world.settings.compute)
        self.world.step_after(self, delay, self._computed, self.group)
        self.fiber.wait()

    def _go_on(self, group: Group, rows: list[StepHeader | None]) -> None:
        if group is self.group and self.phase in (Phase.HEADERS, Phase.EXPERTS):
            self._go_on_inside(rows)

    def _interrupted(self, group: Group, suspects: list[str], evidence: Evidence) -> None:
        if group is self.group and self.phase in (Phase.HEADERS, Phase.EXPERTS):
            under_way = self.core.scheduler.num_in_flight
            self.world.checker.counts["interrupted with steps under way"] += under_way > 0
            self.world.checker.counts["interrupted with several steps under way"] += under_way > 1
            self._go_on_inside(CollectiveError("a member is lost"))
        super()._interrupted(group, suspects, evidence)
