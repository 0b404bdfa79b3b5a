"""The mesh behind this router as one object, with its instances and requests.

Two parts do the work on requests: :mod:`router.dispatch.mover` sends and moves them, and
:mod:`router.dispatch.receiver` gets what instances send. One connection per instance
(:mod:`router.dispatch.instance_connection`) carries requests out and, once per step, tokens in. What to do is
decided in :mod:`router.dispatch.chooser`, :mod:`router.dispatch.recalls` and :mod:`router.dispatch.ledger`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from coordinator.commands import ask
from coordinator.member_connection import Watcher
from coordinator.messages import (
    AdapterList,
    Drain,
    OperatorAnswer,
    Settings,
    State,
    View,
)
from coordinator.rpc.complaints import Complaints
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import with_room
from coordinator.views import ViewNews
from engine.messages import EndRequests, ResetCache
from engine.model.checkpoint import CheckpointError
from engine.model.finding import find_model
from router.dispatch.chooser import Chooser
from router.dispatch.facts import RouterFacts
from router.dispatch.instance_connection import InstanceConnection
from router.dispatch.ledger import Ledger
from router.dispatch.mover import RequestMover
from router.dispatch.policy import Policy
from router.dispatch.pool import Pool, PooledInstance
from router.dispatch.receiver import MessageReceiver
from router.dispatch.reservations import Reservations
from router.dispatch.shadow.shadowing import Shadowing
from router.dispatch.stream import Stream
from router.faults import Faults
from router.mesh import Prompt, ServedModel, served_model

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT = 10.0
"""Seconds for the coordinator to answer that an instance is to drain."""
LOOK_INTERVAL = 1.0
"""Seconds between two looks at instances without a connection and requests without an instance."""


class MeshClient(RouterFacts):
    """Implementation of :class:`router.mesh.Mesh` over connections to all instances."""

    def __init__(
        self,
        coordinator: str,
        *,
        tokenizer: str | None = None,
        keys: MeshKeys | None = None,
        policy: Policy = Policy.PREFIX_AWARE,
        shadow_rate: float = 0.0,
        drains_odd: bool = False,
    ) -> None:
        """``tokenizer``: its directory, where it is not the model's.

        ``shadow_rate``: share of the requests that other instances compute again, to compare. ``drains_odd``:
        an instance that computes otherwise than two others is drained.
        """
        self._context = with_room(zmq.asyncio.Context())
        self._name = f"router-{uuid.uuid4().hex[:8]}"
        self._keys = keys
        self._coordinator = coordinator
        self._watcher = Watcher(coordinator, self._name, self._context, keys)
        self._tokenizer = Path(tokenizer).expanduser() if tokenizer else None
        self._model: ServedModel | None = None
        self._adapters = AdapterList()
        """The newest list of standing orders."""
        self._watcher.adapters_in_use = self._adapters_in_use
        self._pool = Pool()
        self._ledger = Ledger()
        self._policy = policy
        self._chooser = Chooser(self._pool, self._ledger, policy)
        self._connections: dict[str, InstanceConnection] = {}
        """By instance. One that has none is not attached, and gets nothing."""
        self._unconnected = Complaints(logger, "cannot connect to an instance, trying again")
        self.faults = Faults()
        self._mover = RequestMover(
            self._pool,
            self._ledger,
            self._chooser,
            self._connections,
            self.faults,
            moves_queued=policy in (Policy.PREFIX_AWARE, Policy.LEAST_LOADED),
        )
        self._receiver = MessageReceiver(
            self._pool, self._ledger, self._connections, self._mover, self.faults
        )
        self._shadowing: Shadowing | None = None
        self._generate: Callable[[Prompt], Stream] = self._mover.generate
        if shadow_rate:
            drain = self._drain if drains_odd else None
            self._shadowing = Shadowing(
                shadow_rate, self._pool, self._mover, self.faults, drain=drain, tell=self._watcher.tell_odd
            )
            self._watcher.answers = self._shadowing.answers
            self._generate = self._shadowing.generate

    def __repr__(self) -> str:
        return f"<MeshClient {self._pool!r} {self._ledger!r}>"

    async def run(self) -> None:
        """Follow the coordinator's view until cancelled, or until an error ends the following."""
        working = [self._watcher.run(self._on_news), self._look_again()]
        if self._shadowing is not None:
            working.append(self._shadowing.run())
        parts = [asyncio.create_task(each) for each in working]
        try:
            await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
            connections = list(self._connections.values())
            self._connections.clear()  # nothing is sent to anybody for what is closed from now on
            for connection in connections:
                connection.close()
            self._context.term()

    # ---- requests

    def check_room(self) -> None:
        """Refuse early where every queue is full.

        Raises:
            MeshError: every queue is full (503).
        """
        self._chooser.check_room(time.monotonic())

    def generate(self, prompt: Prompt) -> Stream:
        """Send a request to the best instance, or to the one it names.

        Raises:
            MeshError: no instance can take it (503), or the rank it names does not exist (400).
        """
        return self._generate(prompt)

    def reservations(self) -> Reservations:
        """Counts requests that another process dispatches; this one may then dispatch none."""
        return Reservations(self._pool, self._policy)

    def give_up_all(self, why: str) -> list[str]:
        """End every request in flight with a 503; returns their ids."""
        return self._mover.give_up_all(why)

    async def reset_caches(self, timeout: float) -> list[str]:
        """Have all instances forget cached prefixes; returns those that did not in time."""
        return await self._receiver.broadcasts.ask(ResetCache, timeout)

    async def end_requests(
        self, request_ids: Sequence[str], timeout: float, *, everything: bool = False
    ) -> list[str]:
        """Have all instances end requests of any router; returns those that did not answer.

        The names are ids of answers.
        """
        names = tuple(request_ids)
        return await self._receiver.broadcasts.ask(
            lambda number: EndRequests(number, names, everything), timeout
        )

    # ---- the world

    def _on_news(self, news: ViewNews) -> None:
        head = self._watcher.head
        assert head is not None
        self._mover.waiting_for = head.waiting_for
        if self._model is None and head.settings is not None:
            self._model = self._learn_model(head.settings)
        self._follow_adapters(head)
        if self._pool.can_follow(news, head):
            changes = self._pool.follow(news, time.monotonic())
        else:
            assert self.view is not None
            changes = self._pool.apply(self.view, time.monotonic())
        for instance in changes.added:
            logger.info("instance %d at %s", instance.rank, instance.member.address)
            self._close_connection(instance.name)  # if it was taken out and is back in one piece of news
            self._connect(instance)
        for instance in changes.removed:
            self._disconnect(instance)
        for instance in changes.reclassed:
            self._mover.follow_class(instance)
        for instance in changes.with_new_role:
            self._mover.follow_role(instance)
        self._mover.dispatch_orphans()
        if self._shadowing is not None and self.view is not None:
            self._shadowing.on_view(self.view)

    async def _drain(self, wish: Drain) -> OperatorAnswer:
        return await ask(self._coordinator, wish, DRAIN_TIMEOUT, self._keys)

    def _follow_adapters(self, head: View) -> None:
        """Serve the adapters of the standing orders, unless an incomplete view has older ones."""
        found, known = head.orders.adapters, self._adapters
        is_older = found.number < known.number and not head.complete
        if self._model is None or found == known or is_older or not found.number:
            return
        self._adapters = found
        self._model = msgspec.structs.replace(self._model, adapters=found.adapters)

    def _adapters_in_use(self) -> tuple[str, ...]:
        """Digests of retired adapters that requests in flight have."""
        retired = {each.digest for each in self._adapters.retired}
        if not retired:
            return ()
        return tuple(sorted(retired & {entry.prompt.adapter for entry in self._mover.streams}))

    def _learn_model(self, settings: Settings) -> ServedModel | None:
        try:
            download = self._tokenizer is None
            directory = find_model(settings.model, settings.revision, weights=False, download=download)
        except CheckpointError as error:
            if self._tokenizer is None:
                logger.error("the router needs the model's tokenizer, but %s; give --tokenizer", error)
                return None
            name = settings.model
            logger.warning(
                "model %s is not on this host: using sampling defaults of %s", name, self._tokenizer
            )
            directory = self._tokenizer
        return served_model(settings, str(directory))

    def _connect(self, instance: PooledInstance) -> None:
        """Open a connection if that is possible; the other instances are served in any case."""
        try:
            self._connections[instance.name] = InstanceConnection(
                self._context,
                instance,
                self._receiver,
                self._keys,
                router=self._name,
                wants_blocks=self._chooser.wants_blocks,
                count=lambda: len(self._connections),
            )
        except zmq.ZMQError as error:
            self._unconnected.add(f"instance {instance.rank} at {instance.member.address}: {error}")

    def _disconnect(self, instance: PooledInstance) -> None:
        logger.info("instance %d left the mesh", instance.rank)
        connection = self._connections.get(instance.name)
        is_own = connection is not None and connection.serves(instance)
        if connection is not None and is_own:
            connection.take_waiting()
        self._mover.lose(instance)
        self._mover.move_all(instance, "removed" if instance.member.state is State.READY else "drained")
        if is_own:
            self._close_connection(instance.name)

    def _close_connection(self, name: str) -> None:
        connection = self._connections.pop(name, None)
        if connection is not None:
            connection.close()

    async def _look_again(self) -> None:
        """Check deadlines of instances and requests every ``LOOK_INTERVAL`` seconds."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            for instance in self._pool:
                if instance.name not in self._connections:
                    self._connect(instance)
            self._mover.end_warm_ups()
            self._mover.leave_idle_instances()
            self._mover.dispatch_orphans()
