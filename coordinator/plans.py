"""Plans of groups as changes of plans that instances have (pure).

A plan names all members, so it grows with the mesh, and each member gets it. Two plans in a row differ in few
members and in the experts that these hold. So a member that has the one before gets a
:class:`coordinator.messages.PlanChange`, which is the same for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

from coordinator.messages import GroupPlan, Peer, PlanChange

GONE = -1
"""Place of a former member, and owner of the experts that only it held."""


def change_of(base: GroupPlan, plan: GroupPlan) -> PlanChange | None:
    """The change from an earlier plan; None if the two have little in common."""
    here, before = frozenset(plan.peers), frozenset(base.peers)
    left = tuple(place for place, peer in enumerate(base.peers) if peer not in here)
    joined = tuple(peer for peer in plan.peers if peer not in before)
    if len(left) == len(base.peers) or _shape(base) != _shape(plan):
        return None
    if _peers(base, left, joined) != plan.peers:
        return None
    ranks = _Ranks(base, left, joined)
    return PlanChange(
        base=base.name,
        epoch=plan.epoch,
        store=plan.store,
        token=plan.token,
        left=left,
        joined=joined,
        moved=tuple(
            (expert, owner)
            for expert, (was, owner) in enumerate(zip(base.owners, plan.owners, strict=True))
            if ranks.now(was) != owner
        ),
        copied=tuple(
            (layer, expert, owners)
            for layer, both in enumerate(zip(base.replicas, plan.replicas, strict=True))
            for expert, (were, owners) in enumerate(zip(*both, strict=True))
            if ranks.all_now(were) != owners
        ),
        leavers=plan.leavers,
        broken=plan.broken,
        weights=plan.weights,
    )


def changed(base: GroupPlan, change: PlanChange) -> GroupPlan:
    """The plan that a change makes from its base."""
    ranks = _Ranks(base, change.left, change.joined)
    owners = [ranks.now(owner) for owner in base.owners]
    for expert, owner in change.moved:
        owners[expert] = owner
    replicas = [[ranks.all_now(were) for were in layer] for layer in base.replicas]
    for layer, expert, holders in change.copied:
        replicas[layer][expert] = holders
    return GroupPlan(
        epoch=change.epoch,
        store=change.store,
        peers=_peers(base, change.left, change.joined),
        owners=tuple(owners),
        replicas=tuple(map(tuple, replicas)),
        ranks=base.ranks,
        leavers=change.leavers,
        broken=change.broken,
        token=change.token,
        weights=change.weights,
    )


class _Ranks:
    """Where the ranks of a plan are in the next one."""

    def __init__(self, base: GroupPlan, left: Iterable[int], joined: Iterable[Peer]) -> None:
        gone, self._each = frozenset(left), base.ranks
        members = [(peer.rank, place) for place, peer in enumerate(base.peers) if place not in gone]
        members += [(peer.rank, GONE) for peer in joined]
        self._places = [GONE] * len(base.peers)
        for place, (_, before) in enumerate(sorted(members)):
            if before != GONE:
                self._places[before] = place

    def now(self, rank: int) -> int:
        """GONE if its member is none any more."""
        before = rank // self._each
        place = self._places[before] if before < len(self._places) else GONE
        return GONE if place == GONE else place * self._each + rank % self._each

    def all_now(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Those of members that are still here."""
        return tuple(now for now in map(self.now, ranks) if now != GONE)


def _peers(base: GroupPlan, left: Iterable[int], joined: Iterable[Peer]) -> list[Peer]:
    gone = frozenset(left)
    stay = [peer for place, peer in enumerate(base.peers) if place not in gone]
    return sorted([*stay, *joined], key=attrgetter("rank"))


def _shape(plan: GroupPlan) -> tuple[int, ...]:
    """Ranks of each member, experts, and experts by layer where layers differ."""
    return (plan.ranks, len(plan.owners), *map(len, plan.replicas))
