"""Candidates for the next group: possible members, and the experts of each (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.membership.reach import Reachability
from coordinator.membership.rebalancing import Rebalancing
from coordinator.membership.records import Record, Records
from coordinator.messages import GroupPlan, Settings
from parallel.placement import Placement, assign_experts, cover


class Candidates:
    """The instances that have the mesh's weights and are not left out."""

    def __init__(self, records: Records, reach: Reachability, rebalancing: Rebalancing) -> None:
        """``records`` and ``reach`` are the registry's; only read here."""
        self._records = records
        self._reach = reach
        self._rebalancing = rebalancing
        self._chosen: tuple[list[Record], frozenset[str], list[Record]] | None = None
        """Loaded instances, those that are left out, and the others."""
        self._lack: tuple[list[Record], int, str] | None = None
        """Instances, changes of their room so far, and what room is missing."""

    def __repr__(self) -> str:
        return f"<Candidates {[record.rank for record in self.all()]}>"

    def all(self) -> list[Record]:
        """The instances that would be in a group formed now, by rank.

        The same list is returned as long as they do not change.
        """
        loaded, out = self._records.with_weights(), self._reach.left_out
        if not out:
            return loaded
        if self._chosen is None or self._chosen[0] is not loaded or self._chosen[1] != out:
            chosen = [record for record in loaded if not self._reach.leaves_out(record.instance)]
            self._chosen = loaded, out, chosen
        return self._chosen[2]

    def survivors(self, settings: Settings) -> list[Record]:
        """Members of the group that follows a loss: only those who were in one.

        They need not wait until a newcomer has read its experts. But all, where they alone have no room.
        """
        candidates = self.all()
        survivors = [record for record in candidates if record.epoch > 0]
        fit = survivors and not shortage(settings, survivors)
        return survivors if fit else candidates

    def lack(self, settings: Settings) -> str:
        """What is missing until all experts fit on them; empty if they do."""
        candidates, changes = self.all(), self._records.num_room_changes
        if self._lack is None or self._lack[0] is not candidates or self._lack[1] != changes:
            self._lack = candidates, changes, shortage(settings, candidates)
        return self._lack[2]

    def placement(
        self, settings: Settings, members: list[Record], before: GroupPlan | None, *, lost: bool
    ) -> Placement:
        """Owners of all experts over all tensor-parallel ranks of these members.

        ``before`` is the newest group, and ``lost`` whether it has failed or lost a member.
        """
        ranks = settings.tensor_parallel_size
        room = [member.max_experts for member in members for _ in range(ranks)]
        if before is None and settings.num_experts >= len(room):
            dealt = settings.expert_placement_strategy == "round_robin"
            first = assign_experts(settings.num_experts, len(room), "round_robin" if dealt else "linear")
            if all(not limit or len(first.experts_of(rank)) <= limit for rank, limit in enumerate(room)):
                return self._rebalancing.first_placement(settings, members, first)
        if before is not None:
            balanced = self._rebalancing.placement(settings, members, lost=lost)
            if balanced is not None:
                return balanced
        held = [member.held(rank, 0) for member in members for rank in range(ranks)]
        return cover(settings.num_experts, held, room)


def shortage(settings: Settings, members: Sequence[Record]) -> str:
    """What is missing until the experts fit on some instances; "" if they do."""
    num_experts = settings.num_experts
    limits = [member.max_experts * settings.tensor_parallel_size or num_experts for member in members]
    missing = num_experts - sum(limits)
    if missing <= 0:
        return ""
    more = -(-missing // max(limits, default=num_experts)) if members else 1
    return f"{more} more instance{'s' * (more != 1)}: the {num_experts} experts do not fit on {len(members)}"
