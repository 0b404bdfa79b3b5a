"""Steps that a device computes while the host does something else.

The device is pretended: its results come from another thread, some time after the launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from engine.compute import runner
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.core import EngineCore
from engine.executor.uni import UniExecutor, launches_ahead
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.model.sharding.shard import WHOLE, Shard
from engine.sampling import SamplingParams
from tests.engine.invariance.answers import PEER, Answer, Answers, How, Instance
from tests.engine.tiny_models import VOCAB, make_tiny_model

DEVICE_TIME = 0.02
"""Seconds of a step on the device whose time is measured."""


class Stream:
    """A device that computes in order, whose results are there after a time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.thread = ThreadPoolExecutor(1)
        self.events: list[str] = []

    def begin_fetch(self, tensor: torch.Tensor) -> Callable[[], np.ndarray]:
        self.events.append("launched")
        copied = self.thread.submit(lambda: (time.sleep(self.seconds), tensor.clone().numpy())[1])

        def numbers() -> np.ndarray:
            self.events.append("waits")
            return copied.result()

        return numbers


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    made = Stream(0.0005)
    monkeypatch.setattr(runner, "begin_fetch", made.begin_fetch)
    yield made
    made.thread.shutdown()


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    directory: Path = make_tiny_model(tmp_path_factory.mktemp("model"), "llama")
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32"),
        cache=CacheConfig(block_size=4),
        device=DeviceConfig(device="cpu", numerics="torch"),
    )
    executor = UniExecutor(config, read_model_info(directory), 1)
    executor.load(lambda phase: None)
    return Instance(directory, executor, 4)


def submits() -> list[Submit]:
    """Answers of several lengths and ends, of which some have log-probabilities and penalties."""
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, max_tokens=24),
        SamplingParams(temperature=1.0, max_tokens=30, stop_token_ids=tuple(range(0, VOCAB, 9))),
        SamplingParams(temperature=0.8, top_k=9, max_tokens=12, logprobs=3, ignore_eos=True),
        SamplingParams(temperature=0.9, max_tokens=16, presence_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=1, ignore_eos=True),
    ]
    return [
        Submit(
            number, str(number), [(7 * number + i) % VOCAB for i in range(3 + 5 * number % 17)], kind, number
        )
        for number, kind in enumerate(kinds * 2)
    ]


def serve(
    core: EngineCore,
    wanted: list[Submit],
    aborts: dict[int, int],
    meanwhile: Callable[[], None] = lambda: None,
) -> Answers:
    """All answers; ``aborts``: after which step which request is aborted, whatever is under way."""
    found: Answers = {each.request: Answer() for each in wanted}
    for each in wanted:
        assert core.submit(PEER, each) is None
    number = 0
    while core.has_work:
        for peer, tokens in core.step(meanwhile).items():
            assert peer == PEER
            for delta in tokens:
                assert delta.request not in aborts.values() or found[delta.request].ended[0] is None
                found[delta.request].take(delta)
        number += 1
        if number in aborts:
            core.abort(PEER, [aborts[number]])
    return found


@pytest.mark.parametrize("cache", [4096, 72], ids=["room", "preemption"])
def test_answers_are_those_of_steps_that_are_waited_for(
    cache: int, instance: Instance, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stops, aborts and preemption; a step with prompts begins with nothing kept back."""
    how, aborts, wanted = How(cache=cache, budget=24, seqs=8), {5: 0, 11: 7}, submits()
    expected = serve(instance.core(how), wanted, aborts)
    assert stream.events.count("launched") == stream.events.count("waits")
    stream.events.clear()
    core = instance.core(how)
    monkeypatch.setattr(instance.executor, "computes_apart", True)
    found = serve(core, wanted, aborts, lambda: stream.events.append("hands out"))
    assert found == expected
    assert core.reports.report(0, 0).blocks_used == 0
    assert (core.scheduler.counters().preemptions > 0) == (cache == 72)
    assert any(answer.ended[1] is not None for answer in found.values()), "some met a stop token"
    behind = [
        after for event, after in zip(stream.events, stream.events[1:], strict=False) if event == "launched"
    ]
    assert set(behind) == {"hands out"}, "handing out comes between a launch and the wait for it"
    before = [
        first for first, event in zip(stream.events, stream.events[1:], strict=False) if event == "launched"
    ]
    assert {"hands out", "waits"} == set(before), "and before the launches of prompts"


def test_what_the_host_does_meanwhile_takes_no_time_of_its_own(
    instance: Instance, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a step's time of work in each of 20 decode steps is hidden."""
    stream.seconds, spent = DEVICE_TIME, []

    def work() -> None:
        spent.append(DEVICE_TIME / 2)
        time.sleep(DEVICE_TIME / 2)

    one = [msgspec.structs.replace(submits()[0], prompt_ids=[3])]
    times = []
    for apart in (False, True):
        core = instance.core(How(cache=256))
        monkeypatch.setattr(instance.executor, "computes_apart", apart)
        began = time.monotonic()
        serve(core, one, {}, work)
        times.append(time.monotonic() - began)
        if not apart:
            assert not spent, "it is the server's to do, between two steps"
            times[0] += len(stream.events) / 2 * DEVICE_TIME / 2
    assert len(spent) == 20
    assert times[1] < times[0] - sum(spent) / 2


@pytest.mark.parametrize(
    ("place", "shard", "has_graphs", "ahead"),
    [
        (None, WHOLE, True, True),
        (None, WHOLE, False, False),
        ((0, 2), WHOLE, True, False),
        (None, Shard(rank=0, size=2), True, False),
    ],
)
def test_groups_and_steps_without_graphs_are_waited_for_at_once(place, shard, has_graphs, ahead) -> None:
    assert launches_ahead(place, shard, has_graphs=has_graphs) == ahead
