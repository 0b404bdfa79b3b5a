"""A mesh in one process with a virtual clock: engine cores and a router's chooser.

Only the model is missing: a step takes the time of :class:`StepTime`, and its tokens mean nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from coordinator.messages import Load, Member, State, View
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.messages import Delta, InstanceReport, Recall, Recalled, RequestRefused, Submit, Tokens
from engine.model.checkpoint import ModelInfo
from engine.pieces.pool import NAME_BYTES
from engine.sampling import SamplingParams
from engine.step import Step, StepResult
from examples.benchmarks.routing.baselines import BASELINES, Baseline
from examples.benchmarks.routing.outcome import Outcome
from examples.benchmarks.routing.workloads import Arrival, Conversation
from router.dispatch.chooser import Chooser
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.policy import Policy
from router.dispatch.pool import Pool, PooledInstance
from router.dispatch.recalls import Recaller
from router.mesh import Prompt

DELAY = 0.0005
"""Seconds that a message takes."""
PEER = b"router"


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a step, linear in its tokens and the cached tokens read.

    ``base + per_token * tokens + per_context * tokens read from the KV cache``.
    """

    name: str
    base: float
    per_token: float
    per_context: float

    def on_shared(self, cores: float, slowdown: float) -> StepTime:
        """The same time on shared cores that are so many times slower."""
        name = f"{self.name}, {cores:g} cores for all, {slowdown:g}x"
        parts = (self.base, self.per_token, self.per_context)
        return StepTime(name, *(slowdown * part for part in parts))

    def of(self, step: Step) -> float:
        return self.base + self.per_token * step.num_tokens + self.per_context * sum(step.ends)


class Clocked:
    """An executor that computes nothing, and reports the time that a step would take."""

    in_flight = 1
    needs_tokens = False
    computes_apart = runs_ahead = False
    has_workers = False
    image_encoder = None

    def __init__(self, time: StepTime) -> None:
        self._time = time
        self._step = Step()
        self.seconds = 0.0
        self.computed = 0

    def begin(self, step: Step, sizes: object = ()) -> None:
        self.seconds = self._time.of(step)
        self.computed += step.num_tokens
        self._step = step

    def finish(self) -> StepResult:
        step = self._step
        return StepResult([None if row in step.partial else 7 for row in range(len(step.slots))])

    def expert_times(self) -> None:
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        return {}


class Machine(msgspec.Struct, frozen=True):
    """Resources of each instance."""

    time: StepTime
    num_blocks: int = 8192
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    cores: float | None = None
    """Cores that all instances' steps share; None: each instance computes on its own."""


class Cores:
    """Fewer cores than steps that run at once: each step gets the same share."""

    def __init__(self, count: float) -> None:
        self._count = count
        self._left: dict[str, float] = {}
        self._at = 0.0

    def begin(self, name: str, seconds: float, now: float) -> None:
        """Begin a step that takes so long on a core of its own."""
        self._pass(now)
        self._left[name] = seconds

    def end(self, name: str, now: float) -> None:
        self._pass(now)
        del self._left[name]

    def next_end(self) -> tuple[str, float] | None:
        """Name and end of the step that ends first, if none begins before."""
        if not self._left:
            return None
        name = min(self._left, key=lambda each: self._left[each])
        return name, self._at + max(0.0, self._left[name]) / self._speed()

    def _speed(self) -> float:
        return min(1.0, self._count / len(self._left))

    def _pass(self, now: float) -> None:
        if self._left:
            done = (now - self._at) * self._speed()
            self._left = {name: left - done for name, left in self._left.items()}
        self._at = now


@dataclass
class _Node:
    """An instance and its waiting messages."""

    core: EngineCore
    executor: Clocked
    inbox: list[Any] = field(default_factory=list)
    stepping: bool = False
    deltas: list[Delta] = field(default_factory=list)
    """Token deltas of the step under way."""
    has_blocks: int | None = None
    last_dispatch: int = 0


