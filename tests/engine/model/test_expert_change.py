"""Experts that move between serving instances: right rows and order, the same tokens."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from torch.fx.experimental.proxy_tensor import make_fx

from coordinator.messages import GroupPlan
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor import make_executor
from engine.executor.uni import UniExecutor
from engine.executor_contract import SpreadExecutor
from engine.groups.stepping import Agreement
from engine.messages import Submit
from engine.model.checkpoint import CheckpointError, ReadingStopped, read_model_info
from engine.model.expert_change import HeldExperts
from engine.model.expert_weights import ExpertShare, expert_modules, read_experts
from engine.sampling import SamplingParams
from parallel.communicators.base import Communicator
from parallel.expert_parallel import SLOTS_ATTRIBUTE, ExpertParallel
from parallel.placement import Placement, assign_experts
from parallel.replicas import replicas_at
from tests.engine.groups.test_lockstep_engine import (
    BLOCK_SIZE,
    NUM_REQUESTS,
    ROUTER,
    directory,
    length,
    prompt,
    reference,
)
from tests.engine.invariance.answers import Line, line
from tests.engine.model.test_expert_weights import load
from tests.parallel.thread_group import thread_group
from tests.waiting import until

__all__ = ["directory", "reference"]  # fixtures

PLENTY = 1 << 30


@pytest.fixture(scope="module")
def whole(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def assert_holds(model: Any, whole: Any, experts: Sequence[int]) -> None:
    for path, module in expert_modules(model).items():
        assert module.num_experts == len(experts)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, getattr(whole.get_submodule(path), name)[list(experts)])


@pytest.mark.parametrize("free_bytes", [PLENTY, 0], ids=["beside", "layer by layer"])
def test_a_model_gets_other_experts(directory: Path, whole: Any, free_bytes: int) -> None:
    num_experts = read_model_info(directory).num_experts
    model = load(directory, ExpertShare(assign_experts(num_experts, 2), 0))
    held = HeldExperts(model, directory, range(num_experts // 2))
    for wanted in ([0, num_experts - 1], [num_experts - 1], range(num_experts), [], [1, 2], [1, 2]):
        before = list(held.experts[0])
        missing = len(set(wanted) - set(before))
        free = max(free_bytes, missing * held.bytes_per_expert)
        assert held.prepare([wanted], free) == missing
        assert_holds(model, whole, before)
        held.install([wanted], lambda: 0)
        assert_holds(model, whole, list(wanted))
        assert not held.is_prepared([[0]])


def assert_in_slots(model: Any, whole: Any, experts: Sequence[int]) -> None:
    """Tables lead from local numbers to rows of these experts, and none to any other."""
    for path, module in expert_modules(model).items():
        slots = getattr(module, SLOTS_ATTRIBUTE).tolist()
        assert slots[len(experts) :] == [module.num_experts] * (module.num_experts + 1 - len(experts))
        for name, parameter in module.named_parameters():
            rows = parameter[slots[: len(experts)]]
            assert torch.equal(rows, getattr(whole.get_submodule(path), name)[list(experts)])


def places_of(model: Any) -> list[int]:
    """Addresses that a captured graph reads."""
    return [
        tensor.data_ptr()
        for module in expert_modules(model).values()
        for tensor in (*module.parameters(), getattr(module, SLOTS_ATTRIBUTE))
    ]


def test_experts_move_between_slots_and_tensors_stay(directory: Path, whole: Any) -> None:
    """Also where more come than there are free slots; more than all slots need others."""
    num_experts = read_model_info(directory).num_experts
    half = num_experts // 2
    model = load(directory, ExpertShare(assign_experts(num_experts, 2), 0))
    held = HeldExperts(model, directory, range(half), num_experts=num_experts)
    held.use_slots(half)
    assert held.slots is not None
    assert held.slots.capacity == half + 1
    assert held.max_experts(0) == half + 1
    before, places = list(range(half)), places_of(model)
    last = num_experts - 1
    for wanted in ([0, last], [last], [1, 2, last], [], range(half, num_experts), [0, half], [0, half]):
        missing = len(set(wanted) - set(before))
        assert held.prepare([wanted], 0) == missing, "free slots take no memory"
        assert_in_slots(model, whole, before)
        held.install([wanted], lambda: 0)
        before = list(wanted)
        assert_in_slots(model, whole, before)
        assert places_of(model) == places
    most = num_experts * held.bytes_per_expert
    for free in range(0, most, held.bytes_per_expert // 2):
        fit = held.max_experts(free)
        held.prepare([range(min(fit, num_experts))], free)
        if fit < num_experts:
            with pytest.raises(CheckpointError, match="do not fit"):
                held.prepare([range(fit + 1)], free)
    held.prepare([range(num_experts)], PLENTY)
    assert_in_slots(model, whole, before)
    held.install([range(num_experts)], lambda: 0)
    assert_in_slots(model, whole, list(range(num_experts)))
    assert places_of(model) != places


def test_a_captured_layer_computes_with_the_experts_that_came(directory: Path, whole: Any) -> None:
    """The capture is a list of operators over tensors, without what Python would look up."""
    num_experts = read_model_info(directory).num_experts
    model = load(directory, ExpertShare(assign_experts(num_experts, 2), 0))
    held = HeldExperts(model, directory, range(num_experts // 2), num_experts=num_experts)
    held.use_slots(num_experts // 2)
    module = next(iter(expert_modules(model).values()))
    first = assign_experts(num_experts, 2)
    experts = ExpertParallel(first, 0, "allgather_reducescatter", pair_by_pair)
    experts.adds_by_choice = True
    group = thread_group(2)[0]
    hidden = torch.randn(6, module.gate_up_proj.shape[1 if module.is_transposed else 2])
    ids = torch.rand(6, num_experts).topk(2).indices
    captured = None
    for placement in (first, assign_experts(num_experts, 2, "round_robin"), copied(num_experts)):
        held.prepare([placement.experts_of(0)], PLENTY)
        held.install([placement.experts_of(0)], lambda: 0)
        experts.join(group, placement)
        expected = experts.by_choice(module, hidden, ids)
        mine = replicas_at(placement, 0).owners(0, ids.numpy().reshape(-1), np.arange(12) // 2, 6) == 0
        assert (expected.abs().sum(1) > 0).tolist() == mine.tolist()
        if captured is None:
            captured = make_fx(partial(experts.by_choice, module))(hidden, ids)
        assert torch.equal(captured(hidden, ids), expected)


def copied(num_experts: int) -> Placement:
    """Two ranks, of which both have every third expert."""
    alike = tuple((0, 1) if expert % 3 == 0 else (expert % 2,) for expert in range(num_experts))
    return Placement((), 2, replicas=(alike,))


def pair_by_pair(
    module: Any, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Experts of [n, 1] pairs, by operators alone; numbers beyond the last give zeros."""
    is_here = expert_ids < module.num_experts
    at = torch.where(is_here, expert_ids, 0)[:, 0]

    def product(name: str, rows: torch.Tensor) -> torch.Tensor:
        weight = getattr(module, name)[at]
        weight = weight.transpose(1, 2) if module.is_transposed else weight
        outputs = (weight * rows[:, None]).sum(-1)
        return outputs + getattr(module, f"{name}_bias")[at] if module.has_bias else outputs

    return product("down_proj", module._apply_gate(product("gate_up_proj", hidden))) * is_here * weights


