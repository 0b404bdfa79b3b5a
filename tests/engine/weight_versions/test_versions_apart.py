"""Blocks of files and other instances never pass between versions of the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import msgspec
import pytest

from coordinator.messages import InFlight, WeightUpdate, WeightVersion
from engine.kernels.core import library
from engine.messages import Submit
from engine.transfers import fetching, price, sources
from engine.weight_versions.instance_weights import InstanceWeights
from tests.engine.invariance.answers import Answers, Instance, load
from tests.engine.states.serving import Serving
from tests.engine.states.test_transfers import prompt
from tests.engine.weight_versions.made import trained
from tests.engine.weight_versions.test_shard_weights import answers, make
from tests.waiting import PATIENCE

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

SHARED = [7 * number % 380 + 5 for number in range(96)]


@pytest.fixture(autouse=True)
def is_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A price at which everything is fetched, with time for a busy machine."""
    monkeypatch.setattr(price, "WORTH", float("inf"))
    monkeypatch.setattr(price, "FEWEST", 16)
    monkeypatch.setattr(fetching, "STALL", PATIENCE)
    monkeypatch.setattr(sources, "LEAST_SECONDS", PATIENCE)
    monkeypatch.setattr(sources, "MOST_SECONDS", PATIENCE)


class Model:
    """Two versions of a model, and two instances of it that change between them."""

    def __init__(self, family: str, into: Path, **device: bool) -> None:
        first = make(family, into / "0")
        self.directories = [first, trained(first, into / "1")]
        self.instances = [load(first, **device) for _ in range(2)]
        self.fresh: Callable[[int], Instance] = cache(lambda v: load(self.directories[v], **device))

    def alone(self, version: int, submits: list[Submit]) -> Answers:
        return answers(self.fresh(version), submits)


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    device = {} if request.param == "llama" else {"batch_invariant": True}
    return Model(request.param, tmp_path_factory.mktemp(request.param), **device)


class Changing(Serving):
    """An instance with movers, and files where asked for, whose weights change."""

    def __init__(self, model: Model, number: int, files: Path | None = None) -> None:
        instance = model.instances[number]
        weights = instance.executor.new_weights
        if weights.digest:  # a new process begins with the model of its command line
            weights.prepare(str(model.directories[0]))
            weights.switch()
        super().__init__(instance, files=files, check_interval=8)
        self.weights = InstanceWeights(weights, self.core, lambda: None)
        self.directories = model.directories
        self.version = self.updates = 0

    def update(self, version: int, in_flight: InFlight = InFlight.RECOMPUTE) -> None:
        self.updates += 1
        source = str(self.directories[version])
        update = WeightUpdate(WeightVersion(self.updates, "", source, "", f"u{self.updates}"), in_flight)
        self.weights.prepare(update, lambda: False)
        self.weights.switch(update, in_flight)
        self.version = version


def submits(begin: int, count: int = 3) -> list[Submit]:
    """Prompts that begin alike."""
    made = [prompt([*SHARED, 9 + n, *range(5, 25)], begin + n, 5) for n in range(count)]
    return [msgspec.structs.replace(each, seed=place) for place, each in enumerate(made)]


def renumbered(found: Answers, begin: int) -> Answers:
    return {begin + place: found[number] for place, number in enumerate(sorted(found))}


def test_files_of_another_version_are_not_read(model: Model, tmp_path: Path) -> None:
    wanted = submits(0)
    alone = [model.alone(version, wanted) for version in (0, 1)]
    first = Changing(model, 0, tmp_path)
    assert first.answers(wanted) == alone[0]
    first.update(1)
    before = first.num_computed
    assert first.answers(submits(10, 1)) == renumbered({0: alone[1][0]}, 10)
    assert first.num_computed - before >= len(wanted[0].prompt_ids), "nothing of the old version was found"
    assert first.answers(submits(20)) == renumbered(alone[1], 20)
    first.close()
    again = Changing(model, 0, tmp_path)
    assert again.answers(wanted) == alone[0]
    again.update(1)
    before = again.num_computed
    assert again.answers(submits(30)) == renumbered(alone[1], 30)
    assert again.counters.wrong_blocks == 0
    again.close()


def test_instances_of_two_versions_lend_each_other_nothing(model: Model) -> None:
    wanted = submits(0)
    source, taker = Changing(model, 0), Changing(model, 1)
    source.update(1)
    alone = [model.alone(version, wanted) for version in (0, 1)]
    assert source.answers(wanted) == alone[1]
    assert taker.answers(wanted, source.mover.address, source) == alone[0]
    assert taker.counters.fetched_tokens == 0
    taker.update(1)
    assert taker.answers(submits(10), source.mover.address, source) == renumbered(alone[1], 10)
    assert taker.counters.fetched_tokens > 0, "of one version they do"
    assert (source.counters.wrong_blocks, taker.counters.wrong_blocks) == (0, 0)
    source.close()
    taker.close()
