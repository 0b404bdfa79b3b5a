"""State machine of one instance's group changes (pure: events in, instructions out).

An instance steps in one group, its *current* one, and prepares at most one other, the *target*: the one
of the newest :class:`coordinator.messages.GroupPlan`. There are two ways from one to the other:

- *By agreement*, when nobody was lost. The instance goes on in the current group, tells the others in its
  headers that it is ready (:attr:`Recovery.ready_epoch`), and at the step where all say so
  (:class:`parallel.lockstep.Switch`) all enter. Members that leave go at this step.
- *After a loss*. The current group is broken: a collective failed, or the plan says or implies it. The
  step thread comes out of it, waits until the target is ready, enters it at once, and runs the
  interrupted step again. A new member, having no group, enters in the same way, and finds the others there
  at their first step.

No instance has to know which of the two the others take. An instance that breaks a group closes its end, so
all others break it too. An instance that enters the target finds the same group at step 0, awake.

Threads, sockets and torch are around this class (:mod:`engine.groups.stepping`); its caller calls it from one
thread at a time, and carries out what it returns in that order.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from coordinator.messages import Evidence, GroupPlan, Lost

LEAVE_TIMEOUT = 10.0
"""Seconds that an instance without requests waits for a group without it.

Then it goes all the same.
"""


class Prepare(msgspec.Struct, frozen=True):
    """Instruction: read missing experts and form the group, in the background.

    Then say ``prepared``, or ``failed``. A call of ``Abandon`` for this epoch ends it.
    """

    form: GroupPlan


class Abandon(msgspec.Struct, frozen=True):
    """Instruction: stop preparing this epoch; close its group if it is formed already.

    Harmless if neither is so.
    """

    epoch: int


class AbortGroup(msgspec.Struct, frozen=True):
    """Instruction: abort the group of this epoch, so that step threads come out of it."""

    epoch: int


class ReportLost(msgspec.Struct, frozen=True):
    """Instruction: report lost members to the coordinator until a later epoch's plan comes."""

    lost: Lost


class DropRequests(msgspec.Struct, frozen=True):
    """Instruction: abort all requests; this instance is a newcomer now.

    Routers have resumed most of them elsewhere.
    """


Instruction = Prepare | Abandon | AbortGroup | ReportLost | DropRequests


class StepOn(msgspec.Struct, frozen=True):
    """Turn: go on in the current group."""


class Enter(msgspec.Struct, frozen=True):
    """Turn: use the group, placement and agreement prepared for this plan (step 0, awake).

    Close the group before it. A step that was interrupted is scheduled again.
    """

    form: GroupPlan


class AwaitGroup(msgspec.Struct, frozen=True):
    """Turn: wait, as there is no group to step in now."""


class LeaveMesh(msgspec.Struct, frozen=True):
    """Turn: leave the mesh, as all is done."""


Turn = StepOn | Enter | AwaitGroup | LeaveMesh


