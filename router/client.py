"""The mesh behind this router: connections to all instances, and the requests in flight.

What to do is decided in :mod:`router.pool`, :mod:`router.policy` and :mod:`router.ledger`; this file
moves messages. One connection per instance carries requests out and, once per step, tokens in.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Collection, Mapping
from pathlib import Path

import zmq.asyncio

from coordinator.client import Watcher
from coordinator.keys import MeshKeys
from coordinator.messages import Settings, State, View
from coordinator.rpc import AsyncConnection, OtherProtocol
from engine.checkpoint import CheckpointError, find_model
from engine.messages import (
    Abort,
    Attach,
    Attached,
    Delta,
    Refused,
    Report,
    ToInstance,
    Tokens,
    ToRouter,
)
from router import policy
from router.faults import Event, Faults
from router.ledger import MAX_FRUITLESS, Entry, Ledger, Loss
from router.mesh import MeshError, Prompt, ServedModel
from router.pool import InFlight, Instance, Pool, Standing

logger = logging.getLogger(__name__)

ATTACH_INTERVAL = 1.0
"""Seconds between two signs of life to an instance."""
RECONNECT_INTERVAL = 0.05
"""Seconds between two tries while there is no connection."""
ORPHAN_TIMEOUT = 60.0
"""Seconds that a request which lost its instance waits for another one to come."""
RETRY_AFTER = 1
"""Seconds that clients are asked to wait when nobody can take their request."""


class Stream:
    """The deltas of one request, as its HTTP handler reads them."""

    def __init__(self, client: MeshClient, entry: Entry) -> None:
        self._client = client
        self._entry = entry
        self._deltas: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._error: MeshError | None = None

    @property
    def rank(self) -> int | None:
        """The instance that it runs on now, None while it has none."""
        return self._client.rank_of(self._entry)

    def push(self, delta: Delta) -> None:
        self._deltas.append(delta)
        self._arrived.set()

    def fail(self, error: MeshError) -> None:
        self._error = error
        self._arrived.set()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        while True:
            while self._deltas:
                delta = self._deltas.popleft()
                yield delta
                if delta.finish_reason is not None:
                    return
            if self._error is not None:
                raise self._error
            self._arrived.clear()
            await self._arrived.wait()

    def close(self) -> None:
        """Abort the request unless it has ended."""
        self._client.forget(self._entry)


class _Link:
    """The connection to one instance and the tasks that serve it."""

    def __init__(
        self,
        instance: Instance,
        connection: AsyncConnection[ToRouter, ToInstance],
        tasks: list[asyncio.Task[None]],
    ) -> None:
        self.instance = instance
        self.connection = connection
        self.tasks = tasks

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.connection.close(linger_ms=0)


class MeshClient:
    """The real :class:`router.mesh.Mesh`."""

    def __init__(
        self, coordinator: str, *, model_directory: Path | None = None, keys: MeshKeys | None = None
    ) -> None:
        self._context = zmq.asyncio.Context()
        self._name = f"router-{uuid.uuid4().hex[:8]}"
        self._keys = keys
        self._watcher = Watcher(coordinator, self._name, self._context, keys)
        self._model_directory = model_directory
        self._model: ServedModel | None = None
        self._pool = Pool()
        self._ledger = Ledger()
        self._links: dict[str, _Link] = {}
        self._streams: dict[Entry, Stream] = {}
        self._orphans: list[Entry] = []
        self._resumes = 0
        self.faults = Faults()

    def __repr__(self) -> str:
        return f"<MeshClient {self._pool!r} {self._ledger!r}>"

    async def run(self) -> None:
        """Follow the coordinator's view until cancelled."""
        placing = asyncio.create_task(self._place_orphans_again())
        try:
            await self._watcher.run(self._on_view)
        finally:
            placing.cancel()
            links = list(self._links.values())
            self._links.clear()  # what is closed from now on needs no word to anybody
            for link in links:
                link.close()
            self._context.term()

    # ---- what the HTTP layer asks

    @property
    def model(self) -> ServedModel | None:
        return self._model

    @property
    def healthy(self) -> bool:
        return bool(policy.eligible(self._candidates()))

    @property
    def num_ready(self) -> int:
        """Instances that take requests now."""
        return sum(instance.ready for instance in self._pool)

    @property
    def view(self) -> View | None:
        """The world as the coordinator last told it."""
        return self._watcher.view

    @property
    def coordinator_silent_for(self) -> float | None:
        """Seconds since the coordinator was heard; None if it never was."""
        return self._watcher.silent_for

    @property
    def num_in_flight(self) -> int:
        return len(self._streams)

    @property
    def num_resumes(self) -> int:
        """Requests that went on at another instance so far."""
        return self._resumes

    def reports(self) -> Mapping[int, Report]:
        """The newest report of each instance, by rank."""
        return {instance.rank: instance.report for instance in self._pool if instance.report is not None}

    def epoch(self) -> int | None:
        """Of the newest view."""
        return self.view.epoch if self.view else None

    def instances_by_state(self) -> Mapping[str, int]:
        """How many instances are loading, ready, draining."""
        members = self.view.members if self.view else []
        return {state.value: sum(member.state is state for member in members) for state in State}

    def refused_peers(self) -> Mapping[str, int]:
        """Connections without the mesh's key, by who refused them: the coordinator, or an instance's rank."""
        if self.view is None:
            return {}
        refused = {str(member.rank): member.load.refused_peers for member in self.view.members}
        return {"coordinator": self.view.refused_peers, **refused}

    def standing(self) -> Mapping[int, Standing]:
        """How this router stands with each instance, by rank."""
        counts = Counter(entry.address[0] for entry in self._streams if entry.address is not None)
        return {
            instance.rank: Standing(
                attached=instance.attached,
                failures=instance.trust.failures,
                in_flight=counts[instance.name],
            )
            for instance in self._pool
        }

    def requests(self) -> list[InFlight]:
        """What is being generated, oldest first."""
        return [
            InFlight(entry.prompt.request_id, self.rank_of(entry), len(entry.emitted), entry.attempts)
            for entry in self._streams
        ]

    def rank_of(self, entry: Entry) -> int | None:
        """Where a request runs now."""
        instance = self._pool.get(entry.address[0]) if entry.address else None
        return instance.rank if instance else None

    def generate(self, prompt: Prompt) -> Stream:
        """Send a request to the best instance, or to the one it names.

        Raises:
            MeshError: nobody can take it (503), or the rank it names does not exist (400).
        """
        entry = Entry(prompt)
        instance = self._choose(entry)
        stream = self._streams[entry] = Stream(self, entry)
        self._dispatch(entry, instance)
        return stream

    def forget(self, entry: Entry) -> None:
        """The client is gone or has all it wants: abort the request where it runs."""
        self._streams.pop(entry, None)
        entry.ends_its_move()
        if entry in self._orphans:
            self._orphans.remove(entry)
        address = self._ledger.drop(entry)
        if address is not None and address[0] in self._links:
            self._links[address[0]].connection.send(Abort([address[1]]))

    # ---- choosing

    def _candidates(self, ranks: Collection[int] | None = None) -> list[policy.Candidate]:
        now = time.monotonic()
        return [instance.candidate(now) for instance in self._pool if ranks is None or instance.rank in ranks]

    def _choose(self, entry: Entry) -> Instance:
        instances = {instance.rank: instance for instance in self._pool}
        pinned = entry.prompt.rank
        if entry.attempts and not (pinned in instances and instances[pinned].ready):
            pinned = None  # it was there, and lost it: the client is to notice nothing
        if pinned is not None and pinned not in instances:
            ranks = ", ".join(map(str, sorted(instances))) or "none"
            raise MeshError(
                400,
                "BadRequestError",
                f"there is no instance with data-parallel rank {pinned}; ranks now: {ranks}",
                param="X-data-parallel-rank",
            )
        candidates = self._candidates() if pinned is None else self._candidates({pinned})
        able = policy.eligible(candidates, entry.failed_ranks)
        if not able:
            raise _unavailable(self._why_nobody(pinned))
        return instances[policy.pick(able, entry.work).rank]

    def _why_nobody(self, pinned: int | None) -> str:
        if pinned is not None:
            return f"instance {pinned} takes no requests now"
        view = self.view
        waiting_for = view.waiting_for if view else "the coordinator"
        return "no instance is ready" + (f"; waiting for {waiting_for}" if waiting_for else "")

    def _dispatch(self, entry: Entry, instance: Instance) -> None:
        number = instance.dispatch(entry.work, time.monotonic())
        self._ledger.place(entry, instance.name, number)
        if not self._links[instance.name].connection.send(entry.submit(number)):
            # Its connection just broke, or it no longer reads: not used until it answers on a new one.
            instance.lost(time.monotonic())
            self.faults.count(Event.RESUME, "connection_lost")
            self._resume(entry, instance)

    def _resume(self, entry: Entry, failed: Instance) -> None:
        """Go on elsewhere from what the client already has; wait for an instance if there is none."""
        entry.failed_ranks |= {failed.rank}
        if entry.fruitless >= MAX_FRUITLESS:
            text = f"{entry.fruitless} instances in turn gave no token for the request"
            self._give_up(entry, _unavailable(text))
            return
        try:
            instance = self._choose(entry)
        except MeshError as error:
            self._ledger.drop(entry)
            if error.status == 503:
                entry.orphaned_at = time.monotonic()
                self._orphans.append(entry)
            else:
                self._give_up(entry, error)
            return
        self._resumes += 1
        self._dispatch(entry, instance)

    def _give_up(self, entry: Entry, error: MeshError) -> None:
        self._ledger.drop(entry)
        entry.ends_its_move()
        stream = self._streams.pop(entry, None)
        if stream is not None:
            stream.fail(error)

    # ---- the world changes

    def _on_view(self, view: View) -> None:
        if self._model is None and view.settings is not None:
            self._model = self._learn_model(view.settings)
        changes = self._pool.apply(view, time.monotonic())
        for instance in changes.added:
            self._connect(instance)
        for instance in changes.removed:
            self._disconnect(instance)
        self._place_orphans()

    def _learn_model(self, settings: Settings) -> ServedModel | None:
        try:
            directory = self._model_directory or find_model(settings.model, settings.revision)
        except CheckpointError as error:
            logger.error("the router needs the model's tokenizer, but %s; give --tokenizer", error)
            return None
        return ServedModel(
            names=settings.served_model_name,
            directory=str(directory),
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
        )

    def _connect(self, instance: Instance) -> None:
        logger.info("instance %d at %s", instance.rank, instance.member.address)
        connection: AsyncConnection[ToRouter, ToInstance] = AsyncConnection(
            self._context,
            instance.member.address,
            ToRouter,
            name=f"instance {instance.rank}",
            keys=self._keys,
        )
        tasks = [
            asyncio.create_task(self._receive(instance, connection)),
            asyncio.create_task(self._attach(connection)),
            asyncio.create_task(self._watch(instance, connection)),
        ]
        self._links[instance.name] = _Link(instance, connection, tasks)

    def _disconnect(self, instance: Instance) -> None:
        logger.info("instance %d left the mesh", instance.rank)
        instance.lost(time.monotonic())
        self._move_requests(instance, "removed" if instance.member.state is State.READY else "drained")
        self._links.pop(instance.name).close()

    def _move_requests(self, instance: Instance, reason: str) -> None:
        """What an instance had goes on elsewhere; should it still run there, it is aborted."""
        lost = list(self._ledger.of_instance(instance.name))
        if not lost:
            return
        text = f"{len(lost)} requests of instance {instance.rank} go on elsewhere"
        logger.info("%s (%s)", text, reason)
        self.faults.record(Event.RESUME, reason, text, time.time(), len(lost))
        numbers = [entry.address[1] for entry in lost if entry.address]
        self._links[instance.name].connection.send(Abort(numbers))
        loss = Loss(instance.rank, time.monotonic(), len(lost))
        for entry in lost:
            entry.moves(loss)
            self._resume(entry, instance)

    async def _place_orphans_again(self) -> None:
        """Their wait is bounded also when nothing changes."""
        while True:
            await asyncio.sleep(1.0)
            self._place_orphans()

    def _place_orphans(self) -> None:
        """Requests that waited for an instance to come."""
        orphans, self._orphans = self._orphans, []
        for entry in orphans:
            try:
                instance = self._choose(entry)
            except MeshError as error:
                if time.monotonic() - entry.orphaned_at > ORPHAN_TIMEOUT:
                    self._give_up(entry, error)
                else:
                    self._orphans.append(entry)
                continue
            self._resumes += 1
            self._dispatch(entry, instance)

    # ---- one connection

    async def _attach(self, connection: AsyncConnection[ToRouter, ToInstance]) -> None:
        while True:
            sent = connection.send(Attach(self._name))
            await asyncio.sleep(ATTACH_INTERVAL if sent else RECONNECT_INTERVAL)

    async def _watch(self, instance: Instance, connection: AsyncConnection[ToRouter, ToInstance]) -> None:
        """A broken connection is the first sign of a dead instance: its requests go on elsewhere at once.
        Should it live, it is used again once it answers on a new connection."""
        complained = False
        while True:
            refused = await connection.broken()
            if refused is not None and not complained:
                complained = True
                logger.error("instance %d at %s refused us: %s", instance.rank, connection.endpoint, refused)
            serves = instance.member.state is State.READY
            if instance.lost(time.monotonic()) and serves:
                text = f"the connection to instance {instance.rank} ({instance.name}) broke"
                self.faults.record(Event.DETECTION, "connection_lost", text, time.time())
            self._move_requests(instance, "connection_lost" if serves else "drained")

    async def _receive(self, instance: Instance, connection: AsyncConnection[ToRouter, ToInstance]) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            while True:
                try:
                    message = await connection.receive()
                except OtherProtocol as error:
                    logger.error("instance %d cannot be used: %s", instance.rank, error)
                    return
                match message:
                    case Tokens(deltas, report):
                        instance.take_report(report)
                        if deltas:
                            instance.trust.proved()
                        for delta in deltas:
                            self._pass_on(instance, delta)
                    case Refused():
                        self._on_refused(instance, message)
                    case Attached():
                        self._on_attached(instance)

    def _pass_on(self, instance: Instance, delta: Delta) -> None:
        taken = self._ledger.take(instance.name, delta)
        if taken is None:
            return
        entry, delta = taken
        if entry.loss is not None and (loss := entry.returns(delta, time.monotonic())) is not None:
            logger.info("%s", loss)
        ended = delta.finish_reason is not None
        stream = self._streams.pop(entry, None) if ended else self._streams.get(entry)
        if stream is not None:
            stream.push(delta)

    def _on_refused(self, instance: Instance, refused: Refused) -> None:
        entry = self._ledger.find(instance.name, refused.request)
        if entry is None:
            return
        if not refused.retry:
            self._give_up(entry, MeshError(400, "BadRequestError", refused.reason))
        elif (
            entry.emitted
            or instance.member.state is not State.READY
            or entry.attempts < len(list(self._pool))
        ):
            self.faults.count(Event.RESUME, "refused")
            self._resume(entry, instance)
        else:
            self._give_up(entry, _unavailable(refused.reason))

    def _on_attached(self, instance: Instance) -> None:
        """The instance knows nothing of an earlier connection: what was there is lost, and sent again."""
        instance.attached = True
        self._move_requests(instance, "reattached")
        self._place_orphans()


def _unavailable(message: str) -> MeshError:
    return MeshError(503, "ServiceUnavailableError", message, retry_after=RETRY_AFTER)
