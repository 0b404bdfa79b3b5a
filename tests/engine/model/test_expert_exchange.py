"""Experts that members of other hosts give: the bytes of those that are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from coordinator.messages import MemoryPart
from engine.model import expert_exchange
from engine.model.checkpoint import ReadingStopped, read_model_info
from engine.model.expert_change import HeldExperts
from engine.model.expert_exchange import exchange
from engine.model.expert_weights import ExpertShare, expert_modules, expert_parameters
from parallel.communicators.base import Communicator
from parallel.placement import assign_experts
from tests.engine.invariance.spread import Members
from tests.engine.kernels.exchange.linked_group import linked_group, of_all
from tests.engine.model.test_expert_change import PLENTY, assert_holds
from tests.engine.model.test_expert_weights import load
from tests.engine.tiny_models import make_tiny_model
from tests.parallel.thread_group import thread_group

HOSTS = ["a", "b"]
GROUPS: list[Callable[[], list[Any]]] = [lambda: thread_group(2), lambda: linked_group(2)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe")


@pytest.fixture(scope="module")
def whole(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def members(directory: Path) -> list[tuple[Any, HeldExperts]]:
    """Two members with half of the experts each, whose checkpoint is gone."""
    count = read_model_info(directory).num_experts
    placement, found = assign_experts(count, 2), []
    for rank in range(2):
        model = load(directory, ExpertShare(placement, rank))
        held = HeldExperts(model, Path("gone"), placement.experts_of(rank), num_experts=count)
        assert held.can_be_given
        found.append((model, held))
    return found


@pytest.mark.each_push
@pytest.mark.parametrize("group", GROUPS, ids=["threads", "links"])
def test_experts_come_from_a_peer_without_a_file(
    directory: Path, whole: Any, group: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_exchange, "ROUND_BYTES", 1001)
    both = members(directory)
    count = both[0][1].num_experts
    swapped = [list(range(count // 2, count)), list(range(count // 2))]
    for wanted in (swapped, [[0, 1, count - 1], list(range(count))]):
        ends: list[Communicator] = group()

        def move(rank: int, wanted: Any = wanted, ends: Any = ends) -> int:
            model, held = both[rank]
            held.prepare([wanted[rank]], PLENTY, elsewhere=held.missing([wanted[rank]]))
            assert held.is_prepared([wanted[rank]]) == (not held.wanted)
            came = exchange(ends[rank], held, HOSTS, lambda: False)
            held.install([wanted[rank]], lambda: 0)
            assert_holds(model, whole, wanted[rank])
            return came

        assert sum(of_all(2, move)) > 0
        for end in ends:
            end.close()
    assert all(held.link_rate > 0 for _, held in both)


def test_an_expert_that_comes_with_a_flipped_bit_is_read(
    directory: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (_, giver), (model, taker) = members(directory)
    taker._directory = directory
    fill, flipped = expert_exchange._fill, list[int]()

    def fill_wrong(parcels: list[Any], part: torch.Tensor) -> None:
        if len(part) and not flipped:
            flipped.append(int(part[7]))
            part = part.clone()
            part[7] ^= 4
        fill(parcels, part)

    monkeypatch.setattr(expert_exchange, "_fill", fill_wrong)
    ends, wanted = thread_group(2), list(range(taker.num_experts))
    missing = taker.missing([wanted])

    def member(rank: int) -> int:
        if rank == 0:
            return exchange(ends[0], giver, HOSTS, lambda: False)
        taker.prepare([wanted], PLENTY, elsewhere=missing)
        return exchange(ends[1], taker, HOSTS, lambda: False)

    assert of_all(2, member) == [0, len(missing) - 1]
    taker.install([wanted], lambda: 0)
    assert_holds(model, whole, wanted)


def test_experts_of_other_weights_are_read(directory: Path, whole: Any) -> None:
    """The giver goes over to a new version once all have told what they hold."""
    (other, giver), (model, taker) = members(directory)
    taker._directory = directory
    ends, wanted = thread_group(2), list(range(taker.num_experts))
    told, gone_over = giver.experts, dict[str, dict[str, torch.nn.Parameter]]()
    for path, module in expert_modules(other).items():
        made = {name: torch.nn.Parameter(-each.data, False) for name, each in expert_parameters(module)}
        gone_over[path] = made

    class GoesOver:
        """A member's end of the group, which goes over behind the first call."""

        rank, size = 0, 2

        def all_gather_ints(self, row: list[int]) -> Any:
            rows = ends[0].all_gather_ints(row)
            giver.replace(directory, told, gone_over, "new")
            return rows

        def all_to_all(self, *args: Any) -> torch.Tensor:
            return ends[0].all_to_all(*args)

    def member(rank: int) -> int:
        if rank == 0:
            return exchange(GoesOver(), giver, HOSTS, lambda: False)  # type: ignore[arg-type]
        taker.prepare([wanted], PLENTY, elsewhere=taker.missing([wanted]))
        return exchange(ends[1], taker, HOSTS, lambda: False)

    assert of_all(2, member) == [0, 0]
    taker.install([wanted], lambda: 0)
    assert_holds(model, whole, wanted)


def test_an_exchange_that_nobody_wants_any_more_ends(directory: Path) -> None:
    (_, held), _ = members(directory)
    with pytest.raises(ReadingStopped):
        exchange(thread_group(2)[0], held, HOSTS, lambda: True)


def test_one_that_woke_gives_to_one_that_loaded_the_same_weights(
    directory: Path,
) -> None:
    members = Members(directory, 2, dtype="float32")
    woken, fresh = members.workers
    for worker in members.workers:
        assert worker.arithmetic()[0].weights  # as each tells before it enters a group
    assert woken.give_back(MemoryPart.WEIGHTS)
    woken.new_weights.prepare("")
    woken.new_weights.switch()
    ends, wanted = thread_group(2), list(range(woken._info.num_experts))
    missing = fresh._held.missing([wanted])
    assert missing

    def member(rank: int) -> int:
        if rank == 0:
            return exchange(ends[0], woken._held, HOSTS, lambda: False)
        fresh._held.prepare([wanted], PLENTY, elsewhere=missing)
        return exchange(ends[1], fresh._held, HOSTS, lambda: False)

    assert of_all(2, member) == [0, len(missing)], "experts went over the link and were read all the same"
    members.close()
