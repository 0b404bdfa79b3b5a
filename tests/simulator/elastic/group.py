"""The group of one epoch as its members see it.

A rendezvous comes first, then collectives that fail when a member is gone.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from coordinator.messages import Evidence, GroupPlan
from engine.groups.recovery import names
from parallel.lockstep import StepHeader

if TYPE_CHECKING:
    from tests.simulator.elastic.instance import Instance
    from tests.simulator.elastic.world import World


class End(enum.Enum):
    """The state of one member's end."""

    OPEN = enum.auto()
    CLOSED = enum.auto()
    """Closed by a live member: in good order, or because it gave the group up."""
    DEAD = enum.auto()


class Group:
    """All ends of one group."""

    def __init__(self, world: World, form: GroupPlan) -> None:
        self.world = world
        self.form = form
        self.members: dict[str, Instance] = {}
        """Members that have come to the rendezvous."""
        self.is_formed = False
        self._ends: dict[str, End] = {}
        self._num_calls: dict[str, int] = {}
        self._calls: dict[int, dict[str, StepHeader | None]] = {}
        self._waiting: dict[str, int] = {}
        """Members inside a call, and its number."""

    # ---- forming

    def join(self, instance: Instance) -> None:
        """Come to the rendezvous; once all have come, each member is notified."""
        self.members[instance.name] = instance
        self._ends[instance.name] = End.OPEN
        if not self.world.passes_between(instance.name, self.form.peers[0].instance):
            del self.members[instance.name]  # it does not come to the rendezvous
            self._fail_to_connect(instance, [self.form.peers[0].instance])
            return
        if set(self.members) == set(names(self.form)) and not self._gone():
            self._connect()
        patience = self.world.timer(instance, self.world.settings.forming)
        instance.world.after(instance, patience, instance.forming_ends, self)

    def _connect(self) -> None:
        """Connect each member to each, once all have come."""
        members = list(self.members.values())
        if any(not self.world.passes_between(one.name, other.name) for one in members for other in members):
            for member in members:
                self._fail_to_connect(member, [])
            return
        self.is_formed = True
        for member in members:
            self.world.after(member, self.world.up_to(self.world.settings.gather), member.group_formed, self)

    def _fail_to_connect(self, instance: Instance, suspects: list[str]) -> None:
        delay = self.world.settings.connect
        self.world.after(instance, delay, instance.forming_fails, self, suspects)

    # ---- calls

    def is_open_at(self, instance: Instance) -> bool:
        """Whether an instance has not given this group up."""
        return self._ends.get(instance.name) is End.OPEN

    def call(self, instance: Instance, row: StepHeader | None) -> None:
        """Take part in the next collective; the instance hears how it ended, in time."""
        name = instance.name
        number = self._num_calls.get(name, 0)
        self._num_calls[name] = number + 1
        self._waiting[name] = number
        if self._ends.get(name) is not End.OPEN:
            self._fail_soon(instance, number)
            return
        rows = self._calls.setdefault(number, {})
        rows[name] = row
        is_pass = row is None  # many exchanges: who has given up since gives nothing any more
        if len(rows) == len(self.form.peers) and not (is_pass and self._gone()):
            if is_pass:
                self.world.checker.computed([self.members[name] for name in names(self.form)], self.form)
            for member in self.members.values():
                delay = self.world.up_to(self.world.settings.gather)
                self.world.after(member, delay, self._complete, member, number)
            return
        if self._gone():
            self._fail_soon(instance, number)
        self._fail_late(instance, number)

    def _complete(self, instance: Instance, number: int) -> None:
        """Complete a call to which all have given their rows.

        Some may still find that another one is gone before they have all of them.
        """
        if self._waiting.get(instance.name) != number:
            return
        if self._ends[instance.name] is not End.OPEN or (
            self._gone(abruptly=True) and self.world.chance(0.5)
        ):
            self._fail(instance, number)
            return
        if self._cut_from(instance):
            self._fail_late(instance, number)
            return
        del self._waiting[instance.name]
        rows = self._calls[number]
        instance.call_done(self, [rows[name] for name in names(self.form)])

    def _cut_from(self, instance: Instance) -> list[str]:
        """Members whose data does not reach this one."""
        return [name for name in names(self.form) if not self.world.passes(name, instance.name)]

    def _fail_soon(self, instance: Instance, number: int) -> None:
        self.world.after(instance, 1 + self.world.up_to(2), self._fail, instance, number)

    def _fail_late(self, instance: Instance, number: int) -> None:
        """Let a call end at its deadline, by the instance's own clock."""
        deadline = self.world.timer(instance, self.world.settings.deadline)
        self.world.after(instance, deadline, self._fail, instance, number, True)

    def _fail(self, instance: Instance, number: int, late: bool = False) -> None:
        if self._waiting.get(instance.name) != number:
            return
        rows = self._calls.get(number, {})
        cut = self._cut_from(instance)
        if late and len(rows) == len(self.form.peers) and not self._gone() and not cut:
            self._complete(instance, number)  # what was lost has been sent again
            return
        del self._waiting[instance.name]
        if late and not self._gone():
            missing = [name for name in names(self.form) if name not in rows or name in cut]
            instance.call_failed(self, missing, Evidence.DEADLINE)
        else:
            gone = [name for name in self._gone() if name != instance.name]
            instance.call_failed(self, self._seen(gone), Evidence.CLOSED)

    def _seen(self, gone: list[str]) -> list[str]:
        """Suspects that a member names: perhaps only some of those that are gone."""
        return self.world.rng.sample(gone, self.world.rng.randint(1, len(gone))) if gone else []

    # ---- ends

    def close(self, instance: Instance, how: End = End.CLOSED) -> None:
        """Close a member's end; the others that wait for it notice."""
        name = instance.name
        if self._ends.get(name, End.OPEN) is not End.OPEN:
            return
        self._ends[name] = how
        for other, number in list(self._waiting.items()):
            if other == name or name not in self._calls.get(number, {}):
                self._fail_soon(self.members[other], number)
        if how is End.DEAD and self.is_formed:
            for member in self.members.values():
                if member is not instance and self.world.chance(self.world.settings.exited):
                    delay = 1 + self.world.up_to(5)
                    self.world.after(member, delay, member.sees_exit, self.form.epoch, name)
        if not self.is_formed:
            for member in self.members.values():
                if member is not instance and self.world.chance(0.5):
                    self.world.after(member, 1 + self.world.up_to(5), member.forming_fails, self)

    def _gone(self, *, abruptly: bool = False) -> list[str]:
        """Members whose end is closed."""
        return [
            name
            for name, end in self._ends.items()
            if end is End.DEAD or (end is End.CLOSED and not abruptly)
        ]