def test_what_does_not_fit_is_refused(directory: Path) -> None:
    num_experts = read_model_info(directory).num_experts
    model = load(directory, ExpertShare(assign_experts(num_experts, 2), 0))
    held = HeldExperts(model, directory, range(num_experts // 2))
    free = 2 * held.bytes_per_expert - 1
    assert held.max_experts(free) == num_experts // 2 + 1
    assert held.max_experts(-1) == num_experts // 2
    limited = HeldExperts(model, directory, range(2), 3 * held.bytes_per_expert)
    limited.check_limit()
    assert limited.max_experts(2**40) == 3, "whatever memory is free"
    limited.copies = 2
    with pytest.raises(CheckpointError, match="more than --expert-memory-bytes"):
        limited.check_limit()
    limited.copies = 1
    limited.check_limit(3)
    with pytest.raises(CheckpointError, match=r"4 experts of .* more than .* or lower num_redundant_experts"):
        limited.check_limit(4)
    with pytest.raises(CheckpointError, match=r"2 more experts of .* do not fit"):
        held.prepare([range(num_experts // 2 + 2)], free)
    with pytest.raises(ReadingStopped):
        held.prepare([range(num_experts)], PLENTY, lambda: True)
    assert not held.is_prepared([range(num_experts)])


def test_copies_that_do_not_fit_are_refused_at_the_start_with_the_numbers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = read_model_info(directory)
    eplb = DeviceConfig(enable_eplb=True, eplb_config=f'{{"num_redundant_experts": {info.num_experts}}}')
    executor = UniExecutor(EngineConfig(device=eplb), info, 1, (0, 2))
    model = load(directory, ExpertShare(assign_experts(info.num_experts, 2), 0))
    held = executor._held = HeldExperts(model, directory, range(info.num_experts // 2))
    needed = 2 * (info.num_experts // 2) * held.bytes_per_expert
    monkeypatch.setattr("engine.host.memory.available_memory", lambda: needed)
    assert executor._bytes_for_copies() == needed, "as many again, which kernels lay out once more"
    monkeypatch.setattr("engine.host.memory.available_memory", lambda: needed - 1)
    numbers = rf"{info.num_experts // 2} more experts of each layer .* lower num_redundant_experts"
    with pytest.raises(CheckpointError, match=numbers):
        executor._bytes_for_copies()
    monkeypatch.setattr("engine.host.memory.available_memory", lambda: needed + 1000)
    assert executor._bytes_for_copies(1000) == needed
    with pytest.raises(CheckpointError, match=numbers):
        executor._bytes_for_copies(1001)


def test_a_worker_holds_no_more_copies_than_there_are_experts(directory: Path) -> None:
    info = read_model_info(directory)
    eplb = DeviceConfig(enable_eplb=True, eplb_config='{"num_redundant_experts": 4000}')
    assert UniExecutor(EngineConfig(device=eplb), info, 1, (0, 2))._most_held == info.num_experts


def test_experts_that_were_read_for_others_than_are_held_now_are_read_again(
    directory: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take their place while they are read."""
    num_experts = read_model_info(directory).num_experts
    model = load(directory, ExpertShare(assign_experts(num_experts, 2), 0))
    held = HeldExperts(model, directory, range(num_experts // 2))
    between, last = [1], [0, 1, num_experts - 1]
    held.prepare([between], PLENTY)
    prepared, reads = held._next, []
    assert prepared is not None

    def read_late(*args: Any) -> Any:
        rows = read_experts(*args)
        reads.append(args[2])
        if len(reads) == 1:  # the steps' thread is faster
            prepared.install(held._layers)
            held.experts = ((1,),) * len(held.experts)
        return rows

    monkeypatch.setattr("engine.model.expert_change.read_experts", read_late)
    held.prepare([last], PLENTY)
    assert_holds(model, whole, between)
    assert not held.is_prepared([last])
    held.install([last], lambda: PLENTY)
    layers = len(held.experts)
    assert reads == [[[num_experts - 1]] * layers, [[0, num_experts - 1]] * layers]
    assert_holds(model, whole, last)


class Marching:
    """Stepping that never sleeps: every step happens on all, with any rows."""

    must_step = True

    def __init__(self, group: Communicator) -> None:
        self._group = group

    def notice_work(self) -> None:
        return

    def agree(self, num_tokens: int, queued_prefill: int, longest: int, in_flight: int = 0) -> Agreement:
        sizes = [row[0] for row in self._group.all_gather_ints([num_tokens])]
        return Agreement(runs=True, sizes=tuple(sizes))


class March:
    """Instances as threads, in groups that change while requests run."""

    num_logprobs: int | None = None

    def __init__(self, directory: Path) -> None:
        self._info = read_model_info(directory)
        self._config = EngineConfig(
            model=ModelConfig(model=str(directory), dtype="float32"),
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=8),
        )
        self.outputs: dict[int, list[int]] = {index: [] for index in range(NUM_REQUESTS)}
        self.lines: dict[int, list[Line]] = {index: [] for index in range(NUM_REQUESTS)}
        """Log-probabilities, where they are wanted."""
        self._at: dict[int, int] = {}
        self.executors: dict[int, SpreadExecutor] = {}
        self._cores: dict[int, EngineCore] = {}

    def start(self, rank: int, size: int) -> None:
        executor = make_executor(self._config, self._info, 1, (rank, size))
        executor.load(lambda _phase: None)
        executor.allocate(60)
        self.executors[rank] = executor
        self._cores[rank] = EngineCore(self._config, self._info, executor, num_blocks=60, max_model_len=512)

    def regroup(self, ranks: Sequence[int], owners: Sequence[int]) -> None:
        """Go on with these instances, with the experts at ``owners`` (indices into ranks)."""
        self.place(ranks, Placement(tuple(owners), len(ranks)))

    def place(self, ranks: Sequence[int], placement: Placement) -> None:
        """Go on with these instances, and such a placement."""
        form = GroupPlan(epoch=1, store="", peers=[], owners=placement.owners, replicas=placement.replicas)
        for group, rank in zip(thread_group(len(ranks)), ranks, strict=True):
            self.executors[rank].prepare(form, group.rank, PLENTY, lambda: False)
            self.executors[rank].join(group, placement)
            self._cores[rank].stepping = Marching(group)
        self._ranks = list(ranks)

    def submit(self, index: int, rank: int) -> None:
        """Submit a request, with the tokens that it has already, if any."""
        self._at[index] = rank
        params = SamplingParams(
            temperature=0.0, max_tokens=length(index), ignore_eos=True, logprobs=self.num_logprobs
        )
        request = Submit(
            request=index, request_id=str(index), prompt_ids=prompt(index), params=params, seed=0,
            output_ids=list(self.outputs[index]),
        )  # fmt: skip
        assert self._cores[rank].submit(ROUTER, request) is None

    def lose(self, rank: int) -> list[int]:
        """Remove an instance; returns the requests that it had."""
        del self.executors[rank], self._cores[rank]
        return [
            index for index, at in self._at.items() if at == rank and len(self.outputs[index]) < length(index)
        ]

    def steps(self, count: int) -> None:
        failed: list[BaseException] = []

        def march(core: EngineCore) -> None:
            try:
                for _ in range(count):
                    for delta in core.step().get(ROUTER, []):
                        self.outputs[delta.request] += delta.token_ids
                        self.lines[delta.request] += map(line, delta.logprobs or ())
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=march, args=(self._cores[rank],)) for rank in self._ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed

    def finish(self) -> None:
        """Step until all requests have their tokens."""

        def all_is_said() -> bool:
            self.steps(4)
            return all(len(self.outputs[index]) == length(index) for index in self._at)

        until(all_is_said, 240)


def test_three_two_and_three_instances_give_the_same_tokens(
    directory: Path, reference: list[list[int]]
) -> None:
    march = March(directory)
    num_experts = read_model_info(directory).num_experts
    for rank in range(3):
        march.start(rank, 3)
    march.regroup([0, 1, 2], assign_experts(num_experts, 3).owners)
    for index in range(NUM_REQUESTS // 2):
        march.submit(index, index % 3)
    march.steps(4)
    orphans = march.lose(1)
    assert orphans
    march.regroup([0, 2], assign_experts(num_experts, 2, "round_robin").owners)
    for index in orphans:
        march.submit(index, 2)
    march.steps(5)
    march.start(1, 3)
    owners = [2, 1, 0, 0, 2, 1, 0, 1][:num_experts]
    march.regroup([0, 1, 2], owners)
    for rank in range(3):
        (held,) = march.executors[rank].experts_held()
        assert {tuple(of_layer) for of_layer in held} == {
            tuple(expert for expert, owner in enumerate(owners) if owner == rank)
        }
    for index in range(NUM_REQUESTS // 2, NUM_REQUESTS):
        march.submit(index, index % 3)
    march.finish()
    assert [march.outputs[index] for index in range(NUM_REQUESTS)] == reference


class DeviceMarch(March):
    """The same on pretended devices, whose groups carry their tensors."""

    num_logprobs = 2

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        device = DeviceConfig(device="cpu", numerics="torch", enable_eplb=True)
        self._config = msgspec.structs.replace(self._config, device=device)

    def start(self, rank: int, size: int) -> None:
        super().start(rank, size)
        executor = self.executors[rank]
        assert isinstance(executor, UniExecutor)
        assert executor._model is not None
        assert executor._held is not None
        executor._let_experts_move(executor._model, executor._held)
        assert executor._model.experts is not None
        executor._model.experts._local_experts = pair_by_pair


def test_experts_that_move_between_devices_while_requests_run_change_no_bit(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves, copies and copies dropped again, in the middle of answers."""
    monkeypatch.setattr(ExpertParallel, "_adds_on_device", lambda *_: True)
    num_experts = read_model_info(directory).num_experts
    first, (copies,) = assign_experts(num_experts, 2), copied(num_experts).replicas
    found = []
    for moves in (False, True):
        march, ranks = DeviceMarch(directory), [0, 1]
        for rank in ranks:
            march.start(rank, 2)
        march.place(ranks, first)
        for index in range(NUM_REQUESTS):
            march.submit(index, index % 2)
        layers = len(march.executors[0].experts_held()[0])
        for placement in (
            Placement((), 2, replicas=(copies,) * layers),
            assign_experts(num_experts, 2, "round_robin"),
            Placement((), 2, replicas=(copies, *[copies[::-1]] * (layers - 1))),
            first,
        ):
            march.steps(6)
            if moves:
                march.place(ranks, placement)
        march.finish()
        assert all(march.lines.values())
        found.append(march.lines)
    assert found[0] == found[1]