class Recovery:
    """Recovery state of one instance: current group, target group, and loss."""

    def __init__(self, instance: str) -> None:
        self._instance = instance
        self.current: GroupPlan | None = None
        """Plan of the group it steps in, broken or not."""
        self.broken = False
        """Whether the current group is broken."""
        self.target: GroupPlan | None = None
        """Plan of the group to enter next."""
        self._ready = False
        self._newest = 0
        self._switched = False
        self._drained_at: float | None = None
        self._ended = False

    def __repr__(self) -> str:
        current = "none" if self.current is None else f"{self.current.epoch}{' broken' * self.broken}"
        target = "none" if self.target is None else f"{self.target.epoch}{' ready' * self._ready}"
        return f"<Recovery {self._instance} group {current}, next {target}{' ended' * self._ended}>"

    # ---- for headers and heartbeats

    @property
    def epoch(self) -> int:
        """Epoch of the group that the instance steps in; 0: none."""
        return 0 if self.current is None or self.broken else self.current.epoch

    @property
    def ready_epoch(self) -> int:
        """Epoch of the newest group that it can enter or has entered, for headers."""
        if self.target is not None and self._ready:
            return self.target.epoch
        return self.epoch

    @property
    def switch_pending(self) -> bool:
        """Whether the instance is ready to switch groups; this counts as work and wakes sleepers."""
        return self.epoch > 0 and self.ready_epoch > self.epoch

    # ---- what the coordinator says

    def on_form(self, form: GroupPlan) -> list[Instruction]:
        """Handle a plan: prepare its group. Repetitions and older plans do nothing."""
        meant = self._instance in (*names(form), *form.leavers)
        if form.epoch <= self._newest or not meant or self._ended:
            return []
        self._newest = form.epoch
        all_leave = self._switched  # the others enter the target, as soon as their steps under way have ended
        instructions: list[Instruction] = self._abandon_target()
        if self.current is not None and not self.broken and (all_leave or _ends(form, self.current)):
            self.broken = True
            instructions.append(AbortGroup(self.current.epoch))
        self.target = form
        if self._instance in names(form):
            instructions.append(Prepare(form))
        else:  # it leaves, with nothing to prepare
            self._ready = True
        return instructions

    def on_fenced(self) -> list[Instruction]:
        """Handle a fence: the others continue without this instance, taken for dead."""
        instructions = self._abandon_target()
        if self.current is not None:
            instructions.append(AbortGroup(self.current.epoch))
        self.current, self.broken = None, False
        return [*instructions, DropRequests()]

    # ---- what the background says

    def prepared(self, epoch: int) -> list[Instruction]:
        """Note that the experts of this epoch are here and its group is formed."""
        if self.target is None or self.target.epoch != epoch:
            return [Abandon(epoch)]
        self._ready = True
        return []

    def failed(self, epoch: int, suspects: Iterable[str] = ()) -> list[Instruction]:
        """Handle a group that cannot be formed; ``suspects`` are known to be gone.

        The current group goes on if it can, until the coordinator says what comes next.
        """
        if self.target is None or self.target.epoch != epoch:
            return []
        return [Abandon(epoch), self._report(epoch, suspects, Evidence.CLOSED)]

    # ---- what the step loop says

    def group_failed(self, epoch: int, suspects: Iterable[str], evidence: Evidence) -> list[Instruction]:
        """Handle a failed collective, or lost members, of an epoch; only the first counts."""
        if self.current is None or self.current.epoch != epoch or self.broken:
            return []
        self.broken = True
        return [AbortGroup(epoch), self._report(epoch, suspects, evidence)]

    def switched(self, epoch: int) -> list[Instruction]:
        """Note that all agreed to enter this epoch (:class:`parallel.lockstep.Switch`).

        :meth:`turn` has what follows.


        When a plan took its place in the very step of the agreement, because somebody is lost, there is no
        way to follow the others; they will hear of it."""
        leaves = self.target is not None and self._instance not in names(self.target)
        if self.target is not None and self._ready and (self.target.epoch == epoch or leaves):
            self._switched = True
            return []
        self.broken = True
        return [] if self.current is None else [AbortGroup(self.current.epoch)]

    def drained(self, now: float) -> None:
        """Note that no request is left here and none will come: leave when possible."""
        if self._drained_at is None:
            self._drained_at = now

    def turn(self, now: float) -> Turn:
        """Instruction for the step loop's next turn.

        Called at the top of each turn, and after every decided step.
        """
        if self._ended:
            return LeaveMesh()
        if self._drained_at is not None and self._may_go(now):
            self._ended = True
            return LeaveMesh()
        if self.target is not None and self._ready and (self.epoch == 0 or self._switched):
            self.current, self.target = self.target, None
            self.broken = self._ready = self._switched = False
            return Enter(self.current)
        return StepOn() if self.epoch else AwaitGroup()

    # ----

    def _may_go(self, now: float) -> bool:
        """Whether a drained instance disturbs nobody by its end, or has waited for too long."""
        assert self._drained_at is not None
        leaves = self._switched and self.target is not None and self._instance not in names(self.target)
        is_alone = self.current is not None and len(self.current.peers) == 1 and self.target is None
        return leaves or is_alone or self.epoch == 0 or now - self._drained_at >= LEAVE_TIMEOUT

    def _abandon_target(self) -> list[Instruction]:
        target, self.target = self.target, None
        self._ready = self._switched = False
        return [] if target is None or self._instance not in names(target) else [Abandon(target.epoch)]

    def _report(self, epoch: int, suspects: Iterable[str], evidence: Evidence) -> ReportLost:
        return ReportLost(
            Lost(instance=self._instance, epoch=epoch, suspects=tuple(suspects), evidence=evidence)
        )


def names(form: GroupPlan) -> list[str]:
    """The members of a group, in group order."""
    return [peer.instance for peer in form.peers]


def _ends(form: GroupPlan, group: GroupPlan) -> bool:
    """Whether a plan ends an earlier group, by its flag or a lost member."""
    return group.epoch <= form.broken or not set(names(group)) <= {*names(form), *form.leavers}
