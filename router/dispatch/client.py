"""The mesh behind this router: connections to all instances, and the requests in flight.

What to do is decided in :mod:`router.dispatch.chooser` (with :mod:`router.dispatch.pool` and
:mod:`router.dispatch.policy`),
:mod:`router.dispatch.recalls` and :mod:`router.dispatch.ledger`; this file moves messages. One connection per
instance (:mod:`router.dispatch.instance_connection`) carries requests out and, once per step, tokens in.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import Mapping
from pathlib import Path

import zmq
import zmq.asyncio

from coordinator.member_connection import Watcher
from coordinator.messages import Settings, State, View
from coordinator.rpc.complaints import Complaints
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import with_room
from engine.messages import (
    Abort,
    Attached,
    InstanceReport,
    Recall,
    Recalled,
    RequestRefused,
    Tokens,
    ToRouter,
)
from engine.model.checkpoint import CheckpointError, find_model
from router.dispatch.chooser import Chooser, unavailable
from router.dispatch.delivery import Delivery
from router.dispatch.instance_connection import InstanceConnection
from router.dispatch.ledger import MAX_FRUITLESS, Entry, Flight, Ledger, Loss, named
from router.dispatch.policy import Policy, eligible
from router.dispatch.pool import ANSWER_TIMEOUT, Instance, InstanceHealth, Pool
from router.dispatch.recalls import Recaller
from router.dispatch.stream import Stream
from router.faults import FaultEvent, Faults
from router.mesh import MeshError, Prompt, ServedModel

logger = logging.getLogger(__name__)

ORPHAN_TIMEOUT = 60.0
"""Seconds that a request which lost its instance waits for another one to come."""

LOOK_INTERVAL = 1.0
"""Seconds between two looks at what waits although nothing changes."""


class MeshClient:
    """The real :class:`router.mesh.Mesh`."""

    def __init__(
        self,
        coordinator: str,
        *,
        tokenizer: str | None = None,
        keys: MeshKeys | None = None,
        policy: Policy = Policy.PREFIX_AWARE,
    ) -> None:
        """``tokenizer``: its directory, where it is not the model's."""
        self._context = with_room(zmq.asyncio.Context())
        self._name = f"router-{uuid.uuid4().hex[:8]}"
        self._keys = keys
        self._watcher = Watcher(coordinator, self._name, self._context, keys)
        self._tokenizer = Path(tokenizer).expanduser() if tokenizer else None
        self._model: ServedModel | None = None
        self._pool = Pool()
        self._ledger = Ledger()
        self._chooser = Chooser(self._pool, self._ledger, policy)
        self._recaller = Recaller(self._pool, self._ledger)
        self._moves_queued = policy in (Policy.PREFIX_AWARE, Policy.LEAST_LOADED)
        self._links: dict[str, InstanceConnection] = {}
        """By instance. One that has none is not attached, and gets nothing."""
        self._unlinked = Complaints(logger, "an instance cannot be connected to, and is tried again")
        self._streams: dict[Entry, Stream] = {}
        self._passing = Delivery(self._ledger, self._streams, self._chooser.settle)
        self._orphans: list[Entry] = []
        self._moves = 0
        self.faults = Faults()

    def __repr__(self) -> str:
        return f"<MeshClient {self._pool!r} {self._ledger!r}>"

    async def run(self) -> None:
        """Follow the coordinator's view until cancelled, or until an error ends what this does."""
        parts = [
            asyncio.create_task(each)
            for each in (self._watcher.run(self._on_view), self._place_orphans_again())
        ]
        try:
            await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
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
        return bool(eligible(self._chooser.candidates(time.monotonic())))

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

    def choices(self) -> Mapping[str, int]:
        """Outcomes of routing so far: see :class:`router.mesh.MeshFacts`."""
        return {**self._chooser.counts, "moves": self._moves}

    def reports(self) -> Mapping[int, InstanceReport]:
        """The newest report of each instance, by rank."""
        return {instance.rank: instance.report for instance in self._pool if instance.report is not None}

    def epoch(self) -> int | None:
        """Of the newest view."""
        return self.view.epoch if self.view else None

    def block_size(self) -> int | None:
        """Tokens of a KV block."""
        return self.view.settings.block_size if self.view and self.view.settings else None

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

    def standing(self) -> Mapping[int, InstanceHealth]:
        """How this router stands with each instance, by rank."""
        counts = Counter(entry.address[0] for entry in self._streams if entry.address is not None)
        return {
            instance.rank: InstanceHealth(
                attached=instance.attached,
                failures=instance.trust.failures,
                in_flight=counts[instance.name],
            )
            for instance in self._pool
        }

    def flights(self, most: int) -> list[Flight]:
        """The oldest requests in flight, at most so many."""
        now = time.monotonic()
        return [
            Flight(
                request_id=entry.prompt.request_id,
                rank=self.rank_of(entry),
                prompt_tokens=len(entry.prompt.prompt_ids),
                output_tokens=len(entry.emitted),
                attempts=entry.attempts,
                age=now - entry.begun_at,
            )
            for entry in itertools.islice(self._streams, most)
        ]

    def rank_of(self, entry: Entry) -> int | None:
        """Where a request runs now."""
        instance = self._pool.get(entry.address[0]) if entry.address else None
        return instance.rank if instance else None

    def check_room(self) -> None:
        """Refuse early where every queue is full.

        Raises:
            MeshError: so it is (503).
        """
        self._chooser.check_room(time.monotonic())

    def generate(self, prompt: Prompt) -> Stream:
        """Send a request to the best instance, or to the one it names.

        Raises:
            MeshError: nobody can take it (503), or the rank it names does not exist (400).
        """
        now = time.monotonic()
        entry = Entry(prompt, begun_at=now)
        try:
            instance = self._choose(entry)
        except MeshError as error:
            if error.status != 503 or not self._chooser.may_soon_choose(entry, now):
                raise
            entry.waits_until = now + ANSWER_TIMEOUT
            self._orphans.append(entry)
            stream = self._streams[entry] = Stream(self, entry)
        else:
            stream = self._streams[entry] = Stream(self, entry)
            try:
                self._dispatch(entry, instance)
            except Exception:
                self.forget(entry)  # else it would fail again with each move, and others with it
                raise
        return stream

    def forget(self, entry: Entry) -> None:
        """The client is gone or has all it wants: abort the request where it runs."""
        self._streams.pop(entry, None)
        entry.ends_its_move()
        if entry in self._orphans:
            self._orphans.remove(entry)
        self._chooser.settle(entry)
        address = self._ledger.drop(entry)
        if address is not None and address[0] in self._links:
            self._links[address[0]].send(Abort([address[1]]))

    def give_up_all(self, why: str) -> list[str]:
        """End every request in flight with a 503; their ids."""
        entries = list(self._streams)
        self._orphans.clear()
        for entry in entries:
            address = entry.address
            if address is not None and address[0] in self._links:
                self._links[address[0]].send(Abort([address[1]]))
            self._give_up(entry, unavailable(why))
        return [entry.prompt.request_id for entry in entries]

    # ---- choosing

    def _choose(self, entry: Entry) -> Instance:
        view = self.view
        waiting_for = view.waiting_for if view else "the coordinator"
        return self._chooser.choose(entry, time.monotonic(), waiting_for)

    def _dispatch(self, entry: Entry, instance: Instance) -> None:
        """Send a request there, or, as long as that fails, to the best of those who are left."""
        chosen: Instance | None = instance
        while chosen is not None:
            number = self._chooser.dispatch(entry, chosen, time.monotonic())
            if self._links[chosen.name].send(entry.submit(number)):
                return
            # Its connection just broke, or it no longer reads: not used until it answers on a new one.
            self._lost(chosen)
            entry.uncount_try()  # it never got there
            entry.owed = True
            self.faults.count(FaultEvent.RESUME, "connection_lost")
            chosen = self._choose_after(entry, chosen)

    def _lost(self, instance: Instance) -> bool:
        """Whether that was news."""
        self._pool.index.forget(instance.name)
        return instance.lost(time.monotonic())

    def _resume(self, entry: Entry, failed: Instance, patience: float = ORPHAN_TIMEOUT) -> None:
        """Go on elsewhere from what the client already has.

        Wait for an instance if there is none.
        """
        instance = self._choose_after(entry, failed, patience)
        if instance is not None:
            self._dispatch(entry, instance)

    def _choose_after(
        self, entry: Entry, failed: Instance, patience: float = ORPHAN_TIMEOUT
    ) -> Instance | None:
        """The next instance for a request that one has failed.

        None: it waits for one, or is given up.
        """
        entry.failed_at(failed.rank)
        if entry.fruitless >= MAX_FRUITLESS:
            text = f"{entry.fruitless} instances in turn gave no token for the request"
            self._give_up(entry, unavailable(text))
            return None
        try:
            return self._choose(entry)
        except MeshError as error:
            self._drop(entry)
            if error.status == 503 and entry.owed:
                entry.waits_until = time.monotonic() + patience
                self._orphans.append(entry)
            else:
                self._give_up(entry, error)
            return None

    def _drop(self, entry: Entry) -> None:
        self._chooser.settle(entry)
        self._ledger.drop(entry)

    def _give_up(self, entry: Entry, error: Exception) -> None:
        self._drop(entry)
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
            logger.info("instance %d at %s", instance.rank, instance.member.address)
            self._connect(instance)
        for instance in changes.removed:
            self._disconnect(instance)
        self._place_orphans()

    def _learn_model(self, settings: Settings) -> ServedModel | None:
        try:
            download = self._tokenizer is None
            directory = find_model(settings.model, settings.revision, weights=False, download=download)
        except CheckpointError as error:
            if self._tokenizer is None:
                logger.error("the router needs the model's tokenizer, but %s; give --tokenizer", error)
                return None
            name = settings.model
            logger.warning("model %s is not here: sampling defaults are those of %s", name, self._tokenizer)
            directory = self._tokenizer
        return ServedModel(
            names=settings.served_model_name,
            directory=str(directory),
            vocab_size=settings.vocab_size,
            max_model_len=settings.max_model_len,
        )

    def _connect(self, instance: Instance) -> None:
        """If that is possible. The others are served through this router in any case."""
        try:
            self._links[instance.name] = InstanceConnection(
                self._context,
                instance,
                self,
                self._keys,
                router=self._name,
                wants_blocks=self._chooser.wants_blocks,
            )
        except zmq.ZMQError as error:
            self._unlinked.add(f"instance {instance.rank} at {instance.member.address}: {error}")

    def _disconnect(self, instance: Instance) -> None:
        logger.info("instance %d left the mesh", instance.rank)
        if instance.name in self._links:
            self._links[instance.name].take_waiting()
        self._lost(instance)
        self._move_requests(instance, "removed" if instance.member.state is State.READY else "drained")
        link = self._links.pop(instance.name, None)
        if link is not None:
            link.close()

    def _move_requests(self, instance: Instance, reason: str, *, patience: float = ORPHAN_TIMEOUT) -> None:
        """What an instance had goes on elsewhere; should it still run there, it is aborted.

        With nobody to take it, it waits for ``patience`` seconds.
        """
        lost = self._ledger.of_instance(instance.name)
        if not lost:
            return
        text = f"{len(lost)} requests of instance {instance.rank} go on elsewhere"
        logger.info("%s (%s): %s", text, reason, named(entry.prompt.request_id for entry in lost))
        self.faults.record(FaultEvent.RESUME, reason, text, time.time(), len(lost))
        numbers = [entry.address[1] for entry in lost if entry.address]
        self._links[instance.name].send(Abort(numbers))
        loss = Loss(instance.rank, time.monotonic(), len(lost))
        for entry in lost:
            entry.owed = True
            entry.moves(loss)
            if instance.is_leaving:
                entry.uncount_try()
            self._resume(entry, instance, patience)

    async def _place_orphans_again(self) -> None:
        """Their wait is bounded also when nothing changes."""
        while True:
            await asyncio.sleep(LOOK_INTERVAL)
            for instance in self._pool:
                if instance.name not in self._links:
                    self._connect(instance)
            self._leave_idle_instances()
            self._place_orphans()

    def _leave_idle_instances(self) -> None:
        """Requests do not stay for ever at an instance that no group takes in."""
        for instance in self._pool.without_group(time.monotonic(), ORPHAN_TIMEOUT):
            self._move_requests(instance, "no_group", patience=0.0)

    def _place_orphans(self) -> None:
        """Requests that waited for an instance to come, or to answer."""
        orphans, self._orphans = deque(self._orphans), []
        try:
            while orphans:
                self._place(orphans.popleft())
        finally:  # an error with one is none of the others' concern
            self._orphans += orphans

    def _place(self, entry: Entry) -> None:
        try:
            instance = self._choose(entry)
        except MeshError as error:
            if time.monotonic() > entry.waits_until:
                self._give_up(entry, error)
            else:
                self._orphans.append(entry)
            return
        except Exception as error:
            self._give_up(entry, error)
            raise
        try:
            self._dispatch(entry, instance)
        except (OverflowError, TypeError, ValueError) as error:  # no message can hold it
            self._give_up(entry, error)

    # ---- one connection

    def connection_broke(self, instance: Instance) -> None:
        """The first sign of a dead instance: its requests go on elsewhere at once."""
        serves = instance.member.state is State.READY
        if self._lost(instance) and serves:
            text = f"the connection to instance {instance.rank} ({instance.name}) broke"
            self.faults.record(FaultEvent.DETECTION, "connection_lost", text, time.time())
        self._move_requests(instance, "connection_lost" if serves else "drained")

    def link_failed(self, instance: Instance) -> None:
        """As if it had broken.

        Another one is opened at the next look: what was wrong may be so again.
        """
        try:
            self.connection_broke(instance)
        finally:
            self._links.pop(instance.name).close()

    def received(self, instance: Instance, message: ToRouter) -> None:
        match message:
            case Tokens(deltas, report, blocks, singles):
                if report is not None:
                    instance.take_report(report, time.monotonic())
                if blocks is not None and not self._pool.index.apply(instance.name, blocks):
                    self._links[instance.name].ask_for_blocks()
                if deltas or singles:
                    instance.trust.proved()
                self._passing.singles(instance.name, singles)
                if deltas:
                    self._passing.deltas(instance.name, deltas)
                if report is not None:
                    self._recall()
            case RequestRefused():
                self._on_refused(instance, message)
            case Recalled(numbers):
                self._on_recalled(instance, numbers)
            case Attached():
                self._on_attached(instance, message)

    def _recall(self) -> None:
        """Ask queued requests back that another instance has time for."""
        if not self._moves_queued:
            return
        for name, numbers in self._recaller.recalls(time.monotonic()).items():
            instance = self._pool.get(name)
            if not self._links[name].send(Recall(numbers)) and instance is not None:
                self._recaller.answered(instance)  # nobody will: it does not read, and they stay

    def _on_recalled(self, instance: Instance, numbers: list[int]) -> None:
        """They wait where it is best now, which may be where they were."""
        self._recaller.answered(instance)
        for number in numbers:
            entry = self._ledger.find(instance.name, number)
            if entry is None:
                continue
            entry.owed = True
            entry.uncount_try()
            self._moves += 1
            self._chooser.settle(entry)  # it leaves nothing there
            try:
                chosen = self._choose(entry)
            except MeshError:  # the last one left has just failed
                self._resume(entry, instance)
            else:
                self._dispatch(entry, chosen)

    def _on_refused(self, instance: Instance, refused: RequestRefused) -> None:
        instance.leaves = instance.leaves or refused.leaves
        entry = self._ledger.find(instance.name, refused.request)
        if entry is None:
            return
        if not refused.retry:
            self._give_up(entry, MeshError(400, "BadRequestError", refused.reason))
            return
        entry.uncount_try()
        if entry.owed or not instance.ready:
            entry.owed = True
            self.faults.count(FaultEvent.RESUME, "refused")
            self._resume(entry, instance)
        elif entry.attempts < len(list(self._pool)) and entry.prompt.rank is None:
            self._resume(entry, instance)  # its queue is full; another one's may not be
        else:
            self._give_up(entry, unavailable(refused.reason))

    def _on_attached(self, instance: Instance, attached: Attached) -> None:
        """The instance knows nothing of an earlier connection: what was there is lost, and sent again."""
        if attached.repeated and instance.attached:
            return
        instance.attached, instance.capacity, instance.asked_back = True, attached.capacity, False
        self._move_requests(instance, "reattached")
        self._place_orphans()
