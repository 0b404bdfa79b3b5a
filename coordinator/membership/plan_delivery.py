"""Delivery of group plans: the instances that lack the newest one (pure)."""

from __future__ import annotations

from coordinator.membership.records import Record, Records, Rules
from coordinator.messages import GroupPlan, PlanChange, PlanName
from coordinator.plans import change_of

STILL_UNDER_WAY = 0.5
"""Part of the interval between heartbeats for which one may have been under way."""


class PlanDelivery:
    """The newest plan on its way to members and leavers, again until they have it."""

    def __init__(self, rules: Rules, records: Records) -> None:
        """``records`` are the registry's; only the plans that they were sent are noted there."""
        self._rules = rules
        self._records = records
        self._plan: GroupPlan | None = None
        self._name: PlanName | None = None
        self._change: PlanChange | None = None
        """What makes it from the one before; None if they have little in common."""
        self._recipients: frozenset[str] = frozenset()
        """The members, and the leavers."""
        self._is_adopted = False
        """Whether this coordinator did not make the plan, so that its recipients have it."""

    def __repr__(self) -> str:
        return f"<PlanDelivery {self._name} to {len(self._recipients)} instances>"

    def begin(self, plan: GroupPlan, *, adopted: bool) -> None:
        """Begin with another plan, the newest."""
        self._change = None if self._plan is None else change_of(self._plan, plan)
        self._plan, self._name, self._is_adopted = plan, plan.name, adopted
        self._recipients = frozenset(peer.instance for peer in plan.peers).union(plan.leavers)

    def deliver_adopted(self) -> None:
        """Send an adopted plan from now on to recipients that lack it."""
        self._is_adopted = False

    def is_for(self, instance: str) -> bool:
        """Whether an instance is a member or a leaver of the newest plan."""
        return instance in self._recipients

    def awaits(self, record: Record) -> GroupPlan | PlanChange | None:
        """What an instance needs that does not have the plan of its next group."""
        plan = self._plan
        if plan is None or self._is_adopted or record.epoch >= plan.epoch:
            return None
        if not self.is_for(record.instance) or record.plan == self._name:
            return None
        change = self._change
        return change if change is not None and record.plan == change.base else plan

    def sends(self, now: float) -> list[tuple[list[Record], GroupPlan | PlanChange]]:
        """The newest plan, or its change, with the instances that need it."""
        found: dict[int, tuple[list[Record], GroupPlan | PlanChange]] = {}
        members = [peer.instance for peer in self._plan.peers] if self._plan is not None else []
        leavers = self._plan.leavers if self._plan is not None else ()
        for instance in dict.fromkeys((*members, *leavers)):
            record = self._records.named(instance)
            message = self.awaits(record) if record is not None else None
            if record is not None and message is not None:
                found.setdefault(id(message), ([], message))[0].append(record)
                record.planned = message.epoch, now
        return list(found.values())

    def sends_again(self, record: Record, now: float) -> GroupPlan | PlanChange | None:
        """The same for an instance that has just sent a heartbeat.

        One that may have been under way when the plan was sent proves nothing.
        """
        message = self.awaits(record)
        if message is None:
            return None
        epoch, at = record.planned
        if epoch == message.epoch and now - at < self._rules.heartbeat_interval * STILL_UNDER_WAY:
            return None
        record.planned = message.epoch, now
        return message
