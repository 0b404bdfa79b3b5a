"""Requests that an instance refuses, and steps that are cut short, without a model."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.messages import PauseMode
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.groups.recovery_times import RecoveryTimes
from engine.groups.stepping import Agreement
from engine.messages import BATCH_PRIORITY, Capacity, Counters, FinishReason, Submit
from engine.model.checkpoint import ModelInfo
from engine.sampling import SamplingParams
from engine.scheduling.lines_share import LinesShare
from engine.scheduling.scheduler import Scheduler
from engine.step import Step, StepResult
from parallel.communicators.base import CollectiveError
from parallel.links.counts import LinkCount
from parallel.lockstep import StepHeader, is_only_one
from tests.engine.oracle import Oracle
from tests.engine.simulated_executor import VOCAB, SimulatedExecutor, expected_output
from tests.nightly import examples
from tests.waiting import until

INFO = ModelInfo(
    directory="", architecture="", model_type="", vocab_size=VOCAB, context_length=64, dtype="float32",
    eos_token_ids=(VOCAB - 1,), num_experts=0,
)  # fmt: skip
PEER = b"router"


@pytest.fixture
def core() -> EngineCore:
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, max_num_queued_reqs=3),
    )
    executor = SimulatedExecutor(block_size=4, budget=32, max_rows=4)
    return EngineCore(config, INFO, executor, num_blocks=10, max_model_len=64)  # type: ignore[arg-type]


def submit(number: int = 1, **fields: object) -> Submit:
    made = Submit(
        request=number,
        request_id="r",
        prompt_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=4, ignore_eos=True),
        seed=0,
    )
    return msgspec.structs.replace(made, **fields)


@pytest.mark.parametrize("caches", [True, False])
def test_what_it_can_hold_and_keeps_is_told(caches: bool) -> None:
    config = EngineConfig(cache=CacheConfig(block_size=4, enable_prefix_caching=caches))
    executor = SimulatedExecutor(block_size=4, budget=512, max_rows=128)
    core = EngineCore(config, INFO, executor, num_blocks=10, max_model_len=64)  # type: ignore[arg-type]
    assert core.reports.capacity == Capacity(4, 10, 128, 512, 4096, caches_prefixes=caches)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_ids": []}, "the prompt is empty"),
        ({"prompt_ids": [1] * 64}, "the prompt has 64 tokens; the context length is 64"),
        ({"prompt_ids": [1] * 60, "output_ids": [1] * 4}, "fill the context length of 64 already"),
        ({"prompt_ids": [VOCAB]}, "a token id is outside the vocabulary of 50"),
        ({"prompt_ids": [-1]}, "a token id is outside the vocabulary of 50"),
        ({"output_ids": [VOCAB]}, "a token id is outside the vocabulary of 50"),
        ({"output_ids": [1] * 4}, "the request was complete already"),
        ({"prompt_ids": [1] * 41}, "but the KV cache holds only 40"),
        ({"params": SamplingParams(temperature=float("nan"))}, "temperature must be a finite number"),
        ({"params": SamplingParams(stop_token_ids=(99,))}, "stop_token_ids names token 99"),
    ],
)
def test_what_cannot_be_served_is_refused_for_good(
    core: EngineCore, fields: dict[str, object], reason: str
) -> None:
    refused = core.submit(PEER, submit(**fields))
    assert refused is not None
    assert reason in refused.reason
    assert not refused.retry
    assert not core.has_work


def test_a_number_is_used_once_at_a_time(core: EngineCore) -> None:
    assert core.submit(PEER, submit()) is None
    again = core.submit(PEER, submit())
    assert again is not None
    assert "is here already" in again.reason
    assert core.submit(b"another router", submit()) is None


def test_a_queue_may_be_full_of_tokens() -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4, max_num_queued_tokens=10),
    )
    executor = SimulatedExecutor(block_size=4, budget=32, max_rows=4)
    core = EngineCore(config, INFO, executor, num_blocks=10, max_model_len=64)  # type: ignore[arg-type]
    assert core.submit(PEER, submit(1, prompt_ids=[1] * 30)) is None, (
        "a long one finds room in an empty queue"
    )
    refused = core.submit(PEER, submit(2))
    assert refused is not None
    assert refused.retry
    while core.has_work:
        core.step()
    assert core.submit(PEER, submit(3)) is None


def test_a_full_queue_sends_elsewhere(core: EngineCore) -> None:
    for number in range(4 + 3):
        assert core.submit(PEER, submit(number)) is None, "four find room in the next step, three may wait"
    refused = core.submit(PEER, submit(9))
    assert refused is not None
    assert refused.retry
    assert core.reports.report(9, 0).queued == 3
    assert core.submit(PEER, submit(10, owed=True)) is None, "who was let in elsewhere is let in here"
    assert core.submit(PEER, submit(11, output_ids=[7])) is None, "its client is in the middle of the answer"


def test_grammars_under_way_fill_the_queue_though_nobody_waits_for_them(core: EngineCore) -> None:
    go_on, params = threading.Event(), SamplingParams(max_tokens=4, grammar="{}")
    core.grammars._thread.submit(lambda: go_on.wait(60))
    for number in range(3 + 1):
        assert core.submit(PEER, submit(number, params=params)) is None
        core.abort(PEER, [number])
    assert core.is_empty
    refused = core.submit(PEER, submit(9))
    assert refused is not None
    assert refused.retry
    go_on.set()

    def has_room() -> bool:
        assert core.take_ready() == [], "all were forgotten"
        return core.submit(PEER, submit(9)) is None

    until(has_room)


def test_what_has_not_begun_can_be_asked_back(core: EngineCore) -> None:
    for number in range(6):
        core.submit(PEER, submit(number))
    core.step()
    assert core.recall(PEER, [0, 4, 5, 99]) == [4, 5]
    while core.has_work:
        core.step()
    assert core.reports.report(6, 0).counters.generation_tokens == 4 * 4


def test_tokens_come_out_by_router_and_nothing_stays(core: EngineCore) -> None:
    core.submit(PEER, submit(1))
    core.submit(b"b", submit(1, prompt_ids=[4, 5]))
    core.submit(b"gone", submit(7))
    assert core.abort_all(b"gone") == 1
    core.abort(PEER, [99])
    outputs: dict[bytes, list[int]] = {PEER: [], b"b": []}
    while core.has_work:
        for peer, outgoing in core.step().items():
            for last in outgoing:
                outputs[peer] += last.token_ids
    assert last.finish_reason is FinishReason.LENGTH
    assert outputs == {PEER: expected_output([1, 2, 3], 4), b"b": expected_output([4, 5], 4)}
    report = core.reports.report(last_dispatch=1, bad_messages=2)
    assert (report.running, report.waiting, report.blocks_used, report.counters.bad_messages) == (0, 0, 0, 2)
    assert core.step() == {}


@pytest.mark.parametrize("output_ids", [[], [7]])
def test_the_first_delta_of_a_try_is_never_a_single_token(core: EngineCore, output_ids: list[int]) -> None:
    """Routers pass single tokens on without a look at their try."""
    core.submit(PEER, submit(1, output_ids=output_ids))
    steps = []
    while core.has_work:
        for outgoing in core.step().values():
            steps.append((len(outgoing.singles), [delta.times is not None for delta in outgoing.deltas]))
    assert steps == [(0, [True]), *[(2, [])] * (2 - len(output_ids)), (0, [False])]


class Troubled:
    """Stepping and executor of which either may find the group broken at any step."""

    must_step = False
    image_encoder = None

    def __init__(self, rng: random.Random, executor: SimulatedExecutor) -> None:
        self._rng = rng
        self.in_flight, self.needs_tokens = executor.in_flight, executor.needs_tokens
        self.computes_apart, self.has_workers = executor.computes_apart, executor.has_workers
        self.runs_ahead = executor.runs_ahead
        self._executor = executor
        self.failures = 0
        self.times = RecoveryTimes()

    def link_totals(self) -> dict[int, LinkCount]:
        return {}

    def fail(self, share: float) -> None:
        if self._rng.random() < share:
            self.failures += 1
            self._executor.forget()
            raise CollectiveError("a peer is lost")

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        self.fail(0.2)
        runs = num_tokens > 0 and self._rng.random() < 0.9  # else: an epoch begins
        return Agreement(runs, pauses=num_tokens > 0 and not runs)

    def begin(self, step: Step, sizes: object = ()) -> None:
        self.fail(0.1)
        self._executor.begin(step)

    def finish(self) -> StepResult:
        self.fail(0.1)  # also in the last layer, when all is written
        return self._executor.finish()

    def expert_times(self) -> None:
        return None

    def tokens_per_expert(self) -> dict[int, int]:
        return {}


class Beside:
    """Stepping in lockstep with another instance, which always has so many rows."""

    must_step = False

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self.times = RecoveryTimes()

    def link_totals(self) -> dict[int, LinkCount]:
        return {}

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        return Agreement(runs=True, sizes=(num_tokens, self._rows))


@pytest.mark.parametrize(("rows", "sizes"), [(0, [512, 488]), (3, [512, 128, 128, 128, 104])])
def test_no_step_of_a_lockstep_on_cpus_is_long_while_somebody_decodes(rows: int, sizes: list[int]) -> None:
    """In the first step it is not known yet what the others have."""
    executor = SimulatedExecutor(block_size=16, budget=512, max_rows=128)
    executor.expert_times = lambda: None  # type: ignore[attr-defined]
    info = msgspec.structs.replace(INFO, context_length=2048)
    core = EngineCore(EngineConfig(), info, executor, num_blocks=80, max_model_len=2048)  # type: ignore[arg-type]
    core.stepping = Beside(rows)  # type: ignore[assignment]
    core.submit(PEER, submit(prompt_ids=[number % VOCAB for number in range(1000)]))
    before, found = 0, []
    while not core.step().get(PEER):
        found.append(core.scheduler.counters().scheduled_tokens - before)
        before += found[-1]
    assert [*found, core.scheduler.counters().scheduled_tokens - before] == sizes


@pytest.mark.parametrize(("rows", "tokens"), [(1, LinesShare.LEAST), (64, LinesShare.FIRST)])
def test_lines_are_not_shortened_by_waiting_for_others(
    rows: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinesShare, "SECONDS", 0.0)  # all steps are long
    executor = SimulatedExecutor(block_size=16, budget=512, max_rows=128)
    executor.expert_times = lambda: None  # type: ignore[attr-defined]
    info = msgspec.structs.replace(INFO, context_length=2048)
    core = EngineCore(EngineConfig(), info, executor, num_blocks=80, max_model_len=2048)  # type: ignore[arg-type]
    core.stepping = Beside(rows)  # type: ignore[assignment]
    core.scheduler.budget.lines.others_run()
    core.submit(PEER, submit(prompt_ids=[1] * 1000, priority=BATCH_PRIORITY))
    for _ in range(20):
        core.step()
    assert core.scheduler.budget.lines.tokens == tokens


class BesideOthers(Beside):
    """Stepping in lockstep with another instance, by the headers of each step."""

    def __init__(self, others: list[StepHeader]) -> None:
        super().__init__(0)
        self._others = iter(others)

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        headers = [StepHeader(1, 0, num_tokens, queued_prefill, longest, 1, in_flight), next(self._others)]
        sizes = tuple(each.num_tokens for each in headers)
        return Agreement(runs=True, sizes=sizes, is_only_one=is_only_one(headers, 0))


def chunks_of(length: int, stepping: Beside | None, **scheduler: Any) -> list[int]:
    """Tokens of each step of the only request here; each takes 0.1 ms."""
    executor = SimulatedExecutor(block_size=16, budget=2048, max_rows=128)
    executor.expert_times = lambda: None  # type: ignore[attr-defined]
    config = EngineConfig(scheduler=SchedulerConfig(**scheduler))
    core = EngineCore(
        config,
        msgspec.structs.replace(INFO, context_length=16384),
        executor,  # type: ignore[arg-type]
        num_blocks=1000,
        max_model_len=16384,
        place=ModelPlace(is_native=True),
    )
    if stepping is not None:
        core.stepping = stepping  # type: ignore[assignment]
    core.scheduler.timed = lambda step, *_: Scheduler.timed(core.scheduler, step, step.num_tokens * 1e-4)  # type: ignore[method-assign]
    core.submit(PEER, submit(prompt_ids=[number % VOCAB for number in range(length)]))
    found: list[int] = []
    while not core.step().get(PEER):
        found.append(core.scheduler.counters().scheduled_tokens - sum(found))
    return [*found, core.scheduler.counters().scheduled_tokens - sum(found)]


def test_a_prompt_that_is_alone_has_larger_chunks() -> None:
    assert chunks_of(8000, None) == [512, 1024, 2016, 2016, 2016, 416]
    assert chunks_of(2000, None, max_num_batched_tokens=512) == [512, 512, 512, 464], "somebody chose it"


def test_in_lockstep_a_chunk_is_larger_once_nobody_else_has_anything() -> None:
    idle, queues, runs = StepHeader(1, 0, 0), StepHeader(1, 0, 0, queued_prefill=9), StepHeader(1, 0, 1)
    piped = StepHeader(1, 0, 0, in_flight=1)
    assert chunks_of(4000, BesideOthers([idle] * 9)) == [512, 1024, 2016, 448]
    for other in (queues, piped):
        assert chunks_of(3000, BesideOthers([idle, other, idle, idle, idle])) == [512, 1024, 512, 952]
    assert chunks_of(3000, BesideOthers([idle, runs] + [idle] * 9)) == [512, 1024, 128, 1336]


class LosesThird(Troubled):
    """A pause with three steps under way, the last of which is lost."""

    finished = 0

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        runs = bool(num_tokens) and (in_flight < 2 or not self.finished)
        return Agreement(runs, pauses=not runs)

    def begin(self, step: Step, sizes: object = ()) -> None:
        self._executor.begin(step)

    def finish(self) -> StepResult:
        self.finished += 1
        self.fail(float(self.finished == 3))
        return self._executor.finish()


@pytest.mark.parametrize("length", [1, 4])
def test_nothing_is_kept_for_a_router_that_is_gone(length: int) -> None:
    """Tokens of a step that ended wait for the group.

    With a single token the request has ended, too.
    """
    executor = SimulatedExecutor(block_size=4, budget=32, max_rows=4, in_flight=3)
    trouble = LosesThird(random.Random(0), executor)
    config = EngineConfig(
        cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=4)
    )
    core = EngineCore(config, INFO, trouble, num_blocks=14, max_model_len=64)  # type: ignore[arg-type]
    core.stepping = trouble  # type: ignore[assignment]
    for number in range(3):
        core.submit(PEER, submit(number, params=SamplingParams(max_tokens=length, ignore_eos=True)))
    assert list(core.step()) == [PEER]
    with pytest.raises(CollectiveError):
        core.step()
    core.abort_all(PEER)
    while core.has_work:
        assert core.step() == {}, "what others may rely on is computed, and handed to nobody"


@pytest.mark.parametrize("right", [None, 0.8])
@pytest.mark.parametrize("depth", [1, 3])
@given(seed=st.integers(0, 10**6))
@settings(max_examples=examples(150), deadline=None)
def test_steps_that_a_broken_group_cuts_short_change_nothing(
    depth: int, right: float | None, seed: int
) -> None:
    """Whatever fails, arrives and is aborted meanwhile: the tokens are those of an undisturbed run.

    With a pipeline several steps are cut short at once, of which some may have run.
    """
    run_in_trouble(depth, right, seed)


@pytest.mark.parametrize("depth", [1, 3])
def test_some_of_the_steps_that_are_cut_short_have_drafts(depth: int) -> None:
    assert sum(run_in_trouble(depth, 0.8, seed).drafts for seed in range(5)) > 0


def run_in_trouble(depth: int, right: float | None, seed: int) -> Counters:
    """Requests that come and go in steps that fail.

    ``right``: of what is drafted, None: nothing is.
    """
    rng = random.Random(seed)
    executor = SimulatedExecutor(
        block_size=4, budget=16, max_rows=4, in_flight=depth, checks_reads=depth == 1
    )
    troubled = Troubled(rng, executor)
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4),
    )
    guesses = None if right is None else Oracle(expected_output, right, seed=seed)
    core = EngineCore(
        config,
        INFO,
        troubled,  # type: ignore[arg-type]
        num_blocks=14,
        max_model_len=64,
        speculation=guesses,  # type: ignore[arg-type]
    )
    core.stepping = troubled
    common = [rng.randrange(VOCAB - 1) for _ in range(16)]  # so that blocks are shared
    wanted: dict[int, list[int]] = {}
    outputs: dict[int, list[int]] = {}
    left = 12
    while left or core.has_work:
        if left and rng.random() < 0.4:
            left -= 1
            prompt = common[: rng.randrange(17)] + [
                rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 9))
            ]
            length = rng.randrange(1, 12)
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            assert core.submit(PEER, submit(left, prompt_ids=prompt, params=params)) is None
            wanted[left], outputs[left] = expected_output(prompt, length), []
        if outputs and rng.random() < 0.1:
            aborted = rng.choice(list(outputs))
            core.abort(PEER, [aborted])
            del outputs[aborted]
        with contextlib.suppress(CollectiveError):
            for delta in core.step().get(PEER, []):
                outputs[delta.request] += delta.token_ids
    assert outputs == {number: wanted[number] for number in outputs}
    assert core.reports.report(0, 0).blocks_used == 0
    assert troubled.failures
    return core.scheduler.counters()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_background_requests_go_after_all_others(policy: Literal["fcfs", "priority"]) -> None:
    config = EngineConfig(
        cache=CacheConfig(block_size=4),
        scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=1, scheduling_policy=policy),
    )
    executor = SimulatedExecutor(block_size=4, budget=32, max_rows=1)
    core = EngineCore(config, INFO, executor, num_blocks=10, max_model_len=64)  # type: ignore[arg-type]
    core.submit(PEER, submit(1, background=True))
    core.submit(PEER, submit(2, priority=2**63 - 1))
    core.submit(PEER, submit(3))
    ended: list[int] = []
    while core.has_work:
        for delta in core.step().get(PEER, ()):
            ended += [delta.request] * (delta.finish_reason is not None)
    assert sorted(ended) == [1, 2, 3]
    assert ended[-1] == 1


def run_dry(core: EngineCore) -> list[int]:
    """Numbers of the requests that get tokens until there is no work."""
    numbers = []
    for _ in range(50):
        if core.has_work:
            numbers += [delta.request for tokens in core.step().values() for delta in tokens]
    assert not core.has_work
    return numbers


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.ABORT])
def test_requests_stand_still_in_a_pause_and_go_on_afterwards(core: EngineCore, mode: PauseMode) -> None:
    core.submit(PEER, submit(1))
    core.step()
    core.set_pause(mode)
    assert core.submit(PEER, submit(2)) is None
    assert not core.has_work
    assert core.is_pause_in_effect
    assert not core.is_empty
    core.set_pause(None)
    numbers = run_dry(core)
    assert (numbers.count(1), numbers.count(2)) == (3, 4)
    assert core.is_empty


def test_requests_end_in_a_pause_that_waits_and_new_ones_are_held_back(core: EngineCore) -> None:
    core.submit(PEER, submit(1))
    core.set_pause(PauseMode.WAIT)
    core.submit(PEER, submit(2))
    core.submit(PEER, submit(3, output_ids=[5, 6]))  # of an instance that died
    assert not core.is_pause_in_effect
    numbers = run_dry(core)
    assert (numbers.count(1), numbers.count(2), numbers.count(3)) == (4, 0, 2)
    assert core.is_pause_in_effect
    assert core.requests_of(PEER) == [2]
    assert not core.is_empty
    refused = core.submit(PEER, submit(2))
    assert refused is not None
    assert "already" in refused.reason
    core.set_pause(None)
    assert run_dry(core).count(2) == 4


def test_held_requests_are_forgotten_recalled_and_counted(core: EngineCore) -> None:
    core.set_pause(PauseMode.WAIT)
    for number in range(1, 5):
        assert core.submit(PEER, submit(number)) is None
    refused = core.submit(PEER, submit(5))
    assert refused is not None
    assert refused.retry
    assert core.recall(PEER, [1, 9]) == [1]
    core.abort(PEER, [2])
    assert core.abort_all(PEER) == 2
    assert core.is_empty
    core.set_pause(None)
    assert not core.has_work


def test_a_step_that_was_cut_short_runs_again_in_a_pause() -> None:
    core = EngineCore(
        EngineConfig(cache=CacheConfig(block_size=4), scheduler=SchedulerConfig(max_num_seqs=4)),
        INFO, Failing(), num_blocks=10, max_model_len=64,
    )  # type: ignore[arg-type]  # fmt: skip
    core.submit(PEER, submit(1))
    with pytest.raises(CollectiveError):
        core.step()
    core.set_pause(PauseMode.KEEP)
    assert not core.is_pause_in_effect
    core.run_again()
    assert run_dry(core) == [1]
    assert core.is_pause_in_effect


class Failing(SimulatedExecutor):
    """Loses a peer in its first step."""

    def __init__(self) -> None:
        super().__init__(block_size=4, budget=32, max_rows=4)
        self._fails = True

    def begin(self, step: Step, sizes: Sequence[int] = ()) -> None:
        if self._fails:
            self._fails = False
            raise CollectiveError("lost", rank=None)
        super().begin(step, sizes)
