"""The executor with worker processes, where it takes processes to show."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from coordinator.rpc import keys
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.executor import make_executor
from engine.executor.channel import Channel
from engine.executor.ends import LocalWorker, RelayedWorker, WorkerEnd
from engine.executor.messages import Allocated, Computed, Hosting, Loaded, Meet, Read, ToWorker
from engine.executor.mp import MpExecutor
from engine.executor.spread_mp import SpreadMpExecutor, StepGroups
from engine.executor.uni import UniExecutor
from engine.executor_contract import Progress, WorkerLost
from engine.host import forked, memory
from engine.host.cores import Share
from engine.kernels.core import library
from engine.messages import TokenLogprobs
from engine.model.checkpoint import CheckpointError, ModelInfo, read_model_info
from engine.sampling import SamplingParams
from engine.step import Admit, KVSpec, ModelFacts, Span, Step, StepResult
from parallel.links.errors import CollectiveError
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingClient
from tests.engine.compute.test_exactness import greedy
from tests.engine.model.sharding.test_sharding import run
from tests.engine.model.test_weights import change_tensors
from tests.engine.tiny_models import make_tiny_model
from tests.mesh.harness import fork_server
from tests.waiting import until

pytestmark = pytest.mark.mesh


def settings(directory: Path, **device: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32"),
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(**device),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_moe")


@pytest.fixture(scope="module")
def forks() -> Iterator[None]:
    """Whether workers are forked, as those of ``serve`` are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked, "inherited", fork_server() if forked.is_possible("cpu", 0) else None)
        yield


@pytest.fixture(scope="module")
def loaded(directory: Path, forks: None) -> Iterator[tuple[MpExecutor, ModelFacts]]:
    executor = make_executor(
        settings(directory, tensor_parallel_size=2, pipeline_parallel_size=2),
        read_model_info(directory),
        1,
        rank=7,
        keys=keys.generate(),
    )
    assert isinstance(executor, MpExecutor)
    facts = executor.load(lambda _phase: None)
    yield executor, facts
    executor.close()


def pids() -> dict[str, int]:
    """Worker processes of this one, by name."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        try:
            title = " ".join(child.cmdline()).strip()
        except psutil.NoSuchProcess:  # it has ended, or is what is left of another test's child
            continue
        if title.startswith("lockstep: Worker_"):
            found[title.removeprefix("lockstep: ")] = child.pid
    return found


def test_workers_meet_with_a_key_of_their_own_that_nobody_else_can_see(
    loaded: tuple[MpExecutor, ModelFacts],
) -> None:
    key = loaded[0]._key
    assert key is not None
    assert str(key.secret) not in repr(key)
    seen = b"".join(
        (Path("/proc") / str(pid) / name).read_bytes()
        for pid in pids().values()
        for name in ("cmdline", "environ")
    )
    assert key.secret not in seen
    assert key.secret.hex().encode() not in seen
    first = psutil.Process(pids()["Worker_7_PP0_TP0"])
    (listening,) = [each for each in first.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    assert listening.laddr.ip == "127.0.0.1"
    for stranger in (None, LinkKey.generate()):
        with pytest.raises(CollectiveError, match=r"it has (a|another) mesh key"):
            MeetingClient("127.0.0.1", listening.laddr.port, stranger)
    assert not MeetingClient("127.0.0.1", listening.laddr.port, LinkKey(key.secret)).check(["none"])


def test_workers_compute_what_one_process_does(
    loaded: tuple[MpExecutor, ModelFacts], directory: Path
) -> None:
    executor, facts = loaded
    assert set(pids()) == {f"Worker_7_PP{stage}_TP{rank}" for stage in (0, 1) for rank in (0, 1)}
    alone = UniExecutor(settings(directory), read_model_info(directory), 1)
    whole = alone.load(lambda _phase: None)
    assert (facts.vocab_size, facts.dtype, facts.device) == (whole.vocab_size, whole.dtype, whole.device)
    assert facts.kv.bytes_per_token == whole.kv.bytes_per_token // 4
    assert 0 < executor.free_kv_memory() < alone.free_kv_memory()
    expected, _ = run(alone, directory, greedy(), num_blocks=28, budget=24)
    outputs, counters = run(executor, directory, greedy(), num_blocks=28, budget=24)
    assert outputs == expected
    assert counters.preemptions > 0
    workers = executor.arithmetic()
    assert {worker.kernels for worker in workers} == {"torch"}, (
        "blocks of 4 tokens are none for native kernels"
    )
    assert [worker.layers for worker in workers] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def overlap(first: Sequence[Span], second: Sequence[Span]) -> float:
    """Seconds in which both computed. Each one's spans are in order and apart."""
    shared, a, b = 0.0, 0, 0
    while a < len(first) and b < len(second):
        shared += max(0.0, min(first[a][1], second[b][1]) - max(first[a][0], second[b][0]))
        if first[a][1] < second[b][1]:
            a += 1
        else:
            b += 1
    return shared


