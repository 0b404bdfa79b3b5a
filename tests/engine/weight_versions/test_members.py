"""New weights of instances with spread experts, of one worker and of several."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.messages import MemoryPart
from engine.kernels.core import library
from engine.model.weight_digest import whole_digest
from engine.step import Step
from engine.weight_versions import shard_weights
from parallel.communicators.base import CollectiveError
from parallel.placement import Placement
from tests.engine.invariance.spread import Members
from tests.engine.model.test_expert_change import PLENTY
from tests.engine.weight_versions.made import trained
from tests.engine.weight_versions.test_shard_weights import make, submits
from tests.engine.weight_versions.test_spread_weights import assert_holds
from tests.parallel.thread_group import thread_group

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="one worker", marks=pytest.mark.nightly),
        pytest.param({"ranks": 2}, id="two ranks"),
        pytest.param({"stages": 2}, id="two stages", marks=pytest.mark.nightly),
    ],
)
def test_members_go_over_together(layout: dict[str, int], tmp_path: Path) -> None:
    directory = make("mixtral", tmp_path / "old")
    new, wanted = trained(directory, tmp_path / "new"), submits(directory)
    served, fresh = Members(directory, 2, **layout), Members(new, 2, **layout)
    before, after = served.answers(wanted), fresh.answers(wanted)
    fresh.close()
    assert before != after
    shards = [worker.new_weights for worker in served.workers]
    assert {shard.prepare(str(new)) for shard in shards} == {whole_digest([new / "model.safetensors"])}
    assert served.answers(wanted) == before
    for shard in shards:
        shard.switch()
    assert served.answers(wanted) == after
    served.close()


@pytest.mark.parametrize(
    "device",
    [{}, {"numerics": "torch", "batch_invariant": True}],
    ids=["native", "torch"],
)
def test_members_give_back_weights_and_have_the_same_ones_again(
    device: dict[str, Any], tmp_path: Path
) -> None:
    directory = make("mixtral", tmp_path)
    served, wanted = Members(directory, 2, **device), submits(directory)
    before, held = served.answers(wanted), [worker._held for worker in served.workers]
    experts = [each.experts for each in held]
    for worker in served.workers:
        assert worker.give_back(MemoryPart.WEIGHTS)
        assert worker._model is not None
        assert sum(each.untyped_storage().nbytes() for each in worker._model.module.parameters()) < 1000
        with pytest.raises(CollectiveError, match="its weights are given back"):
            worker.begin(Step(), [1, 1])
        worker.new_weights.prepare("")
    held[0].install(experts[1], lambda: PLENTY)  # a group was entered asleep
    for worker in served.workers:
        worker.new_weights.switch()
    assert_holds(served.workers[0]._model.module, directory, experts[1], torch.bfloat16)
    held[0].install(experts[0], lambda: PLENTY)
    assert served.answers(wanted) == before
    served.close()


def test_experts_may_move_while_other_weights_are_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(
        "mixtral", tmp_path / "old"
    )  # in bfloat16: what is read is of another type than the model
    new, wanted = trained(directory, tmp_path / "new"), submits(directory)
    served, fresh = Members(directory, 2, dtype="float32"), Members(new, 2, dtype="float32")
    before, after = served.answers(wanted), fresh.answers(wanted)
    fresh.close()
    num_experts, num_layers = served.workers[0]._info.num_experts, len(served.workers[0]._held.experts)
    draw = random.Random(3)

    def moved() -> Placement:
        """Layers with different copies of experts."""
        seats = [(0,), (1,), (0, 1)]
        layers = [
            (*seats[:2], *(draw.choice(seats) for _ in range(num_experts - 2))) for _ in range(num_layers)
        ]
        return Placement((), 2, tuple(layers))

    def join(placement: Placement) -> None:
        for end, worker in zip(thread_group(2), served.workers, strict=True):
            worker.join(end, placement)

    class Moves:
        """Stands for the pauses of a preparation: experts move in some of them."""

        def __init__(self, num_steps: Callable[[], int]) -> None:
            self.count = 0
            self.is_moving = False

        def rest(self) -> None:
            self.count += 1
            if not self.is_moving and self.count % 25 == 0:
                self.is_moving = True
                join(moved())
                self.is_moving = False

    monkeypatch.setattr(shard_weights, "Pace", Moves)
    join(moved())
    for worker in served.workers:
        worker.new_weights.prepare(str(new))
    join(last := moved())
    assert served.answers(wanted) == before
    for worker in served.workers:
        worker.new_weights.switch()
    join(last)
    assert served.answers(wanted) == after
    join(moved())
    assert served.answers(wanted) == after
    served.close()
