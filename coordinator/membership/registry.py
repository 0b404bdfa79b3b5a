"""Registry of the mesh's instances (pure: messages and a clock in, messages out).

Each message goes to the part whose subject it is; then all that follows from it is done. The socket loop
around it is :mod:`coordinator.server`.

An instance is *loading* after registration, *loaded* once it has its weights, *ready* when it serves,
*draining* when it is about to leave. Where instances are independent, the world is the ready ones, and the
epoch counts its changes. Where experts are spread, the world is a group
(:mod:`coordinator.membership.groups`).
"""

from __future__ import annotations

from collections.abc import Iterator

from coordinator.membership.adapter_orders import AdapterOrders
from coordinator.membership.admission import OneModel
from coordinator.membership.groups import Groups
from coordinator.membership.heartbeats import Heartbeats
from coordinator.membership.mesh_view import MeshView
from coordinator.membership.operations import Operations
from coordinator.membership.records import Instruction, Note, Peer, Rules, Send
from coordinator.membership.registration import Registration
from coordinator.membership.roles import SetRoles
from coordinator.membership.roster import Roster
from coordinator.membership.sleep_orders import SleepOrders
from coordinator.membership.standing_orders import Orders, in_words
from coordinator.membership.watchers import Watchers
from coordinator.membership.weight_updates import WeightUpdates
from coordinator.messages import (
    Drain,
    Exited,
    Heartbeat,
    Leave,
    LoadAdapter,
    Lost,
    OperatorAnswer,
    Reached,
    Rebalance,
    Register,
    Scale,
    SetPause,
    SetRole,
    SetSleep,
    State,
    ToCoordinator,
    UnloadAdapter,
    UpdateWeights,
    View,
    WakeUp,
    Watch,
)
from coordinator.views import ViewLog