def test_stages_compute_at_the_same_time(loaded: tuple[MpExecutor, ModelFacts], directory: Path) -> None:
    """With one step under way there is nothing to overlap.

    With two, stages take turns in both.
    """
    executor, _ = loaded
    assert executor.in_flight == 2
    shared = []
    for executor.in_flight in (1, 2):
        run(executor, directory, greedy(), num_blocks=600, budget=64)
        spans = executor.spans()  # since the cache was made
        shared.append(overlap(spans["Worker_7_PP0_TP0"], spans["Worker_7_PP1_TP0"]))
        assert len(spans["Worker_7_PP0_TP0"]) == len(spans["Worker_7_PP1_TP1"]) > 10
    assert shared[0] == 0.0
    assert shared[1] > 0.0


def test_threads_and_cores_follow(loaded: tuple[MpExecutor, ModelFacts]) -> None:
    executor, _ = loaded
    cores = sorted(os.sched_getaffinity(0))
    executor.set_threads(1, [cores[0]] * 4)
    executor.allocate(4)  # answered after it
    assert {tuple(os.sched_getaffinity(pid)) for pid in pids().values()} == {(cores[0],)}
    executor.set_threads(1)
    executor.allocate(4)
    assert {tuple(sorted(os.sched_getaffinity(pid))) for pid in pids().values()} == {tuple(cores)}


def test_the_end_of_a_worker_is_the_end_of_the_instance(
    loaded: tuple[MpExecutor, ModelFacts], directory: Path
) -> None:
    """The last test of this executor: killed while all are in a step."""
    executor, _ = loaded
    executor.check()
    workers = pids()
    timer = threading.Timer(0.3, os.kill, (workers["Worker_7_PP1_TP1"], signal.SIGKILL))
    timer.start()

    def go_on() -> None:
        while True:
            run(executor, directory, greedy(), num_blocks=600, budget=64)

    with pytest.raises(WorkerLost, match=r"Worker_7_PP1_TP1 \(pid \d+\) was killed by signal 9"):
        go_on()
    noticed = time.monotonic()
    executor.close()
    assert time.monotonic() - noticed < 1.0
    assert not pids()


class SilentCrew:
    """A crew whose workers are elsewhere and never send anything."""

    def __init__(self, num_workers: int) -> None:
        self.workers = [RelayedWorker(f"Worker_{n}", "elsewhere", "", "", n) for n in range(num_workers)]
        self.problem = ""

    def start(self, workers: list[WorkerEnd], progress: Progress) -> None:
        workers += self.workers

    def threads_of(self, worker: WorkerEnd) -> int | None:
        return 1

    def close(self, problem: str) -> None:
        self.problem = problem
        for worker in self.workers:
            worker.forget()


@pytest.mark.parametrize(("stages", "ranks", "answers"), [(2, 1, 1), (1, 2, 0), (2, 2, 2)])
def test_a_worker_that_answers_and_hangs_is_not_waited_for(
    directory: Path, stages: int, ranks: int, answers: int
) -> None:
    """Without the first rank of the last stage no other worker need miss anything."""
    crew = SilentCrew(stages * ranks)
    config = settings(
        directory,
        pipeline_parallel_size=stages,
        tensor_parallel_size=ranks,
        execute_model_timeout=0.1,
    )
    executor = MpExecutor(config, read_model_info(directory), crew, Share(1))
    executor._start(lambda _phase: None)
    for wait in (executor.finish, executor.spans):
        executor.begin(Step([], []))
        with pytest.raises(
            WorkerLost, match=r"Worker_\d \(elsewhere\) does not answer: it is stopped, or hangs"
        ) as lost:
            wait()
        assert f"Worker_{answers if wait == executor.finish else 0} " in str(lost.value)
    executor.close()
    assert "does not answer" in crew.problem


def test_nor_where_experts_are_spread(directory: Path) -> None:
    """The worker's second thread, which answers for it, may be well."""
    config = settings(directory, tensor_parallel_size=2, execute_model_timeout=0.1, collective_timeout=0.1)
    crew: Any = SilentCrew(2)
    executor = SpreadMpExecutor(config, read_model_info(directory), crew, Share(1), (0, 1))
    executor._start(lambda _phase: None)
    executor._step_groups = StepGroups(executor._channels, [])
    executor.begin(Step([], []))
    with pytest.raises(WorkerLost, match=r"Worker_0 \(elsewhere\) does not answer: it is stopped, or hangs"):
        executor.finish()
    executor.close()


