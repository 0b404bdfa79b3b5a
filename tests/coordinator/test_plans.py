"""Plans as changes of earlier ones."""

from __future__ import annotations

import random
from itertools import pairwise

import msgspec
import pytest

from coordinator.messages import FromCoordinator, GroupPlan, Peer, PlanChange
from coordinator.plans import change_of, changed
from coordinator.rpc.codec import Decoder, encode
from parallel.placement import assign_experts, cover

EXPERTS, LAYERS = 512, 4


def peer(rank: int, life: int = 0) -> Peer:
    return Peer(
        rank, f"tcp://10.0.{rank // 8}.1:{40_000 + rank}", f"host-{rank // 8}", f"{rank:06x}{life:06x}"
    )


def plan(epoch: int, peers: list[Peer], owners: tuple[int, ...], **fields: object) -> GroupPlan:
    defaults = {"store": f"s:{epoch}", "token": "t", "broken": epoch - 1}
    return msgspec.convert(
        {**defaults, "epoch": epoch, "peers": [msgspec.to_builtins(each) for each in peers],
         "owners": owners, **fields},
        GroupPlan,
    )  # fmt: skip


def follow(base: GroupPlan, peers: list[Peer], epoch: int) -> GroupPlan:
    """The plan of a group of other members, which keep the experts that they hold."""
    held = {
        each: [expert for expert, owner in enumerate(base.owners) if owner == place]
        for place, each in enumerate(base.peers)
    }
    placement = cover(len(base.owners), [held.get(each, ()) for each in peers], [0] * len(peers))
    return plan(epoch, peers, placement.owners)


def passed(change: PlanChange) -> PlanChange:
    """As it arrives."""
    found = Decoder[FromCoordinator](FromCoordinator).decode(encode(change))
    assert isinstance(found, PlanChange)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_a_change_makes_the_plan_that_it_was_made_of(seed: int) -> None:
    rng = random.Random(seed)
    ranks = rng.choice([1, 2])

    def drawn(epoch: int, members: list[Peer]) -> GroupPlan:
        places = len(members) * ranks
        replicas = tuple(
            tuple(tuple(sorted(rng.sample(range(places), rng.randint(1, min(3, places))))) for _ in range(8))
            for _ in range(LAYERS if seed % 2 else 0)
        )
        owners = () if replicas else tuple(rng.randrange(places) for _ in range(8))
        leavers = tuple(f"l{number}" for number in range(rng.randint(0, 2)))
        return plan(epoch, members, owners, replicas=replicas, ranks=ranks, leavers=leavers)

    lives = [0] * 12
    plans = []
    for epoch in range(1, 12):
        lives[rng.randrange(12)] += 1  # another process under an old rank
        here = sorted(rng.sample(range(12), rng.randint(3, 12)))
        plans.append(drawn(epoch, [peer(rank, lives[rank]) for rank in here]))
    made = 0
    for base, after in pairwise(plans):
        change = change_of(base, after)
        if change is not None:
            made += 1
            assert changed(base, passed(change)) == after
    assert made > 5


@pytest.mark.parametrize("size", [64, 512])
def test_one_member_less_or_more_takes_few_bytes_in_a_mesh_of_any_size(size: int) -> None:
    everybody = [peer(rank) for rank in range(size)]
    whole = plan(1, everybody, assign_experts(EXPERTS, size).owners)
    lost = follow(whole, everybody[:5] + everybody[6:], 2)
    back = follow(lost, [*everybody[:5], peer(5, 1), *everybody[6:]], 3)
    for base, after in ((whole, lost), (lost, back)):
        change = change_of(base, after)
        assert change is not None
        moved = EXPERTS // size
        assert len(change.moved) <= 2 * moved + 1
        assert len(encode(change)) < 200 + 10 * moved
        assert changed(base, passed(change)) == after
    assert len(encode(whole)) > 40 * size


def test_plans_that_have_little_in_common_are_sent_whole() -> None:
    before = plan(1, [peer(0), peer(1)], (0, 1))
    nobody = plan(2, [peer(0, 1), peer(1, 1)], (0, 1))
    copies = plan(2, [peer(0), peer(1)], (), replicas=(((0,), (0, 1)),))
    wider = plan(2, [peer(0), peer(1)], (0, 1), ranks=2)
    for after in (nobody, copies, wider):
        assert change_of(before, after) is None
    ends = plan(2, [], (), leavers=("a",))
    assert change_of(before, ends) is None
