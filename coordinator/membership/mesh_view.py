"""The mesh as watchers see it: its instances, and what it waits for (pure)."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterator
from operator import attrgetter

import msgspec

from coordinator.membership.groups import Groups
from coordinator.membership.operations import Operations
from coordinator.membership.records import Record
from coordinator.membership.roles import SetRoles
from coordinator.membership.roster import Roster
from coordinator.membership.standing_orders import Orders
from coordinator.messages import AnswerChecks, GroupPlan, Member, State, View
from coordinator.numerics import Numerics, combined

MAX_NAMED = 8
"""Instances that are named as missing; of more, the number is given."""


class MeshView:
    """Makes views of the mesh from what the coordinator knows."""

    def __init__(
        self, roster: Roster, groups: Groups, operations: Operations, roles: SetRoles, orders: Orders
    ) -> None:
        self._orders = orders
        self._roster = roster
        self._records = roster.records
        self._groups = groups
        self._operations = operations
        self._roles = roles
        self.is_complete = False
        """Whether all live instances have been heard of."""
        self.refused_peers = 0
        """Connections that the listener refused."""
        self.answers = AnswerChecks()
        """Shadow checks of all routers."""
        self._common: tuple[str, Numerics | None, GroupPlan | None] = ("", None, None)
        """What all members of the newest group had in common when watchers saw them last."""

    def __repr__(self) -> str:
        return f"<MeshView {self._roster!r}>"

    def whole(self) -> View:
        """The mesh as it is now; watchers have that of the last change."""
        return msgspec.structs.replace(self.head(), members=list(self.members(None)))

    def head(self) -> View:
        """The same without members."""
        epochs = self._groups.epochs
        return View(
            mesh=self._roster.rules.name,
            epoch=epochs.number,
            size=self._roster.size,
            settings=self._roster.settings,
            members=[],
            waiting_for=self._shortage() or self._waiting_for(),
            refused_peers=self.refused_peers,
            balance=epochs.rebalancing.shown(self._records.named) if self._roster.balances else None,
            orders=self._orders.current,
            answers=self.answers,
            complete=self.is_complete,
        )

    def members(self, names: Collection[str] | None) -> Iterator[Member]:
        """The named instances that are here, or all by rank, as watchers see them.

        All are returned, too, when something in common has changed for the members of a group.
        """
        shortage = self._shortage()
        shared = self._class_of_group() if self._roster.spreads else None
        common = (shortage, shared, self._groups.epochs.form)
        if names is not None and common != self._common:
            names, self._common = None, common
        if names is None:
            found = [record for _, record in sorted(self._records.items())]
        else:
            found = [record for record in map(self._records.named, names) if record is not None]
        return (self._member(record, shortage, shared) for record in found)

    def _member(self, record: Record, shortage: str, shared: Numerics | None) -> Member:
        """An instance as watchers see it.

        It is ready only if its group can serve. It is draining, or has another role, from the moment of the
        command. ``shared`` is that of the members of the group, if it is not the class of each.
        """
        member, is_member = record.member(), self._groups.epochs.is_member(record.instance)
        if (role := self._roles.of(record)) is not member.role:
            member = msgspec.structs.replace(member, role=role)
        if shared is not None and is_member:
            member = msgspec.structs.replace(member, numerics=shared)
        if record.state.stays and self._operations.was_told(record.instance):
            return msgspec.structs.replace(member, state=State.DRAINING, phase="asked to drain")
        if record.state.stays and (why := self._groups.reach.why(record.instance)):
            return msgspec.structs.replace(member, state=State.LOADED, phase=why)
        if record.state is State.READY and not record.follows_orders:
            return msgspec.structs.replace(member, state=State.LOADED, phase="takes over standing orders")
        if not self._roster.spreads or record.state is not State.READY:
            return member
        if shortage:
            return msgspec.structs.replace(member, state=State.LOADED, phase=f"waits for {shortage}")
        if not is_member:
            return msgspec.structs.replace(member, state=State.LOADED)
        return member

    def _class_of_group(self) -> Numerics | None:
        """The class of instances of several classes that compute each other's experts."""
        if len(self._records.classes()) < 2:
            return None
        classes = {
            record.numerics
            for record in self._records.values()
            if record.numerics is not None and self._groups.epochs.is_member(record.instance)
        }
        return combined(classes) if len(classes) > 1 else None

    # ---- what is missing

    def _shortage(self) -> str:
        """What the newest group lacks to serve; empty where instances are independent."""
        if not self._roster.spreads:
            return ""
        return self._groups.reach.problem or self._groups.epochs.starved(self._roster.settings)

    def _waiting_for(self) -> str:
        """The instances that the mesh waits for until as many serve as its size says."""
        size = self._roster.size
        if size is None:
            return "" if self._records else "the first instance to register"
        if self._roster.num_ready >= size:
            return ""
        starting = [
            record for record in self._records.values() if record.state in (State.LOADING, State.LOADED)
        ]
        first = heapq.nsmallest(MAX_NAMED, starting, key=attrgetter("rank"))
        parts = [
            f"rank {record.rank} ({self._groups.reach.why(record.instance) or record.phase})"
            for record in first
        ]
        if len(starting) > MAX_NAMED:
            parts.append(f"{len(starting) - MAX_NAMED} more that start")
        absent = self._roster.absent()
        if absent:
            more = f" and {len(absent) - MAX_NAMED} more" if len(absent) > MAX_NAMED else ""
            ranks = ", ".join(map(str, absent[:MAX_NAMED]))
            parts.append(f"rank{'s' * (len(absent) > 1)} {ranks}{more} to register")
        return "; ".join(parts)