def test_layers_with_experts_are_known_before_any_row_is_counted(directory: Path) -> None:
    """Without them the coordinator would place no copies in the first group."""
    crew: Any = SilentCrew(2)
    info = msgspec.structs.replace(read_model_info(directory), num_experts=4)
    executor = SpreadMpExecutor(settings(directory, tensor_parallel_size=2), info, crew, Share(1), (0, 2))
    facts = ModelFacts("Tiny", 1, 1, 1, "float32", "cpu", KVSpec(3, 100))
    for worker, messages in zip(crew.workers, ([Hosting(1)], []), strict=True):
        for each in (*messages, Read(), Loaded(facts, (0, 3), 8, 3)):
            worker.relay.send(msgspec.msgpack.encode(each))
    executor.load(lambda _phase: None)
    assert executor.expert_loads() == [[0] * 4] * 3
    executor.close()


def test_the_caches_of_all_workers_are_taken_from_memory_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew: Any = SilentCrew(2)
    config = settings(directory, tensor_parallel_size=2)
    executor = SpreadMpExecutor(config, read_model_info(directory), crew, Share(1), (0, 1))
    executor._start(lambda _phase: None)
    executor._step_groups = StepGroups(executor._channels, [])
    executor._kv = [KVSpec(2, 100), KVSpec(2, 50)]
    for worker in crew.workers:
        worker.relay.send(msgspec.msgpack.encode(Allocated()))
    executor.allocate(10)
    monkeypatch.setattr(memory, "available_memory", lambda: 1_000_000)
    before = executor.spare_memory()
    assert before < 0.9 * 1_000_000
    executor.begin(Step(slots=[0], starts=[0], counts=[9], new_blocks={0: [0, 1, 2]}))
    monkeypatch.setattr(memory, "available_memory", lambda: 1_000_000 - 3 * 4 * 150)
    assert executor.spare_memory() == before
    executor.close()


def take_steps(relay: Channel, count: int, answer: bytes = b"") -> None:
    """Take steps as a worker does, without computing.

    In the last stage there is an answer.
    """
    relay.receive(0.0)  # who it is
    for _ in range(count):
        relay.receive(0.0)
        if answer:
            relay.send(answer)


def test_large_steps_and_large_results_do_not_wait_for_each_other(directory: Path) -> None:
    """The next step exceeds a channel, and so does the result of the last.

    Both happen while steps are under way.
    """
    crew = SilentCrew(2)
    config = settings(directory, pipeline_parallel_size=2)
    executor = MpExecutor(config, read_model_info(directory), crew, Share(1))
    executor._start(lambda _phase: None)
    told = TokenLogprobs(1, -0.5, 1, [*range(20)], [-0.5] * 20)
    result = StepResult([7], prompt_logprobs={0: [told] * 10_000})
    answer, length = msgspec.msgpack.encode(Computed(result)), 500_000
    first, last = (worker.relay for worker in crew.workers)
    threads = [threading.Thread(target=take_steps, args=args) for args in ((first, 3), (last, 3, answer))]
    for thread in threads:
        thread.start()
    admit = Admit(0, [300] * length, length, SamplingParams(prompt_logprobs=20), 1, ())
    for _ in range(3):
        executor.begin(Step([admit], [0], [0], [length]))
    assert [executor.finish() == result for _ in range(3)] == [True] * 3
    for thread in threads:
        thread.join(20)
    executor.close()


def test_a_worker_that_takes_no_step_hangs_as_soon_as_one_that_answers_none(directory: Path) -> None:
    config = settings(directory, pipeline_parallel_size=2, execute_model_timeout=0.1)
    executor = MpExecutor(config, read_model_info(directory), SilentCrew(2), Share(1))
    executor._start(lambda _phase: None)
    began = time.monotonic()
    with pytest.raises(WorkerLost, match=r"Worker_0 .* does not answer"):
        executor.begin(Step([], [0] * 1_000_000))
    assert time.monotonic() - began < 10.0
    executor.close()


def test_a_first_rank_that_is_stopped_when_the_others_need_nothing_of_it(
    directory: Path, forks: None
) -> None:
    """The step has no rows, and so no collective that needs the first rank."""
    config = settings(directory, tensor_parallel_size=2, execute_model_timeout=1.0)
    executor = make_executor(config, read_model_info(directory), 1, rank=8)
    executor.load(lambda _phase: None)
    executor.allocate(4)
    os.kill(pids()["Worker_8_PP0_TP0"], signal.SIGSTOP)
    executor.begin(Step([], []))
    with pytest.raises(WorkerLost, match=r"Worker_8_PP0_TP0 \(pid \d+\) does not answer: it is stopped"):
        executor.finish()
    executor.close()
    assert not pids()


