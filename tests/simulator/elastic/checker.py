"""Rules of every schedule with faults, checked on instances and the coordinator."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from coordinator.messages import GroupPlan
from engine.groups.recovery import names
from parallel.lockstep import Decision, StepHeader
from tests.simulator.schedule import AgreementChecker

if TYPE_CHECKING:
    from tests.simulator.elastic.instance import Instance


class Rule(enum.StrEnum):
    """Rules that a schedule can break."""

    ONE_GROUP = "two instances step in different groups under one epoch"
    RISING = "an epoch does not rise"
    OWNED = (
        "a step runs though an expert has no owner who holds it, or an instance owns what it has no room for"
    )
    AGREEMENT = "two instances decide differently at one step, or not what its headers say"
    ORDER = "a step is missed, or passed twice"
    READY = "an instance enters a group that is not formed, or was not asked into"
    ERROR = "the protocol finds its own messages impossible"
    FENCED = "somebody steps in a group that it was told goes on without it"
    ALIVE = "somebody is taken out who is well and answers"
    SMOOTH = "a join or a leave, without any fault, interrupts a step"
    LEFT = "a leaver does not end, or ends with requests"
    STORM = "groups are formed without end"
    RECOVERS = "not everybody serves in one group again, or not all work is done"
    SERVES = "though some reach each other and have room for all experts, nobody serves, or others are tried"
    REACHED = "somebody is left out whom all others reach"
    TOKENS = "a client gets a token that is not the next one of its request, or none after its last"
    BEGUN = "an instance waits for a step that it has not begun in its group"
    NOTHING_STAYS = "an instance keeps something of a request that has ended"
    PAUSED = "a request gets a token that a pause, answered as done, holds back"
    ASLEEP = "an instance computes while one of its group is without weights, or after a sleep was answered as done"
    VERSIONS = "an instance steps with other weights than its group's, or with older ones than before"
    BALANCED = "an expert has fewer copies than it is to have, though all is well"


Position = tuple[int, str, int]
"""(epoch, token of the coordinator, step)."""


class Checker(AgreementChecker[str, Position]):
    """Raises :class:`Violation` at the first event that breaks a rule."""

    ORDER = Rule.ORDER
    ERROR = Rule.ERROR
    ENDLESS = Rule.STORM

    def __init__(self, *, has_faults: bool, num_experts: int) -> None:
        super().__init__()
        self.has_faults = has_faults
        self._num_experts = num_experts
        self._forms: dict[tuple[int, str], GroupPlan] = {}
        """Plans of the groups that any instance has entered."""
        self._inside: dict[int, list[tuple[Instance, GroupPlan]]] = {}

    # ---- groups

    def formed(self, form: GroupPlan, highest: int) -> None:
        """The coordinator forms a group.

        ``highest`` is the highest epoch that it knew of.
        """
        self.counts["groups"] += 1
        self.counts["groups after a loss"] += form.broken > 0
        if form.epoch <= highest:
            self.broken(Rule.RISING, f"{form} is formed after epoch {highest}")

    def entered(self, instance: Instance, form: GroupPlan, *, is_formed: bool) -> None:
        """An instance begins to step in a group."""
        name = instance.name
        known = self._forms.setdefault((form.epoch, form.token), form)
        self._look_for_others(instance, form)
        self._inside.setdefault(form.epoch, []).append((instance, form))
        if name not in names(form) or not is_formed or known != form:
            self.broken(Rule.READY, f"{name} enters {form}")
        if form.epoch <= self._next.get(name, (0, "", 0))[0]:
            self.broken(Rule.RISING, f"{name} enters epoch {form.epoch} after {self._next[name]}")
        self._next[name] = (form.epoch, form.token, 0)

    def _look_for_others(self, instance: Instance, form: GroupPlan) -> None:
        """Check that no reachable instance steps in another group under the same epoch.

        A number may be used again if no instance of the other group can be asked. A stopped or disconnected
        instance may go on in it, until it hears that it is out.
        """
        others = [other for other, group in self._inside.get(form.epoch, []) if group != form]
        if not instance.is_away and any(
            other.alive and not other.is_away and other.recovery.epoch == form.epoch for other in others
        ):
            self.broken(Rule.ONE_GROUP, f"{instance.name} enters {form}, others another one: {others}")
        self.counts["numbers used again"] += bool(others)

    def interrupted(self, instance: Instance, why: str) -> None:
        """A collective of a running group fails."""
        self.counts["interrupted"] += 1
        if not self.has_faults and instance.drained_at is None:  # a drained one has nothing to lose
            self.broken(Rule.SMOOTH, f"{instance.name}: {why}")

    # ---- steps

    def header_sent(self, instance: Instance, header: StepHeader) -> None:
        at = (header.epoch, self._next[instance.name][1], header.step)
        if header.epoch <= instance.fenced_up_to:
            self.broken(Rule.FENCED, f"{instance.name} begins {at}, up to {instance.fenced_up_to} it is out")
        self._record_header(instance.name, at, header)

    def decided(self, instance: Instance, decision: Decision) -> None:
        """An instance knows what its next step is."""
        at = self._next[instance.name]
        known = self._decision_at(at, names(self._forms[at[:2]]))
        if decision != known:
            self.broken(Rule.AGREEMENT, f"{instance.name} decides {decision} at {at}, not {known}")
        self._pass(instance.name, decision)

    def computed(self, members: list[Instance], form: GroupPlan) -> None:
        """All members are in a step's forward pass: the plan must match the experts held."""
        placement = form.placement
        for layer in range(placement.num_layers or 1):
            copies = placement.copies(layer)
            if len(copies) != self._num_experts or not all(copies):
                self.broken(Rule.OWNED, f"{form} has owners for {len(list(filter(None, copies)))} experts")
            for expert, ranks in enumerate(copies):
                for owner in ranks:
                    if (layer, expert) not in members[owner].held:
                        name = members[owner].name
                        self.broken(Rule.OWNED, f"{name} owns {expert} in {form} and does not hold it")
            for place, member in enumerate(members):
                if 0 < member.room < len(placement.experts_of(place, layer)):
                    self.broken(Rule.OWNED, f"{member.name} has room for {member.room} experts in {form}")
        self.counts["forward passes"] += 1
        self.counts["forward passes with copies"] += bool(form.replicas)

    def balanced(self, form: GroupPlan, least: int) -> None:
        """Check at the end that each expert has so many copies on members."""
        self.counts["ends with copies"] += least > 1
        if any(len(ranks) < least for layer in form.replicas or ((),) for ranks in layer):
            self.broken(Rule.BALANCED, f"{form} keeps fewer than {least} copies of some expert")

    def begins_balanced(self, form: GroupPlan, num_redundant: int) -> None:
        """Check that the first group has all its copies, evenly over experts."""
        most = self._num_experts * len(form.peers)
        total = min(self._num_experts + num_redundant, most)
        self.counts["begins with copies"] += total > self._num_experts
        for layer in range(form.placement.num_layers or 1):
            counts = sorted(map(len, form.placement.copies(layer)))
            if sum(counts) != total or counts[-1] - counts[0] > 1:
                self.broken(Rule.BALANCED, f"{form} begins with {counts} copies of {total}")

    # ---- membership

    def taken_out(self, instance: Instance, *, suspicious: bool) -> None:
        """The coordinator takes out an instance that has not left."""
        if not instance.alive:
            self.counts["dead taken out"] += 1
        elif suspicious:
            self.counts["stalled taken out"] += 1
        else:
            self.broken(Rule.ALIVE, f"{instance.name} was well all the time")

    def left_out(self, instance: Instance, *, split: bool) -> None:
        """The coordinator leaves an instance out of groups.

        ``split``: data did not pass between some of late.
        """
        self.counts["left out"] += 1
        if not split:
            self.broken(Rule.REACHED, f"{instance.name} was reached all the time")

    def left(self, instance: Instance, *, in_vain: bool) -> None:
        """An instance ends, ``in_vain``: after it has waited for a group without it."""
        self.counts["left"] += 1
        self.counts["left in vain"] += in_vain
        if in_vain and not self.has_faults:
            self.broken(Rule.LEFT, f"{instance.name} is not let go")
        if instance.num_requests:
            self.broken(Rule.LEFT, f"{instance.name} ends with {instance.num_requests} requests")
