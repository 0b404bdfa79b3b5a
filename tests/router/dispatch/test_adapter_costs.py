"""Cost of adapters in the choice of an instance."""

from __future__ import annotations

import msgspec
import pytest

from engine.messages import AdapterUse, Capacity
from engine.sampling import SamplingParams
from router.dispatch.adapter_costs import SWAP_COST, TURN_COST, adapter_cost
from router.dispatch.chooser import Chooser
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.pool import NO_REPORT, Pool
from router.mesh import MeshError, Prompt
from tests.router.dispatch.test_mesh_parts import member, view


@pytest.mark.parametrize(
    ("active", "laid_out", "sent", "cost"),
    [
        ([], [], [], SWAP_COST),
        ([], ["x"], [], 0.0),
        (["x"], ["x"], [], 0.0),
        (["x"], [], [], 0.0),
        ([], [], ["x"], 0.0),
        (["a"], ["a"], [], SWAP_COST),
        (["a", "b"], ["a", "b"], [], SWAP_COST + TURN_COST),
        (["a"], ["a"], ["b", "c"], SWAP_COST + 2 * TURN_COST),
        (["a", "b"], ["a", "x"], [], TURN_COST),
    ],
)
def test_an_adapter_costs_what_it_waits_for(
    active: list[str], laid_out: list[str], sent: list[str], cost: float
) -> None:
    use = AdapterUse(2, [], [], active, laid_out)
    assert adapter_cost("x", use, sent) == cost
    assert adapter_cost("", use, sent) == 0.0
    assert adapter_cost("x", None, sent) == 0.0


def capacity(*lacks: str) -> Capacity:
    return Capacity(
        block_size=4,
        num_blocks=100,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_num_queued_reqs=8,
        lacks_adapters=lacks,
    )


class World:
    """Two instances, one of which has requests with an adapter."""

    def __init__(self) -> None:
        self.pool, self.ledger = Pool(), Ledger()
        self.pool.apply(view(member("a", 0), member("b", 1)), 0.0)
        for instance in self.pool:
            instance.attached, instance.capacity = True, capacity()
        self.chooser = Chooser(self.pool, self.ledger)

    def entry(self, adapter: str) -> Entry:
        prompt = Prompt("r", [1, 2, 3], SamplingParams(max_tokens=4), seed=0, adapter=adapter)
        return Entry(prompt)

    def choice(self, adapter: str) -> int:
        return self.chooser.choose(self.entry(adapter), 0.0).rank

    def report(self, rank: int, use: AdapterUse) -> None:
        instance = next(each for each in self.pool if each.rank == rank)
        instance.take_report(msgspec.structs.replace(NO_REPORT, adapters=use), 0.0)


def test_requests_go_where_their_adapter_is() -> None:
    world = World()
    world.report(0, AdapterUse(1, [], [], ["x"], ["x"]))
    world.report(1, AdapterUse(1, [], [], ["y"], ["y"]))
    assert [world.choice(adapter) for adapter in ("x", "y", "x", "y")] == [0, 1, 0, 1]


def test_what_was_sent_a_moment_ago_counts() -> None:
    world = World()
    for rank in (0, 1):
        world.report(rank, AdapterUse(1, [], [], [], []))
    first = world.entry("x")
    instance = world.chooser.choose(first, 0.0)
    world.chooser.dispatch(first, instance, 0.0)
    assert world.choice("x") == instance.rank
    assert world.choice("y") != instance.rank
    world.ledger.drop(first)
    assert not world.ledger.adapters_at(instance.name)


def test_an_instance_that_lacks_an_adapter_is_not_chosen() -> None:
    world = World()
    first, second = world.pool
    first.capacity = capacity("old")
    assert {world.choice("old") for _ in range(4)} == {second.rank}
    second.capacity = capacity("old")
    with pytest.raises(MeshError, match="no instance is ready"):
        world.choice("old")