def start(
    directory: Path, info: ModelInfo, errors: list[BaseException], **options: Any
) -> tuple[MpExecutor, threading.Thread]:
    executor = make_executor(settings(directory, tensor_parallel_size=2), info, 1, **options)
    assert isinstance(executor, MpExecutor)

    def load() -> None:
        try:
            executor.load(lambda _phase: None)
        except (WorkerLost, CheckpointError) as error:
            errors.append(error)

    thread = threading.Thread(target=load)
    thread.start()
    return executor, thread


def test_a_worker_that_dies_while_it_starts_is_noticed_at_once(directory: Path) -> None:
    errors: list[BaseException] = []
    executor, thread = start(directory, read_model_info(directory), errors)
    deadline = time.monotonic() + 20
    while len(executor._workers) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    executor._workers[1].kill()
    began = time.monotonic()
    thread.join(5)
    assert time.monotonic() - began < 1.0
    assert "was killed by signal 9" in str(errors[0])
    executor.close()


@pytest.mark.skipif(library.why_not("avx2") is not None or library.load() is None, reason="no kernels here")
def test_workers_use_the_kernels_that_are_asked_for(directory: Path, forks: None) -> None:
    config = settings(directory, tensor_parallel_size=2, numerics="avx2")
    for block_size in (16, 4):
        cache = CacheConfig(block_size=block_size)
        executor = make_executor(
            msgspec.structs.replace(config, cache=cache), read_model_info(directory), 1, rank=6
        )
        try:
            executor.load(lambda _phase: None)
            if block_size == 4:
                with pytest.raises(CheckpointError, match="--numerics avx2: torch's operators compute"):
                    executor.allocate(4)
                continue
            executor.allocate(4)
            assert [worker.kernels for worker in executor.arithmetic()] == ["avx2", "avx2"]
        finally:
            executor.close()


def test_a_worker_says_why_it_cannot_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The worker reports heads that do not divide; nothing is left over."""
    caplog.set_level(logging.INFO)
    directory = make_tiny_model(tmp_path, "qwen3", num_attention_heads=3, num_key_value_heads=3)
    errors: list[BaseException] = []
    executor, thread = start(directory, read_model_info(directory), errors)
    thread.join(60)
    executor.close()
    assert isinstance(errors[0], CheckpointError)
    assert "3 attention heads and 3 KV heads cannot be divided by 2. Sizes that do: 1, 3" in str(errors[0])
    assert not pids()


@pytest.mark.parametrize("axis", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_a_first_run_that_fails_says_why(axis: str, tmp_path: Path, forks: None) -> None:
    """After a failed first run no worker begins again.

    The engine and the other workers wait for the end of this run.
    """
    directory = make_tiny_model(tmp_path, "llama")
    change_tensors(
        directory, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].fill_(float("nan"))
    )
    executor = make_executor(settings(directory, **{axis: 2}), read_model_info(directory), 1)
    with pytest.raises(CheckpointError, match="its output is not finite"):
        executor.load(lambda _phase: None)
    executor.close()
    assert not pids()


def test_one_worker_may_come_much_later_than_another(
    directory: Path, forks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--collective-timeout concerns members that are in a step."""
    config = settings(directory, tensor_parallel_size=2, collective_timeout=1.0)
    executor = make_executor(config, read_model_info(directory), 1)
    assert isinstance(executor, MpExecutor)
    send = executor._channels.send

    def late(worker: WorkerEnd, message: ToWorker) -> None:
        if isinstance(message, Meet) and message.port:
            time.sleep(2.5)
        send(worker, message)

    monkeypatch.setattr(executor._channels, "send", late)
    executor.load(lambda _phase: None)
    executor.close()


def test_a_worker_that_hangs_while_it_loads_is_named(directory: Path, forks: None) -> None:
    """The other worker waits for it, and reports nothing either."""
    errors: list[BaseException] = []
    executor, thread = start(directory, read_model_info(directory), errors, rank=9, startup_timeout=4.0)
    until(lambda: len(executor._workers) == 2)
    stopped = executor._workers[1]
    assert isinstance(stopped, LocalWorker)
    os.kill(stopped.child.pid, signal.SIGSTOP)
    thread.join(30)
    assert isinstance(errors[0], WorkerLost)
    said = (
        r"Worker_9_PP0_TP1 \(pid \d+\) does not answer: it is stopped, or hangs; .* raise --startup-timeout"
    )
    assert re.match(said, str(errors[0]))
    executor.close()
    assert not pids()
