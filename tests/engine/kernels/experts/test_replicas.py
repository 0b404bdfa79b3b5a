"""Copies of experts on several members: the bits of one instance, after every move."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from engine.config.quantization import OnlineName
from engine.kernels.core import library
from engine.kernels.products.quantized import EightBitPanels, QuantizedPanels
from engine.model.checkpoint import read_model_info
from engine.model.expert_change import HeldExperts
from parallel.communicators.shared_memory import SharedMemoryCommunicator
from parallel.placement import Placement, held_by_rank
from tests.engine.kernels.exchange.linked_group import linked_group, of_all
from tests.engine.kernels.exchange.test_native_exchange import Member, run, together
from tests.engine.kernels.test_kernels import SCENARIO
from tests.engine.tiny_models import make_tiny_model

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

TOKENS = [sum(count for _, _, count in rows) for rows in SCENARIO]
PLANS: list[list[int | None]] = [[0, None, 1, 2], [None, 0, 1, 2], [0, 1, None, 2]]
"""Steps of the scenario by member, in their order."""
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", num_experts=8)


@cache
def expected(
    directory: Path, dtype: torch.dtype, quantization: OnlineName | None = None
) -> list[torch.Tensor]:
    """Logits of the scenario in an instance with all experts.

    Models are loaded by one thread.
    """
    alone = Member(directory, 0, 1, dtype, quantization).program
    with torch.inference_mode():
        return [run(alone, rows) for rows in SCENARIO]


class Moving:
    """Members whose experts move between groups."""

    def __init__(
        self, directory: Path, size: int, dtype: torch.dtype, quantization: OnlineName | None = None
    ) -> None:
        self.size, self.dtype, self._known = size, dtype, expected(directory, dtype, quantization)
        self.members = [Member(directory, rank, size, dtype, quantization) for rank in range(size)]
        self.num_layers = len(self.members[0].model.expert_layers)
        self.num_experts = read_model_info(directory).num_experts
        self.held = [
            HeldExperts(each.model.module, directory, each.placement.experts_of(rank), online=quantization)
            for rank, each in enumerate(self.members)
        ]
        for held, member in zip(self.held, self.members, strict=True):
            held.on_built = member.program.prepare_experts

    def draw(self, chance: random.Random) -> Placement:
        """Copies of experts on any members, and at least one expert on each."""
        while True:
            layers = [
                tuple(
                    tuple(sorted(chance.sample(range(self.size), chance.choice([1, 1, min(2, self.size)]))))
                    for _ in range(self.num_experts)
                )
                for _ in range(self.num_layers)
            ]
            if all(
                rank in {r for ranks in layer for r in ranks} for layer in layers for rank in range(self.size)
            ):
                return Placement((), self.size, tuple(layers))

    def move(self, placement: Placement) -> None:
        for rank, (held, member) in enumerate(zip(self.held, self.members, strict=True)):
            (experts,) = held_by_rank(placement, 1, rank)
            held.prepare(experts, PLENTY)
            held.install(experts, lambda: 0)
            member.placement = placement

    def play(self, rank: int, *, natively: bool = True) -> None:
        for now in zip(*PLANS[: self.size], strict=True):
            sizes = [0 if step is None else TOKENS[step] for step in now]
            mine, member = now[rank], self.members[rank]
            if mine is not None:
                found = member.step(SCENARIO[mine], sizes)
                assert found is not None
                assert torch.equal(found, self._known[mine]), "bit for bit"
            elif natively:
                member.step([], sizes)
            else:
                self._serve(member, sizes)

    def _serve(self, member: Member, sizes: list[int]) -> None:
        """Take part in a step without rows, in an exchange that is not native."""
        experts, hidden = member.model.experts, member.model.hidden_size
        assert experts is not None
        experts.begin(sizes)
        nothing = torch.empty(0, hidden, dtype=self.dtype), torch.empty(0, 2, dtype=torch.int64)
        with torch.inference_mode():
            for layer in member.model.expert_layers:
                experts.forward(layer, *nothing, torch.empty(0, 2, dtype=self.dtype))

    def computed(self) -> int:
        return sum(
            int(each.model.experts.tokens_per_expert.sum()) for each in self.members if each.model.experts
        )


def over_shared_memory(moving: Moving, *, natively: bool = True) -> None:
    def body(rank: int, group: SharedMemoryCommunicator) -> None:
        moving.members[rank].join(group, natively=natively or rank != 0)
        moving.play(rank, natively=natively)

    together(moving.size, body)


def over_links(moving: Moving) -> None:
    group = linked_group(moving.size)

    def body(rank: int) -> None:
        moving.members[rank].join(group[rank])
        moving.play(rank)

    of_all(moving.size, body)
    for each in group:
        each.close()


def through_python(moving: Moving) -> None:
    over_shared_memory(moving, natively=False)


WAYS: list[Callable[[Moving], None]] = [over_shared_memory, over_links, through_python]


@pytest.mark.diagonal("dtype", "way", columns=2, each=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [2, 3])
def test_no_bit_depends_on_where_the_copies_are(
    directory: Path, size: int, way: Callable[[Moving], None], dtype: torch.dtype
) -> None:
    moving, chance = Moving(directory, size, dtype), random.Random(size)
    for _ in range(2):
        moving.move(moving.draw(chance))
        before = moving.computed()
        way(moving)
        passes = sum(TOKENS[step] for plan in PLANS[:size] for step in plan if step is not None)
        assert moving.computed() - before == 2 * passes * moving.num_layers, "every pair once"


@pytest.mark.parametrize("quantization", ["int8", "int8_per_channel_weight_only"])
def test_codes_go_with_the_experts(directory: Path, quantization: OnlineName) -> None:
    moving, chance = Moving(directory, 2, torch.bfloat16, quantization), random.Random(5)
    for _ in range(2):
        moving.move(moving.draw(chance))
        over_shared_memory(moving)
        kinds = {
            type(moving.members[0].program.exchange.products.packed(layer).up)
            for layer in moving.members[0].model.expert_layers
        }
        assert kinds == {EightBitPanels if quantization == "int8" else QuantizedPanels}


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("way", WAYS)
def test_no_bit_changes_over_a_hundred_moves(directory: Path, way: Callable[[Moving], None]) -> None:
    moving, chance = Moving(directory, 3, torch.bfloat16), random.Random(7)
    for _ in range(100):
        moving.move(moving.draw(chance))
        way(moving)


def test_the_weights_that_a_member_gets_are_laid_out_before_it_changes(directory: Path) -> None:
    """Only layers that change are: the others keep what they have."""
    moving = Moving(directory, 2, torch.float32)
    first = moving.draw(random.Random(1))
    moving.move(first)
    over_shared_memory(moving)
    member, held = moving.members[0], moving.held[0]
    packed = {
        id(layer): member.program.exchange.products.packed(layer) for layer in member.model.expert_layers
    }
    other = tuple((expert // 4,) for expert in range(moving.num_experts))
    then = Placement((), 2, (first.replicas[0], *[other] * (moving.num_layers - 1)))
    (experts,) = held_by_rank(then, 1, 0)
    held.prepare(experts, PLENTY)
    ready = {key: entry[1] for key, entry in member.program.exchange.products._ready.items()}
    held.install(experts, lambda: 0)
    kept, *changed = member.model.expert_layers
    assert member.program.exchange.products.packed(kept) is packed[id(kept)]
    assert changed
    found = [member.program.exchange.products.packed(layer) for layer in changed]
    assert all(any(packed is known for known in ready.values()) for packed in found)
