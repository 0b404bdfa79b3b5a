"""Steps that are scheduled while a pretended device computes the one before, on real models.

Their rows follow tokens that only the device knows. See also ``test_launched_ahead``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest

from engine.compute import request_slots, runner
from engine.compute.decode_graphs import DecodeGraphs
from engine.compute.step_graphs import StepGraphs
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.executor.uni import UniExecutor
from engine.model.checkpoint import read_model_info
from engine.step import Step
from tests.engine.compute.test_decode_graphs import Again
from tests.engine.compute.test_launched_ahead import Stream, serve, submits
from tests.engine.flat_attention import FlatAttention
from tests.engine.invariance.answers import Answer, How, Instance, Line
from tests.engine.tiny_models import make_tiny_model

SIZES = (1, 2, 4, 6)
MAX_TOKENS = 60


class Captured(UniExecutor):
    """An executor of captured decode steps, whose capture computes again."""

    replayed: list[int]

    def _make_cache(self, num_blocks: int, memory: object = None):
        assert self._model is not None
        return FlatAttention(self._model.layers, num_blocks, self._config.cache.block_size)

    def _make_graphs(self, cache, num_blocks: int) -> StepGraphs:
        assert self._model is not None
        again = Again()
        graphs = DecodeGraphs(self._model, cache, SIZES, MAX_TOKENS, self._config.scheduler.most_requests())
        graphs.capture(again)
        self.replayed = again.replayed
        return StepGraphs(graphs)


class Noted:
    """Steps that an executor began, and how many had begun before each and not ended."""

    def __init__(self, executor: UniExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[Step] = []
        self.under_way: list[int] = []
        original = executor.begin

        def begin(step: Step, sizes: object = ()) -> None:
            self.steps.append(step)
            self.under_way.append(len(executor._pending))
            original(step)

        monkeypatch.setattr(executor, "begin", begin)

    @property
    def rows_ahead(self) -> int:
        return sum(len(step.ahead) for step in self.steps)


def executor_for(directory: Path, wanted: bool | None = None) -> Captured:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32"),
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(device="cpu", numerics="torch"),
        scheduler=SchedulerConfig(max_num_seqs=8, async_scheduling=wanted),
    )
    executor = Captured(config, read_model_info(directory), 1)
    executor.load(lambda phase: None)
    return executor


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def instance(directory: Path) -> Instance:
    return Instance(directory, executor_for(directory), 4)


@pytest.fixture(scope="module")
def one_by_one(directory: Path) -> Instance:
    """The same without anything ahead."""
    return Instance(directory, executor_for(directory, wanted=False), 4)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    made = Stream(0.0005)
    monkeypatch.setattr(runner, "begin_fetch", made.begin_fetch)
    yield made
    made.thread.shutdown()


def rounded(answer: Answer) -> tuple[object, ...]:
    """An answer without last bits of log-probabilities, which follow the shapes of torch's operators."""

    def of(found: Sequence[Line | None] | None) -> list[object]:
        return [each and (each[0], round(float.fromhex(each[1]), 3)) for each in found or ()]

    return answer.text, of(answer.logprobs), of(answer.prompt_logprobs)


@pytest.mark.parametrize("cache", [4096, 72], ids=["room", "preemption"])
def test_answers_are_those_of_steps_one_after_the_other(
    cache: int, instance: Instance, one_by_one: Instance, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stops, aborts, preemption, log-probabilities, prompts beside decode rows, and penalties."""
    plain = [each for each in submits() if not each.params.shapes_logits_by_history]
    how, aborts = How(cache=cache, budget=24, seqs=8), {5: 0, 11: 7}
    noted = Noted(instance.executor, monkeypatch)
    for wanted in (plain, submits()):
        expected = serve(one_by_one.core(how), wanted, aborts)
        core = instance.core(how)
        found = serve(core, wanted, aborts)
        assert core.reports.report(0, 0).blocks_used == 0
        assert (core.scheduler.counters().preemptions > 0) == (cache == 72)
        for number in set(expected) - set(aborts.values()):
            assert rounded(found[number]) == rounded(expected[number])
    assert noted.rows_ahead > 60
    assert set(noted.under_way) == {0, 1}
    assert any(step.ahead and max(step.counts) > 1 for step in noted.steps), "prompts beside them"
    assert instance.executor.replayed, "and captured steps"


@pytest.mark.parametrize(("wanted", "in_flight"), [(None, 2), (True, 2), (False, 1)])
def test_the_flag_turns_it_off(wanted: bool | None, in_flight: int, directory: Path) -> None:
    executor = executor_for(directory, wanted)
    executor.allocate(16)
    assert (executor.in_flight, executor.runs_ahead) == (in_flight, in_flight == 2)
    assert executor.computes_apart
    executor.close()


def test_a_device_is_given_its_next_step_before_it_is_done(
    instance: Instance, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each decode step but the first, the next one is launched before the wait."""
    core = instance.core(How(cache=256))
    one = [msgspec.structs.replace(submits()[0], prompt_ids=[3])]
    serve(core, one, {})
    assert stream.events[:2] == ["launched", "launched"]
    assert stream.events[2:-2] == ["waits", "launched"] * 18
    assert stream.events[-2:] == ["waits", "waits"]


def test_tokens_of_a_step_go_to_the_requests_that_it_began_with(instance: Instance, stream: Stream) -> None:
    """The slot of an aborted request has another one, whose prompt is as it was."""
    first, second = submits()[0], submits()[6]
    expected = serve(instance.core(How(cache=256, seqs=1)), [second], {})
    core = instance.core(How(cache=256, seqs=1))
    found = serve(core, [first, second], {4: first.request})
    assert found[second.request] == expected[second.request]


def test_a_history_has_room_for_a_token_that_is_not_known(
    instance: Instance, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minimum lengths count it, also where the room behind the prompt is used up."""
    monkeypatch.setattr(request_slots, "MIN_SPARE_TOKENS", 1)
    lengths: list[int] = []
    core = instance.core(How(cache=256))
    sampler = instance.executor._runner._sampler
    sample = sampler.sample

    def note(logits, rows):
        lengths.extend(row.num_output for row in rows)
        return sample(logits, rows)

    monkeypatch.setattr(sampler, "sample", note)
    serve(core, [msgspec.structs.replace(submits()[0], prompt_ids=[3])], {})
    assert lengths == list(range(20))
