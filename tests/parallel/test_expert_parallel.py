"""Experts over shared memory, read where peers wrote: the bits of a single rank."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parallel import expert_parallel
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.expert_parallel import Dispatch, ExpertParallel
from parallel.links.forming_group import FormingGroup
from parallel.links.meeting import MeetingHost
from parallel.placement import Placement, assign_experts
from parallel.rounds.arithmetic import plain
from tests.parallel.other_device import DEVICE, Elsewhere, OtherDevice
from tests.parallel.thread_group import thread_group

MEMBERS, EXPERTS, HIDDEN, TOP_K = 3, 7, 128, 2
STEPS = [(5, 0, 2), (900, 300, 1), (0, 0, 1), (64, 700, 650), (3, 3, 3)]
"""Tokens of each member; some make more of results than is worth moving twice."""
LAYERS = 3
PATIENCE = 60.0
CPU = torch.device("cpu")


class Scaling:
    """Multiplies an expert's rows by the expert's number, now and then with a delay."""

    def __init__(self, placement: Placement, rank: int) -> None:
        self._factors = torch.tensor([1.3 ** (1 + expert) for expert in placement.experts_of(rank)])
        self._pace = random.Random(rank)

    def compute(self, module: Any, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        time.sleep(self._pace.choice([0, 0, 0.003]))
        return (rows * self._factors.repeat_interleave(torch.tensor(counts))[:, None]).to(rows.dtype)


def experts(size: int, rank: int, dispatch: Dispatch) -> ExpertParallel:
    placement = assign_experts(EXPERTS, size, "round_robin")
    made = ExpertParallel(placement, rank, dispatch, lambda *_: pytest.fail("not on a CPU"))
    made.use_products(Scaling(placement, rank))
    return made


def experts_elsewhere(size: int, rank: int, dispatch: Dispatch) -> ExpertParallel:
    """The same on another device than the CPU."""
    placement = assign_experts(EXPERTS, size, "round_robin")
    factors = torch.tensor([1.3 ** (1 + expert) for expert in placement.experts_of(rank)])

    def compute(
        module: Any, rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        assert rows.device == numbers.device == weights.device == DEVICE
        return (rows * factors.to(DEVICE).index_select(0, numbers[:, 0])[:, None]).to(rows.dtype)

    return ExpertParallel(placement, rank, dispatch, compute)


def tokens(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = STEPS[step][rank]
    hidden = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
    ids = torch.rand(rows, EXPERTS, generator=generator).topk(TOP_K).indices
    return hidden, ids, torch.rand(rows, TOP_K, generator=generator).to(dtype)


def serve(
    experts: ExpertParallel, rank: int, dtype: torch.dtype, device: torch.device = CPU, module: Any = None
) -> list[torch.Tensor]:
    """The results of all steps: as many layers, each fed by the one before."""
    results = []
    with torch.inference_mode():
        for step, sizes in enumerate(STEPS):
            hidden, ids, weights = (each.to(device) for each in tokens(step, rank, dtype))
            experts.begin(sizes)
            for _ in range(LAYERS):
                hidden = experts.forward(module, hidden, ids, weights)
            results.append(hidden)
    return results


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dispatch", ["allgather_reducescatter", "all_to_all"])
def test_members_have_the_bits_of_one(dispatch: Dispatch, dtype: torch.dtype) -> None:
    meeting = MeetingHost("127.0.0.1")

    def member(rank: int) -> list[torch.Tensor]:
        group = SharedMemoryCommunicator(FormingGroup(meeting, rank, MEMBERS, timeout=PATIENCE))
        mine = experts(MEMBERS, rank, dispatch)
        mine.join(group, mine.placement)
        found = serve(mine, rank, dtype)
        group.close()
        return found

    with ThreadPoolExecutor(MEMBERS) as pool:
        found = list(pool.map(member, range(MEMBERS)))
    for rank in range(MEMBERS):
        alone = serve(experts(1, 0, dispatch), rank, dtype)
        assert all(torch.equal(one, right) for one, right in zip(found[rank], alone, strict=True))


@pytest.mark.parametrize("dispatch", ["allgather_reducescatter", "all_to_all"])
def test_tensors_of_another_device_travel_through_host_memory(dispatch: Dispatch) -> None:
    """Communicators refuse them; what comes back is where it was."""
    meeting, dtype = MeetingHost("127.0.0.1"), torch.bfloat16

    def member(rank: int) -> list[torch.Tensor]:
        group = SharedMemoryCommunicator(FormingGroup(meeting, rank, MEMBERS, timeout=PATIENCE))
        with OtherDevice():
            mine = experts_elsewhere(MEMBERS, rank, dispatch)
            mine.join(group, mine.placement)
            found = serve(mine, rank, dtype, DEVICE)
        group.close()
        return found

    with ThreadPoolExecutor(MEMBERS) as pool:
        found = list(pool.map(member, range(MEMBERS)))
    for rank in range(MEMBERS):
        alone = serve(experts(1, 0, dispatch), rank, dtype)
        for there, here in zip(found[rank], alone, strict=True):
            assert isinstance(there, Elsewhere)
            assert there.device == DEVICE
            assert torch.equal(there.inside, here)


def test_tensors_that_a_group_of_devices_carries_never_see_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums are taken by rank, so they differ from those of one rank by rounding."""
    groups = thread_group(MEMBERS)
    layers = SimpleNamespace()

    def member(rank: int) -> tuple[list[torch.Tensor], list[int]]:
        groups[rank].device = DEVICE
        placement = assign_experts(EXPERTS, MEMBERS, "round_robin")
        factors = torch.tensor([1.3 ** (1 + expert) for expert in placement.experts_of(rank)] + [1e9])

        def compute(
            module: Any, rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            assert module._is_expert_parallel, "numbers beyond the last are other ranks'"
            by_choice = factors.to(DEVICE).index_select(0, numbers.reshape(-1)).view(numbers.shape) * weights
            return (rows * by_choice.sum(1, keepdim=True)).to(rows.dtype)

        with OtherDevice():
            mine = ExpertParallel(placement, rank, "allgather_reducescatter", compute)
            mine.join(groups[rank], placement)
            found = serve(mine, rank, torch.float32, DEVICE, layers)
            mine.take_counts()
        return found, mine.tokens_per_expert[0].tolist()

    monkeypatch.setattr(expert_parallel, "_on_host", lambda _: pytest.fail("through the host"))
    with ThreadPoolExecutor(MEMBERS) as pool:
        found = list(pool.map(member, range(MEMBERS)))
    monkeypatch.undo()
    for rank in range(MEMBERS):
        alone = serve(experts(1, 0, "allgather_reducescatter"), rank, torch.float32)
        for there, here in zip(found[rank][0], alone, strict=True):
            assert isinstance(there, Elsewhere)
            torch.testing.assert_close(there.inside, here, rtol=1e-5, atol=1e-5)
    counts = [sum(each) for each in zip(*[counts for _, counts in found], strict=True)]
    chosen = [
        tokens(step, rank, torch.float32)[1].reshape(-1)
        for step in range(len(STEPS))
        for rank in range(MEMBERS)
    ]
    assert counts == (LAYERS * torch.cat(chosen).bincount(minlength=EXPERTS)).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_that_move_between_devices_change_no_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With copies and without; steps before and after are those of one rank."""
    groups, chance = thread_group(MEMBERS), random.Random(3)
    alike = tuple(tuple(sorted(chance.sample(range(MEMBERS), chance.randint(1, 3)))) for _ in range(EXPERTS))
    placements = [
        assign_experts(EXPERTS, MEMBERS, "round_robin"),
        assign_experts(EXPERTS, MEMBERS, "linear"),
        Placement((), MEMBERS, replicas=(alike,)),
        Placement((), MEMBERS, replicas=(tuple((expert % MEMBERS,) for expert in range(EXPERTS)),)),
    ]

    def member(rank: int) -> tuple[list[list[torch.Tensor]], list[int]]:
        groups[rank].device = DEVICE
        capacity = EXPERTS + 1
        module = SimpleNamespace()
        factors = torch.full((capacity + 1,), 1e9)

        def compute(
            module: Any, rows: torch.Tensor, numbers: torch.Tensor, weights: torch.Tensor
        ) -> torch.Tensor:
            by_slot = factors.to(DEVICE).index_select(0, numbers.reshape(-1))[:, None]
            return torch.where(numbers == capacity, 0.0, rows * by_slot).to(rows.dtype) * weights

        found = []
        with OtherDevice():
            slots = torch.full((capacity + 1,), capacity).to(DEVICE)
            setattr(module, expert_parallel.SLOTS_ATTRIBUTE, slots)
            mine = ExpertParallel(placements[0], rank, "allgather_reducescatter", compute)
            mine.adds_by_choice = True
            for placement in placements:
                held = placement.experts_of(rank)
                places = random.Random(rank + len(found)).sample(range(capacity), len(held))
                rows = torch.tensor([*places, *[capacity] * (capacity + 1 - len(held))])
                slots.copy_(rows.to(DEVICE))
                factors[:] = 1e9
                factors[places] = torch.tensor([1.3 ** (1 + expert) for expert in held])
                mine.join(groups[rank], placement)
                tables = mine._tables_on(DEVICE)
                found.append(serve(mine, rank, dtype, DEVICE, module))
                assert mine._tables is tables, "what a graph reads stays where it is"
            mine.take_counts()
        return found, mine.tokens_per_expert[0].tolist()

    monkeypatch.setattr(expert_parallel, "_on_host", lambda _: pytest.fail("through the host"))
    with ThreadPoolExecutor(MEMBERS) as pool:
        found = list(pool.map(member, range(MEMBERS)))
    monkeypatch.undo()
    for rank in range(MEMBERS):
        alone = serve(experts(1, 0, "allgather_reducescatter"), rank, dtype)
        for of_placement in found[rank][0]:
            for there, here in zip(of_placement, alone, strict=True):
                assert isinstance(there, Elsewhere)
                assert torch.equal(there.inside, here)
    counts = [sum(each) for each in zip(*[counts for _, counts in found], strict=True)]
    chosen = [
        tokens(step, rank, dtype)[1].reshape(-1) for step in range(len(STEPS)) for rank in range(MEMBERS)
    ]
    pairs = torch.cat(chosen).bincount(minlength=EXPERTS)
    assert counts == (LAYERS * len(placements) * pairs).tolist(), "each pair is computed once"


def test_the_other_device_is_another_one() -> None:
    with OtherDevice():
        there = torch.ones(2).to(DEVICE)
        assert not there.is_cpu
        assert there.cpu().is_cpu
        with pytest.raises(AssertionError, match="on different devices"):
            there + torch.ones(2)
        with pytest.raises(ValueError, match="CPU tensors only"):
            plain(there)
