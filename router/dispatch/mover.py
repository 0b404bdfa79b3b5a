"""Moves requests: resumes them elsewhere, migrates and recalls them.

Where a request goes is decided in :mod:`router.dispatch.chooser` and :mod:`router.dispatch.recalls`, and sent
by :mod:`router.dispatch.dispatcher`. Callers: :mod:`router.dispatch.client` and
:mod:`router.dispatch.receiver`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping

from coordinator.numerics import is_invariant
from engine.messages import Abort, Delta, Prefetched, Recall
from router.dispatch import departures, roles
from router.dispatch.chooser import Chooser, unavailable
from router.dispatch.departures import Departures
from router.dispatch.dispatcher import ORPHAN_TIMEOUT, RequestDispatcher
from router.dispatch.instance_connection import InstanceConnection
from router.dispatch.ledger import Entry, Ledger, Loss, named
from router.dispatch.pool import Pool, PooledInstance
from router.dispatch.recalls import Recaller
from router.dispatch.warm_up import WarmUps
from router.faults import FaultEvent, Faults
from router.mesh import MeshError

logger = logging.getLogger(__name__)


class RequestMover(RequestDispatcher):
    """A :class:`.RequestDispatcher` that moves requests from one instance to another."""

    def __init__(
        self,
        pool: Pool,
        ledger: Ledger,
        chooser: Chooser,
        connections: Mapping[str, InstanceConnection],
        faults: Faults,
        *,
        moves_queued: bool,
    ) -> None:
        """``connections`` by instance: one that has none is not attached, and gets nothing.

        ``moves_queued``: queued requests are recalled for an instance that would begin them sooner.
        """
        super().__init__(pool, ledger, faults, chooser, connections)
        self._recaller = Recaller(pool, ledger)
        self._departures = Departures(self._choose_to_decode)
        self._warm_ups = WarmUps(pool, chooser.hot)
        self._moves_queued = moves_queued
        self.num_moves = 0
        """Requests recalled from a queue so far."""
        self.num_class_changes: Counter[str] = Counter()
        """Changes of requests' numerics classes so far: see :class:`router.mesh.MeshFacts`."""

    def __repr__(self) -> str:
        return f"<RequestMover {len(self.streams)} in flight, {len(self._orphans)} without an instance>"

    # ---- to another instance

    def lose(self, instance: PooledInstance) -> bool:
        """Stop using an instance until it answers on a new connection.

        Returns False if it was lost already.
        """
        self._pool.index.forget(instance.name)
        self._warm_ups.stop()
        was_attached = instance.lost(time.monotonic())
        self._depart(self._departures.gone(instance))
        return was_attached

    def move_all(self, instance: PooledInstance, reason: str, *, patience: float = ORPHAN_TIMEOUT) -> None:
        """Resume all requests of an instance elsewhere, and abort them there.

        Without an instance that can take it, a request waits for at most ``patience`` seconds.
        """
        self._depart(self._departures.gone(instance))
        lost = self._to_move(instance, reason)
        if not lost:
            return
        numbers = [entry.address[1] for entry in lost if entry.address]
        self._connections[instance.name].send(Abort(numbers))
        loss, capacity = Loss(instance.rank, time.monotonic(), len(lost)), instance.capacity
        for entry in lost:
            entry.owed = True
            entry.moves(loss)
            entry.inherits_at = "" if instance.is_leaving or capacity is None else capacity.inherited_at
            entry.inherits_on = instance.member.host
            # Before its first token only what it had at the start is known; it may have computed more.
            entry.inherits = entry.work if entry.fruitless == 0 else max(0, entry.work - entry.uncached)
            if instance.is_leaving:
                entry.uncount_try()
            else:
                entry.num_lost += 1
            self.resume(entry, instance, patience)

    def let_go(self, instance: PooledInstance) -> None:
        """Move all requests of an instance that leaves, with their KV blocks if possible."""
        lost = self._to_move(instance, "drained")
        loss = Loss(instance.rank, time.monotonic(), len(lost))
        for entry in lost:
            entry.owed = True
        self._depart(self._departures.begin(instance, lost, loss))

    def warm_up(self, newcomer: PooledInstance) -> None:
        """Have an instance that has joined copy hot prefixes before it gets requests."""
        wishes = self._warm_ups.begin(newcomer, time.monotonic())
        if not wishes:
            return
        connection = self._connections.get(newcomer.name)
        if connection is None or not all(connection.send(wish) for wish in wishes):
            self._warm_ups.stop()
            return
        logger.info("instance %d copies %d hot prefixes first", newcomer.rank, len(wishes))

    def end_warm_ups(self) -> None:
        """Bound the time of copies before the first request."""
        self._warm_ups.overdue(time.monotonic())

    def copied(self, target: PooledInstance, copied: Prefetched) -> None:
        """Act on the end of a copy of a moving request or a hot prefix."""
        if self._warm_ups.copied(target, copied.number):
            if not target.warming:
                self.dispatch_orphans()
            return
        self._depart(self._departures.copied(target, copied.number, copied.tokens, is_taken=copied.taken))

    def handed_over(self, instance: PooledInstance, number: int) -> None:
        """Act on an instance's message that it has stopped a migrating request."""
        actions = self._departures.handed_over(instance, number)
        if actions is not None:
            self._depart(actions)
        elif (entry := self._ledger.find(instance.name, number)) is not None:
            entry.owed = True  # whoever asked for it is lost, or has given up
            entry.uncount_try()
            self.resume(entry, instance)

    def _depart(self, actions: Iterable[departures.Action]) -> None:
        waiting = deque(actions)
        while waiting:
            match action := waiting.popleft():
                case departures.Copy(target, message):
                    connection = self._connections.get(target.name)
                    if connection is None or not connection.send(message):
                        waiting.extend(self._departures.gone(target))
                case departures.HandOver():
                    self._hand_over(action)

    def _hand_over(self, action: departures.HandOver) -> None:
        entry, source = action.entry, action.source
        if entry.address is None or entry.address[0] != source.name:
            action.loss.less()  # it ended, or went, by what came of the actions before
            return
        if not action.copy:  # else it has ended there
            self._abort(entry)
        entry.moves(action.loss, time.monotonic())
        entry.uncount_try()
        target = action.target
        if target is None or target.weights.number < entry.least_weights:  # it has not changed them yet
            self.resume(entry, source)
        else:
            entry.failed_at(source.rank)
            self._dispatch(entry, target, action.copy)

    def _to_move(self, instance: PooledInstance, reason: str) -> list[Entry]:
        """The requests of an instance that have to go on elsewhere.

        Background requests are given up.
        """
        found = []
        for entry in self._ledger.of_instance(instance.name):
            if entry.prompt.background:
                self._abort(entry)
                self.give_up(entry, unavailable(f"instance {instance.rank} is lost, or leaves"))
            else:
                found.append(entry)
        if found:
            text = f"{len(found)} requests of instance {instance.rank} go on elsewhere"
            logger.info("%s (%s): %s", text, reason, named(entry.prompt.request_id for entry in found))
            self._faults.record(FaultEvent.RESUME, reason, text, time.time(), len(found))
        return found

    def leave_idle_instances(self) -> None:
        """Move requests away from instances that no group has taken in for ORPHAN_TIMEOUT seconds."""
        for instance in self._pool.without_group(time.monotonic(), ORPHAN_TIMEOUT):
            self.move_all(instance, "no_group", patience=0.0)

    # ---- numerics classes

    def begins_try(self, entry: Entry, delta: Delta) -> None:
        """Record that the first delta of a try has come."""
        self._chooser.settle(entry)
        entry.inherits_at = ""
        if delta.token_ids:  # else it failed, and nothing was computed
            self._note_class(entry)

    def has_begun(self, entry: Entry) -> None:
        """Move on a request that has its first token, if its instance only begins them."""
        if not self._pool.has_roles or entry.address is None:
            return
        instance = self._pool.get(entry.address[0])
        if instance is not None and _moves_on(entry, instance):
            self._move_for_role(instance, [entry])

    def follow_role(self, instance: PooledInstance) -> None:
        """Move requests on that an instance decodes, if it only begins requests from now on."""
        entries = self._ledger.of_instance(instance.name)
        moving = [entry for entry in entries if entry.emitted and _moves_on(entry, instance)]
        if moving:
            logger.info("instance %d is %s now: %d requests move", instance.rank, instance.role, len(moving))
            self._move_for_role(instance, moving)

    def _move_for_role(self, instance: PooledInstance, entries: list[Entry]) -> None:
        for entry in entries:
            entry.owed = True
        loss = Loss(instance.rank, time.monotonic(), len(entries), planned=True)
        self._depart(self._departures.begin_some(instance, entries, loss))

    def follow_class(self, instance: PooledInstance) -> None:
        """Record that an instance computes in another numerics class from now on."""
        for entry in self._ledger.of_instance(instance.name):
            entry.is_computed_in(instance.numerics, instance.weights)
            if not entry.fruitless:
                self._note_class(entry)

    def follow_weights(self, instance: PooledInstance) -> None:
        """Record that all further tokens of an instance are made by other weights.

        Requests that wait for such weights may find them here.
        """
        num_going_on = 0
        for entry in self._ledger.of_instance(instance.name):
            entry.is_computed_in(instance.numerics, instance.weights)
            if not entry.fruitless:
                entry.changes_class()
                num_going_on += entry.changes_weights() and not entry.prompt.background
        weights = instance.weights
        logger.info(
            "instance %d computes with weights %d (%s) from now on; %d requests go on with them",
            instance.rank, weights.number, weights.label or "no label", num_going_on,
        )  # fmt: skip
        self.dispatch_orphans()

    def _note_class(self, entry: Entry) -> None:
        has_new_weights, change = entry.changes_weights(), entry.changes_class()
        if has_new_weights and not entry.prompt.background:
            logger.info(
                "request %s goes on with weights %d after %d tokens of older ones",
                entry.prompt.request_id, entry.weights.number, len(entry.emitted),
            )  # fmt: skip
        if change is None or has_new_weights or entry.prompt.background:
            return
        is_promised = entry.prompt.repeatable and is_invariant(change.before)
        self.num_class_changes["true" if is_promised else "false"] += 1
        logger.log(
            logging.WARNING if is_promised else logging.INFO,
            "request %s goes on in another numerics class after %d tokens: %s",
            entry.prompt.request_id,
            change.after_tokens,
            change,
        )

    # ---- recalls

    def recall(self) -> None:
        """Ask queued requests back that another instance would begin sooner."""
        if not self._moves_queued:
            return
        for name, numbers in self._recaller.recalls(time.monotonic()).items():
            instance = self._pool.get(name)
            if not self._connections[name].send(Recall(numbers)) and instance is not None:
                self._recaller.answered(instance)  # no answer will come: it does not read, and they stay

    def take_back(self, instance: PooledInstance, numbers: list[int]) -> None:
        """Dispatch recalled requests where it is best now, which may be where they were."""
        self._recaller.answered(instance)
        for number in numbers:
            entry = self._ledger.find(instance.name, number)
            if entry is None:
                continue
            entry.owed = True
            entry.uncount_try()
            self.num_moves += 1
            self._chooser.settle(entry)  # it leaves nothing there
            try:
                chosen = self._choose(entry)
            except MeshError:  # the last one left has just failed
                self.resume(entry, instance)
            else:
                self._dispatch(entry, chosen)

    # ---- helpers

    def _choose_to_decode(self, entry: Entry) -> PooledInstance | None:
        """Instance that takes over a request with its KV blocks; None: there is none."""
        try:
            return self._chooser.choose(entry, time.monotonic(), self.waiting_for, decodes=True)
        except MeshError:
            return None


def _moves_on(entry: Entry, instance: PooledInstance) -> bool:
    """Whether a request that has a token leaves its instance for its role."""
    if entry.prompt.background or entry.prompt.rank is not None:
        return False
    asked = entry.prompt.asked
    return roles.moves_on(instance.role, asked - len(entry.emitted) if asked else None)
