"""Heartbeats of instances, and the end of those that leave, exit or fall silent (pure)."""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.membership.admission import OneModel, other_class, without_weights
from coordinator.membership.groups import Groups
from coordinator.membership.operations import Operations
from coordinator.membership.records import Instruction, Note, Peer, Record, Send
from coordinator.membership.registration import note_of_class
from coordinator.membership.roles import SetRoles
from coordinator.membership.roster import Roster
from coordinator.membership.standing_orders import Orders
from coordinator.messages import AdmissionRefused, Beat, Exited, Heartbeat, Leave, State, Unknown
from coordinator.views import ViewLog


class Heartbeats:
    """What instances report about themselves, and what they are sent in return."""

    def __init__(
        self,
        roster: Roster,
        groups: Groups,
        model: OneModel,
        operations: Operations,
        roles: SetRoles,
        orders: Orders,
        log: ViewLog,
    ) -> None:
        self._orders = orders
        self._roster = roster
        self._groups = groups
        self._model = model
        self._operations = operations
        self._roles = roles
        self._log = log

    def __repr__(self) -> str:
        return f"<Heartbeats {self._roster!r}>"

    def heartbeat(self, peer: Peer, message: Heartbeat, now: float) -> Iterator[Instruction]:
        """Take over a heartbeat; answer with what its instance lacks."""
        record = self._roster.records.named(message.instance)
        if record is None:
            yield Send(peer, Unknown())
            return
        was_ready, numerics = record.state is State.READY, record.numerics
        changed = record.hear(peer, message, now)
        self._roster.records.heard(record)
        if record.numerics != numerics:
            self._roster.records.count_class(record, numerics)
            if (
                problem := self._model.problem_with(record.numerics, change=self._orders.change_weights)
            ) is not None:
                yield from self._refuse(peer, record, problem)
                return
        remark = self._class_remark(record) if changed else None
        if remark is not None and self._roster.rules.require_same_numerics:
            waits = self._roster.may_all_be_dead(record.numerics, now)  # it may be alone soon
            yield from self._refuse(peer, record, remark, waits=waits)
            return
        if remark is not None and record.numerics != numerics:
            yield note_of_class(record, remark)
        yield from self._groups.heard(peer, record, message, now, was_ready=was_ready)
        wish = self._operations.still_wanted(record)
        if wish is not None:
            yield Send(peer, wish)
        role = self._roles.heard(record)
        if role is not None:
            yield Send(peer, role)
        orders = self._orders.heard(record)
        if orders is not None:
            yield Send(peer, orders)
        neighbours = self._roster.records.num_on_host(record.host)
        yield Send(peer, Beat(self._groups.epochs.number, neighbours, self._roster.longer_interval))
        if changed:
            self._log.touch(record.instance)

    def _refuse(
        self, peer: Peer, record: Record, reason: str, *, waits: bool = False
    ) -> Iterator[Instruction]:
        """Take out an instance of another class, or with other weights.

        One that ``waits`` registers again.
        """
        if waits:
            yield Note(f"instance {record.rank} waits, as all others are silent: {reason}", warning=True)
            yield Send(peer, Unknown())
        else:
            yield Note(f"refused instance {record.rank}: {reason}", warning=True)
            yield Send(peer, AdmissionRefused(reason))
        self._groups.remove(record)

    def _class_remark(self, record: Record) -> str | None:
        """Why an instance that has its weights is of another numerics class than the others."""
        if record.numerics is None and record.state not in (State.LOADED, State.READY):
            return None
        others = self._roster.records.classes(but=record)
        if self._orders.change_weights and record.numerics is not None:
            mine = without_weights(record.numerics)
            return None if mine in map(without_weights, others) else other_class(record.numerics, others)
        return other_class(record.numerics, others)

    # ---- the end of an instance

    def leave(self, message: Leave) -> Iterator[Instruction]:
        """Take out an instance that has drained, or ends before it serves."""
        record = self._roster.records.named(message.instance)
        if record is not None:
            yield Note(f"instance {record.rank} left")
            if record.state not in (State.LOADING, State.LOADED):
                self._roster.drained(record)
                self._roles.forget(record.rank)
            self._groups.remove(record)

    def exited(self, message: Exited) -> Iterator[Instruction]:
        """Take out an instance whose process has ended."""
        record = self._roster.records.named(message.instance)
        if record is not None:
            yield Note(f"instance {record.rank} taken out: its process {message.how}", warning=True)
            self._groups.remove(record)

    def remove_silent(self, now: float) -> Iterator[Instruction]:
        """Take out instances without a heartbeat for too long."""
        rules = self._roster.rules
        limit = now - min(rules.member_timeout, rules.loading_timeout)
        for record in [each for each in self._roster.records.values() if each.heard_at < limit]:
            timeout = rules.loading_timeout if record.state is State.LOADING else rules.member_timeout
            silence = now - record.heard_at
            if silence > timeout:
                yield Note(f"instance {record.rank} taken out: silent for {silence:.1f} s", warning=True)
                self._groups.remove(record)