class Registry:
    """The state machine of the coordinator."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._log = ViewLog(rules.token)
        self._roster = Roster(rules)
        self._records = self._roster.records
        self._orders = Orders(
            rules.token,
            self._records,
            lambda: self._view.is_complete,
            lambda: self._groups.reach.left_out,
        )
        self._groups = Groups(self._roster, self._orders, self._log)
        self._operations = Operations()
        self._roles = SetRoles()
        self._weights = WeightUpdates(self._orders, self._records)
        self._sleep = SleepOrders(self._orders)
        self._adapters = AdapterOrders(self._orders, self._records, lambda: self._roster.settings)
        self._sent_orders = self._orders.current
        model = OneModel()
        self._registration = Registration(self._roster, self._groups, model, self._orders, self._log)
        self._heartbeats = Heartbeats(
            self._roster, self._groups, model, self._operations, self._roles, self._orders, self._log
        )
        self._view = MeshView(self._roster, self._groups, self._operations, self._roles, self._orders)
        self._watchers = Watchers(rules, self._view, self._log)

    def __repr__(self) -> str:
        ranks = " ".join(f"{rank}:{record.state}" for rank, record in sorted(self._records.items()))
        return f"<Registry epoch {self._groups.epochs.number} [{ranks}] {len(self._watchers)} watchers>"

    def handle(self, peer: Peer, message: ToCoordinator, now: float) -> list[Instruction]:
        """React to one message."""
        instructions = self._react(peer, message, now)
        return [*instructions, *self._watchers.push(now)] if self._log.is_due(now) else instructions

    def _react(self, peer: Peer, message: ToCoordinator, now: float) -> list[Instruction]:
        match message:
            case Register():
                instructions = list(self._registration.register(peer, message, now))
            case Heartbeat():
                before = self._state_of(message)
                instructions = list(self._heartbeats.heartbeat(peer, message, now))
                orders = self._orders.current
                prepares = orders.update is not None or orders.adapter_load is not None
                quiet = not (prepares or self._sleep.changes or self._groups.suspicions)
                if self._state_of(message) == before and quiet:
                    return instructions  # nothing new: most heartbeats
            case Lost():
                instructions = list(self._groups.lost(peer, message, now))
            case Reached():
                self._groups.reach.answered(message)
                instructions = []
            case Leave():
                instructions = list(self._heartbeats.leave(message))
            case Exited():
                instructions = list(self._heartbeats.exited(message))
            case Watch():
                return list(self._watch(peer, message, now))
            case Drain():
                return list(self._drain(peer, message))
            case SetRole():
                return list(self._set_role(peer, message))
            case SetPause():
                return [Send(peer, self._orders.set_pause(message)), *self._send_orders()]
            case SetSleep():
                answer = self._sleep.begin(message)
                return [Send(peer, answer), *self._send_orders()]
            case WakeUp():
                return [Send(peer, self._sleep.end(message)), *self._send_orders()]
            case UpdateWeights():
                answer = self._weights.begin(message)
                return [Send(peer, answer), *self._follow_orders(now)]
            case LoadAdapter():
                return [Send(peer, self._adapters.load(message)), *self._follow_orders(now)]
            case UnloadAdapter():
                return [Send(peer, self._adapters.unload(message)), *self._follow_orders(now)]
            case Rebalance():
                return [Send(peer, self._groups.rebalance(message)), *self._groups.go_on(now)]
            case Scale():
                return [Send(*sent) for sent in self._operations.scale(peer, message, now)]
            case OperatorAnswer():
                return [Send(*sent) for sent in self._operations.answer(message)]
        return [*instructions, *self._follow_orders(now), *self._groups.go_on(now)]

    def tick(self, now: float) -> list[Instruction]:
        """Remove instances that were silent for too long; send what has changed."""
        instructions: list[Instruction] = []
        if not self._view.is_complete and self._roster.knows_all(self._groups.epochs.adoption.age(now)):
            self._view.is_complete = True
            self._log.touch_head()
        instructions += self._heartbeats.remove_silent(now)
        self._watchers.forget_silent(now)
        instructions += [*self._follow_orders(now), *self._groups.go_on(now)]
        if self._log.is_due(now) or self._log.has_old_loads(now):
            instructions += self._watchers.push(now)
        return instructions

    def push_due(self) -> float | None:
        """When :meth:`push` should be called for what has changed; None if nothing has."""
        return self._log.due_at()

    def push(self, now: float) -> list[Instruction]:
        """Send what has changed to the watchers."""
        return list(self._watchers.push(now)) if self._log.is_due(now) else []

    def view(self) -> View:
        """The mesh as it is now; watchers have that of the last change."""
        return self._view.whole()

    def refused(self, peers: int) -> None:
        """Take over the number of connections that the listener has refused, for the view."""
        self._view.refused_peers = peers

    def _state_of(self, message: Heartbeat) -> tuple[State, int, int] | None:
        """What may lead to another group when it changes."""
        record = self._records.named(message.instance)
        return None if record is None else (record.state, record.epoch, record.ready_epoch)

    # ---- watchers and operators

    def _watch(self, peer: Peer, message: Watch, now: float) -> Iterator[Instruction]:
        if message.launcher and message.launcher == self._rules.name:
            self._operations.on_launcher(peer, now)
        for instance, count in message.odd.items():
            record = self._records.named(instance)
            if record is not None and record.hear_odd(message.watcher, count):
                self._log.touch(instance)
        self._adapters.heard(message.adapters, now)
        yield from self._watchers.watch(peer, message, now)

    def _drain(self, peer: Peer, message: Drain) -> Iterator[Instruction]:
        by = "a router, after a shadow check," if message.instance else "an operator"
        yield Note(f"{by} asks instance {message.rank} to drain")
        for sent in self._operations.drain(peer, message, self._records):
            yield Send(*sent)
        record = self._records.get(message.rank)
        if record is not None:
            self._log.touch(record.instance)

    def _follow_orders(self, now: float) -> Iterator[Instruction]:
        """Decide what follows for weights, adapters and sleep; send orders that have changed."""
        yield from self._weights.go_on(now)
        yield from self._adapters.go_on(now)
        self._sleep.go_on(is_settled=self._groups.is_settled)
        yield from self._send_orders()

    def _send_orders(self) -> Iterator[Instruction]:
        """Send the standing orders to all, if they are not those that were sent last."""
        orders = self._orders.current
        if orders is self._sent_orders:
            return
        self._sent_orders = orders
        yield Note(f"standing orders {orders.revision}: {in_words(orders)}")
        for record in self._records.values():
            yield Send(record.peer, orders)
            self._log.touch(record.instance)
        self._log.touch_head()

    def _set_role(self, peer: Peer, message: SetRole) -> Iterator[Instruction]:
        answer = self._roles.set(message, self._records)
        yield Send(peer, answer)
        record = self._records.get(message.rank)
        if record is None:
            return
        yield Note(f"an operator sets a role: {answer.text}")
        role = self._roles.heard(record)
        if role is not None:
            yield Send(record.peer, role)
        self._log.touch(record.instance)
