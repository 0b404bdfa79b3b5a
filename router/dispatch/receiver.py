"""Receives what instances send: tokens, reports, refusals, recalled requests, and the end of a connection.

What follows for requests is done by :class:`router.dispatch.mover.RequestMover`.
"""

from __future__ import annotations

import time

from coordinator.messages import State
from engine.messages import (
    Attached,
    CacheReset,
    HandedOver,
    Leaving,
    Prefetched,
    Recalled,
    RequestRefused,
    RequestsEnded,
    Tokens,
    ToRouter,
)
from router.dispatch.broadcasts import Broadcasts
from router.dispatch.chooser import unavailable
from router.dispatch.delivery import Delivery
from router.dispatch.instance_connection import InstanceConnection
from router.dispatch.ledger import Ledger
from router.dispatch.mover import RequestMover
from router.dispatch.pool import Pool, PooledInstance
from router.faults import FaultEvent, Faults
from router.mesh import MeshError


class MessageReceiver:
    """A :class:`router.dispatch.instance_connection.Receiver` for all connections of a router."""

    def __init__(
        self,
        pool: Pool,
        ledger: Ledger,
        connections: dict[str, InstanceConnection],
        mover: RequestMover,
        faults: Faults,
    ) -> None:
        """``connections`` by instance; those that failed are taken out."""
        self.broadcasts = Broadcasts(connections)
        self._pool = pool
        self._ledger = ledger
        self._connections = connections
        self._mover = mover
        self._faults = faults
        self._delivery = Delivery(ledger, mover.streams, mover.begins_try, mover.has_begun)

    def __repr__(self) -> str:
        return f"<MessageReceiver {self._delivery!r}>"

    def received(self, instance: PooledInstance, message: ToRouter) -> None:
        """Act on a message of an instance."""
        match message:
            case Tokens():
                self._on_tokens(instance, message)
            case RequestRefused():
                self._on_refused(instance, message)
            case Recalled(numbers):
                self._mover.take_back(instance, numbers)
            case Prefetched():
                self._mover.copied(instance, message)
            case HandedOver(number):
                self._mover.handed_over(instance, number)
            case CacheReset(number) | RequestsEnded(number):
                self.broadcasts.done(instance.name, number)
            case Leaving():
                instance.leaves = True
                self._mover.let_go(instance)
            case Attached():
                self._on_attached(instance, message)

    def connection_broke(self, instance: PooledInstance) -> None:
        """Resume the instance's requests elsewhere at once: this is the first sign of its death."""
        serves = instance.member.state is State.READY
        if self._mover.lose(instance) and serves:
            text = f"the connection to instance {instance.rank} ({instance.name}) broke"
            self._faults.record(FaultEvent.DETECTION, "connection_lost", text, time.time())
        self._mover.move_all(instance, "connection_lost" if serves else "drained")

    def connection_failed(self, instance: PooledInstance) -> None:
        """Move the requests of a connection that ended by an error, and close it.

        The client opens another one at its next look: the cause may occur again at once.
        """
        try:
            self.connection_broke(instance)
        finally:
            self._connections.pop(instance.name).close()

    def _on_tokens(self, instance: PooledInstance, tokens: Tokens) -> None:
        report, blocks = tokens.report, tokens.blocks
        if report is not None:
            instance.take_report(report, time.monotonic())
        if blocks is not None and not self._pool.index.apply(instance.name, blocks):
            self._connections[instance.name].ask_for_blocks()
        if tokens.deltas or tokens.singles:
            instance.breaker.proved()
        self._delivery.singles(instance.name, tokens.singles)
        if tokens.deltas:
            self._delivery.deltas(instance.name, tokens.deltas)
        if report is not None:
            self._mover.recall()

    def _on_refused(self, instance: PooledInstance, refused: RequestRefused) -> None:
        instance.leaves = instance.leaves or refused.leaves
        entry = self._ledger.find(instance.name, refused.request)
        if entry is None:
            return
        if not refused.retry:
            refusal = MeshError(400, "BadRequestError", refused.reason)
            if entry.emitted and not entry.prompt.background:
                self._mover.resume_refused(entry, instance, refusal)  # its limits are its own
            else:
                self._mover.give_up(entry, refusal)
            return
        entry.uncount_try()
        if entry.owed or not instance.ready:
            entry.owed = True
            self._faults.count(FaultEvent.RESUME, "refused")
            self._mover.resume(entry, instance)
        elif entry.attempts < len(self._pool) and entry.prompt.rank is None:
            self._mover.resume(entry, instance)  # its queue is full; another one's may not be
        else:
            self._mover.give_up(entry, unavailable(refused.reason))

    def _on_attached(self, instance: PooledInstance, attached: Attached) -> None:
        """Resume the requests of an earlier connection, of which the instance knows nothing."""
        if attached.repeated and instance.attached:
            before, instance.capacity = instance.weights, attached.capacity
            if instance.weights != before:
                self._mover.follow_weights(instance)
            return
        is_new = instance.capacity is None
        instance.attached, instance.capacity, instance.asked_back = True, attached.capacity, False
        if is_new:
            self._mover.warm_up(instance)
        self._mover.move_all(instance, "reattached")
        self._mover.dispatch_orphans()