class Cluster:
    """Runs a load under one policy: one of :class:`router.dispatch.policy.Policy` or of the baselines."""

    def __init__(self, policy: str, num_instances: int, machine: Machine, *, moves: bool = True) -> None:
        info = ModelInfo(
            directory="", architecture="", model_type="", vocab_size=2**31, context_length=2**20,
            dtype="", eos_token_ids=(), num_experts=0,
        )  # fmt: skip
        config = EngineConfig(
            cache=CacheConfig(),
            scheduler=SchedulerConfig(
                max_num_seqs=machine.max_num_seqs,
                max_num_batched_tokens=machine.max_num_batched_tokens,
                max_num_queued_reqs=10**6,
            ),
        )
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pool = Pool()
        self._ledger = Ledger()
        self._baseline: Baseline | None = BASELINES[policy](num_instances) if policy in BASELINES else None
        self._chooser = Chooser(
            self._pool, self._ledger, Policy(policy) if self._baseline is None else Policy.ROUND_ROBIN
        )
        moving = moves and self._chooser.wants_blocks
        self._recaller = Recaller(self._pool, self._ledger) if moving else None
        self._nodes: dict[str, _Node] = {}
        for rank in range(num_instances):
            executor = Clocked(machine.time)
            core: Any = EngineCore
            self._nodes[f"i{rank}"] = _Node(
                core(
                    config,
                    info,
                    executor,
                    num_blocks=machine.num_blocks,
                    max_model_len=2**20,
                    place=ModelPlace(at_once=machine.cores),
                ),
                executor,
            )
        self._pool.apply(
            View(epoch=1, size=None, settings=None, members=_members(self._nodes), waiting_for=""), 0
        )
        for instance in self._pool:
            instance.attached, instance.capacity = True, self._nodes[instance.name].core.reports.capacity
        self._cores = Cores(machine.cores) if machine.cores is not None else None
        self._plan = 0
        """Number of the newest guess at which step on shared cores ends first."""
        self._outcomes: dict[Entry, Outcome] = {}
        self._then: dict[Entry, Callable[[], None]] = {}

    def run(self, load: Sequence[Arrival | Conversation]) -> list[Outcome]:
        """Run until all requests have ended."""
        for item in load:
            if isinstance(item, Conversation):
                self._begin_turn(item, 0, [], item.at)
            else:
                self._at(item.at, lambda item=item: self._arrive(item.prompt, item.output, item.session))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        assert not self._ledger, "requests are left"
        return list(self._outcomes.values())

    @property
    def computed_tokens(self) -> list[int]:
        """Tokens that each instance has computed: prompts and output."""
        return [node.executor.computed for node in self._nodes.values()]

    def check_clean(self) -> None:
        """Check after a run that instances hold only prefix caches that the index knows."""
        assert not self._ledger, "requests are left"
        for name, node in self._nodes.items():
            report = node.core.reports.report(0, 0)
            left = (report.running, report.waiting, report.waiting_tokens, report.uncached_tokens)
            assert left == (0, 0, 0, 0), f"{name}: {left}"
            if self._chooser.wants_blocks:
                known = node.core.reports.block_events(None)
                assert known is not None
                assert self._pool.index.num_blocks(name) == len(known.stored) // NAME_BYTES
                assert self._pool.index.num_expected(name) == 0

    # ---- clients

    def _begin_turn(self, talk: Conversation, turn: int, history: list[int], at: float) -> None:
        if turn == len(talk.turns):
            return
        words, output = talk.turns[turn]
        prompt = [*(history or talk.system), *words]

        def ended() -> None:
            self._begin_turn(talk, turn + 1, [*prompt, *[7] * output], self._now + talk.pause)

        self._at(at, lambda: self._arrive(prompt, output, talk.session, ended))

    def _arrive(
        self, prompt: list[int], output: int, session: str, then: Callable[[], None] = lambda: None
    ) -> None:
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        number = len(self._outcomes)
        entry = Entry(Prompt(f"r{number}", prompt, params, seed=number, session=session))
        self._outcomes[entry] = Outcome(self._now, prompt_tokens=len(prompt))
        self._then[entry] = then
        self._send(entry)

    # ---- the router

    def _send(self, entry: Entry) -> None:
        if self._baseline is None:
            instance = self._chooser.choose(entry, self._now)
        else:
            rank = self._baseline.choose(entry.prompt.prompt_ids, self._now)
            instance = next(each for each in self._pool if each.rank == rank)
        number = self._chooser.dispatch(entry, instance, self._now)
        self._outcomes[entry].rank = instance.rank
        self._deliver(instance.name, entry.submit(number))

    def _receive(self, name: str, message: Any) -> None:
        instance = self._pool.get(name)
        assert instance is not None
        match message:
            case Tokens(deltas, InstanceReport() as report, blocks):
                instance.take_report(report, self._now)
                if blocks is not None:
                    assert self._pool.index.apply(name, blocks)
                for delta in deltas:
                    self._take(instance, delta)
                if self._baseline is not None:
                    self._baseline.reported(instance.rank, report, self._now)
                if self._recaller is not None:
                    for other, numbers in self._recaller.recalls(self._now).items():
                        self._deliver(other, Recall(numbers))
            case Recalled(numbers):
                if self._recaller is not None:
                    self._recaller.answered(instance)
                for number in numbers:
                    entry = self._ledger.find(name, number)
                    if entry is not None:
                        entry.owed = True
                        self._outcomes[entry].moves += 1
                        self._chooser.settle(entry)
                        self._send(entry)
            case RequestRefused():
                raise AssertionError(message)

    def _take(self, instance: PooledInstance, delta: Delta) -> None:
        entry = self._ledger.find(instance.name, delta.request)
        assert entry is not None
        outcome = self._outcomes[entry]
        if not entry.has_begun:
            self._chooser.settle(entry)
            outcome.first_token = self._now
            outcome.cached_tokens = delta.num_cached_tokens
        self._ledger.book(entry, delta)
        if delta.finish_reason is not None:
            outcome.end = self._now
            if self._baseline is not None:
                self._baseline.finished(instance.rank)
            self._then.pop(entry)()

    # ---- the instances

    def _deliver(self, name: str, message: Any) -> None:
        def arrive() -> None:
            node = self._nodes[name]
            node.inbox.append(message)
            if not node.stepping:
                self._step(name, node)

        self._at(self._now + DELAY, arrive)

    def _step(self, name: str, node: _Node) -> None:
        for message in node.inbox:
            match message:
                case Submit():
                    node.last_dispatch = max(node.last_dispatch, message.request)
                    refused = node.core.submit(PEER, message)
                    assert refused is None, refused
                case Recall(numbers):
                    answer = Recalled(node.core.recall(PEER, numbers))
                    self._at(self._now + DELAY, lambda answer=answer: self._receive(name, answer))
        node.inbox.clear()
        if not node.core.has_work:
            self._report(name, node, [])
            return
        node.stepping = True
        node.deltas = list(node.core.step().get(PEER, []))
        if self._cores is None:
            self._at(self._now + node.executor.seconds, lambda: self._end_step(name, node))
        else:
            self._cores.begin(name, node.executor.seconds, self._now)
            self._plan_end(self._cores)

    def _plan_end(self, cores: Cores) -> None:
        found = cores.next_end()
        self._plan += 1
        if found is not None:
            name, when = found
            self._at(when, lambda plan=self._plan: self._end_shared(cores, name, plan))

    def _end_shared(self, cores: Cores, name: str, plan: int) -> None:
        if plan == self._plan:  # no step began or ended since
            cores.end(name, self._now)
            self._plan_end(cores)
            self._end_step(name, self._nodes[name])

    def _end_step(self, name: str, node: _Node) -> None:
        node.stepping = False
        deltas, node.deltas = node.deltas, []
        self._report(name, node, deltas)
        if node.inbox or node.core.has_work:
            self._step(name, node)

    def _report(self, name: str, node: _Node, deltas: list[Delta]) -> None:
        blocks = node.core.reports.block_events(node.has_blocks) if self._chooser.wants_blocks else None
        if blocks is not None:
            node.has_blocks = blocks.next
        message = Tokens(deltas, node.core.reports.report(node.last_dispatch, 0), blocks)
        self._at(self._now + DELAY, lambda: self._receive(name, message))

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))


def _members(names: Iterable[str]) -> list[Member]:
    return [
        Member(
            instance=name, rank=rank, state=State.READY, phase="", address="a", host="", pid=0, load=Load()
        )
        for rank, name in enumerate(names)
    ]
