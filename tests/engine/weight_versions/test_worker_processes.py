"""New weights in worker processes: prepared beside steps, used by all from one on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.messages import MemoryPart
from engine.executor import make_executor
from engine.executor.mp import MpExecutor
from engine.host import forked
from engine.kernels.core import library
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded
from tests.engine.invariance.answers import PEER, Answer, Answers, How, Instance, settings, step
from tests.engine.weight_versions.made import trained
from tests.engine.weight_versions.test_shard_weights import make, submits
from tests.mesh.harness import fork_server

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]


@pytest.fixture(scope="module", autouse=True)
def forks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forked, "inherited", fork_server() if forked.is_possible("cpu", 0) else None)
        yield


def started(directory: Path, layout: dict[str, int]) -> MpExecutor:
    executor = make_executor(settings(directory, **layout), read_model_info(directory), 1)
    assert isinstance(executor, MpExecutor)
    executor.load(lambda _phase: None)
    return executor


def answers(executor: MpExecutor, directory: Path, wanted: Sequence[Submit]) -> Answers:
    return Instance(directory, executor).answers(wanted, How())[0]


@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_workers_go_over_at_one_step(layout: dict[str, int], tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "old")
    new, wanted = trained(directory, tmp_path / "new"), submits(directory)
    executor, fresh = started(directory, layout), started(new, layout)
    try:
        before, after = answers(executor, directory, wanted), answers(fresh, new, wanted)
        core, found = Instance(directory, executor).core(How()), dict[int, Answer]()
        weights, digests = executor.new_weights, list[str]()
        thread = threading.Thread(target=lambda: digests.append(weights.prepare(str(new))))
        thread.start()
        numbers = 0
        while thread.is_alive() or not numbers:  # steps go on meanwhile
            found |= {each.request: Answer() for each in wanted}
            for each in wanted:
                assert core.submit(PEER, each) is None
            while not core.is_empty:
                executor.check()
                step(core, found, lambda: None)
            assert found == before
            numbers += 1
        weights.switch()
        assert {each.weights for each in executor.arithmetic()} == set(digests)
        core.sharing.change_weights(digests[0])
        for each in wanted:
            found[each.request] = Answer()
            assert core.submit(PEER, each) is None
        while not core.is_empty:
            step(core, found, lambda: None)
        assert found == after != before
    finally:
        executor.close()
        fresh.close()


def prepare(executor: MpExecutor, source: Path | str, patience: float = 60.0) -> Exception | str:
    """What a preparation comes to, while the thread of the steps rests."""
    found: list[Exception | str] = []
    until = time.monotonic() + patience

    def run() -> None:
        try:
            found.append(executor.new_weights.prepare(str(source), lambda: time.monotonic() > until))
        except (WeightsRefused, WeightsSuperseded) as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while thread.is_alive():
        executor.check()
        thread.join(0.01)
    (result,) = found
    return result


def test_workers_answer_whether_their_memory_went(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "old")
    wanted, tp = submits(directory), {"tensor_parallel_size": 2}
    executor = started(directory, tp)
    try:
        before = answers(executor, directory, wanted)
        assert executor.give_back(MemoryPart.WEIGHTS)
        assert isinstance(prepare(executor, ""), str)
        executor.new_weights.switch()
        assert answers(executor, directory, wanted) == before
    finally:
        executor.close()

    random = settings(directory, **tp)
    random = replace(random, model=replace(random.model, load_format="dummy"))
    executor = make_executor(random, read_model_info(directory), 1)
    try:
        executor.load(lambda _phase: None)
        before = answers(executor, directory, wanted)
        assert not executor.give_back(MemoryPart.WEIGHTS), "random ones could not be read again"
        assert answers(executor, directory, wanted) == before
    finally:
        executor.close()


def test_workers_that_cannot_prepare_go_on(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "old")
    new, wanted = trained(directory, tmp_path / "new"), submits(directory)
    executor = started(directory, {"tensor_parallel_size": 2})
    try:
        before = answers(executor, directory, wanted)
        (tmp_path / "none").mkdir()
        refused = prepare(executor, tmp_path / "none")
        assert isinstance(refused, WeightsRefused)
        assert "has no *.safetensors file" in str(refused)
        assert isinstance(prepare(executor, new, patience=-1.0), WeightsSuperseded)
        assert isinstance(prepare(executor, new), str)
        executor.new_weights.discard()
        executor.check()
        assert answers(executor, directory, wanted) == before
    finally:
        executor.close()
