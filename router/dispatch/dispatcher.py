"""Dispatches requests: sends each to an instance, again while that fails, and aborts it.

Where a request goes is decided in :mod:`router.dispatch.chooser`; this file sends the messages. Moves from
one instance to another are in :mod:`router.dispatch.mover`, whose class is based on this one.
"""

from __future__ import annotations

import abc
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping

from coordinator.rpc.rpc import MAX_MESSAGE_BYTES, TooLarge
from engine.messages import Abort
from router.dispatch.chooser import Chooser, unavailable
from router.dispatch.instance_connection import InstanceConnection
from router.dispatch.ledger import MAX_FRUITLESS, Entry, Ledger, entry_of
from router.dispatch.pool import ANSWER_TIMEOUT, Pool, PooledInstance
from router.dispatch.stream import Stream
from router.faults import FaultEvent, Faults
from router.mesh import MeshError, Prompt

ORPHAN_TIMEOUT = 60.0
"""Seconds that a request without an instance waits for one to come."""


class RequestDispatcher(abc.ABC):
    """The requests in flight, each at an instance or waiting for one."""

    def __init__(
        self,
        pool: Pool,
        ledger: Ledger,
        faults: Faults,
        chooser: Chooser,
        connections: Mapping[str, InstanceConnection],
    ) -> None:
        """``connections`` by instance: one that has none is not attached, and gets nothing."""
        self._pool = pool
        self._ledger = ledger
        self._chooser = chooser
        self._connections = connections
        self._faults = faults
        self._orphans: list[Entry] = []
        """Requests that wait for an instance."""
        self.streams: dict[Entry, Stream] = {}
        """All requests in flight, oldest first."""
        self.waiting_for = "the coordinator"
        """What the mesh lacks before it can serve, for error messages; from the newest view."""

    @abc.abstractmethod
    def lose(self, instance: PooledInstance) -> bool:
        """Stop using an instance until it answers on a new connection.

        Returns False if it was lost already.
        """

    # ---- what clients ask

    def generate(
        self, prompt: Prompt, make_stream: Callable[[RequestDispatcher, Entry], Stream] = Stream
    ) -> Stream:
        """Send a request to the best instance, or to the one it names.

        ``make_stream`` makes the stream of its tokens.

        Raises:
            MeshError: no instance can take it (503), or the rank it names does not exist (400).
        """
        now = time.monotonic()
        entry = entry_of(prompt, now)
        try:
            instance = self._choose(entry)
        except MeshError as error:
            if error.status != 503 or not self._chooser.may_soon_choose(entry, now):
                raise
            entry.waits_until = now + ANSWER_TIMEOUT
            self._orphans.append(entry)
            stream = self.streams[entry] = make_stream(self, entry)
        else:
            stream = self.streams[entry] = make_stream(self, entry)
            self._begin(entry, instance)
        return stream

    def generate_at(self, prompt: Prompt, instance: PooledInstance) -> Stream:
        """Send a background request to this instance; its stream fails if it cannot stay there."""
        entry = Entry(prompt, begun_at=time.monotonic())
        stream = self.streams[entry] = Stream(self, entry)
        self._begin(entry, instance)
        return stream

    def rank_of(self, entry: Entry) -> int | None:
        """The instance where a request runs now."""
        instance = self._pool.get(entry.address[0]) if entry.address else None
        return instance.rank if instance else None

    def num_at_instances(self) -> Counter[str]:
        """Clients' requests in flight, by instance."""
        return Counter(entry.address[0] for entry in self.of_clients() if entry.address is not None)

    def of_clients(self) -> Iterator[Entry]:
        """Requests in flight that a client waits for, oldest first."""
        return (entry for entry in self.streams if not entry.prompt.background)

    def forget(self, entry: Entry) -> None:
        """Abort a request where it runs: its client is gone, or has all it wants."""
        self.streams.pop(entry, None)
        entry.ends_its_move()
        if entry in self._orphans:
            self._orphans.remove(entry)
        self._abort(entry)
        self._drop(entry)

    def give_up_all(self, why: str) -> list[str]:
        """End every request in flight with a 503; returns the ids of those of clients."""
        ids = [entry.prompt.request_id for entry in self.of_clients()]
        self._orphans.clear()
        for entry in list(self.streams):
            self._abort(entry)
            self.give_up(entry, unavailable(why))
        return ids

    def give_up(self, entry: Entry, error: Exception) -> None:
        """End a request with an error, which its stream raises."""
        self._drop(entry)
        entry.ends_its_move()
        if isinstance(error, MeshError):
            error.num_lost = entry.num_lost
        stream = self.streams.pop(entry, None)
        if stream is not None:
            stream.fail(error)

    # ---- to an instance

    def resume(self, entry: Entry, failed: PooledInstance, patience: float = ORPHAN_TIMEOUT) -> None:
        """Continue a request on another instance from the tokens that its client already has.

        Without an instance that can take it, the request waits for at most ``patience`` seconds.
        """
        instance = self._choose_after(entry, failed, patience)
        if instance is not None:
            self._dispatch(entry, instance)

    def resume_refused(self, entry: Entry, refused_by: PooledInstance, refusal: MeshError) -> None:
        """Continue a request where it has not failed, or end it with the refusal.

        Others may hold what an instance will never take.
        """
        entry.owed = True
        entry.uncount_try()  # it ended nothing
        entry.failed_at(refused_by.rank)
        try:
            instance = self._choose(entry)
        except MeshError:
            self.give_up(entry, refusal)
            return
        if instance.rank in entry.failed_ranks:
            self.give_up(entry, refusal)
            return
        self._faults.count(FaultEvent.RESUME, "refused")
        self._dispatch(entry, instance)

    def dispatch_orphans(self) -> None:
        """Dispatch the waiting requests that an instance can take now."""
        orphans, self._orphans = deque(self._orphans), []
        try:
            while orphans:
                self._dispatch_orphan(orphans.popleft())
        finally:  # an error with one is none of the others' concern
            self._orphans += orphans

    def _choose(self, entry: Entry) -> PooledInstance:
        return self._chooser.choose(entry, time.monotonic(), self.waiting_for)

    def _begin(self, entry: Entry, instance: PooledInstance) -> None:
        """Send a new request to an instance, as :meth:`_dispatch`."""
        try:
            self._dispatch(entry, instance)
        except Exception:
            self.forget(entry)  # else it would fail again with each move, and others with it
            raise

    def _dispatch(self, entry: Entry, instance: PooledInstance, copy: int = 0) -> None:
        """Send a request to an instance or, while that fails, to the best other one.

        ``copy``: the instance takes it over, with the blocks of this copy.
        """
        chosen: PooledInstance | None = instance
        while chosen is not None:
            number = self._chooser.dispatch(entry, chosen, time.monotonic())
            try:
                if self._connections[chosen.name].send(entry.submit(number, copy), entry.growth):
                    return
            except TooLarge as error:  # for every instance
                why = f"The request is too large for an instance: {error}, {MAX_MESSAGE_BYTES} at most."
                self.give_up(entry, MeshError(400, "BadRequestError", why))
                return
            copy = 0
            # Its connection just broke, or it no longer reads: not used until it answers on a new one.
            self.lose(chosen)
            entry.uncount_try()  # it never got there
            entry.owed = True
            self._faults.count(FaultEvent.RESUME, "connection_lost")
            chosen = self._choose_after(entry, chosen)

    def _choose_after(
        self, entry: Entry, failed: PooledInstance, patience: float = ORPHAN_TIMEOUT
    ) -> PooledInstance | None:
        """The next instance for a request that ``failed`` did not finish.

        None: the request waits for one, or is given up.
        """
        entry.failed_at(failed.rank)
        if entry.prompt.background:
            self.give_up(entry, unavailable(f"instance {failed.rank} does not take the request"))
            return None
        if entry.fruitless >= MAX_FRUITLESS:
            text = f"{entry.fruitless} instances in turn gave no token for the request"
            self.give_up(entry, unavailable(text, is_final=True))
            return None
        try:
            return self._choose(entry)
        except MeshError as error:
            self._drop(entry)
            if error.status == 503 and entry.owed:
                entry.waits_until = time.monotonic() + patience
                self._orphans.append(entry)
            else:
                self.give_up(entry, error)
            return None

    def _dispatch_orphan(self, entry: Entry) -> None:
        try:
            instance = self._choose(entry)
        except MeshError as error:
            if time.monotonic() > entry.waits_until:
                self.give_up(entry, error)
            else:
                self._orphans.append(entry)
            return
        except Exception as error:
            self.give_up(entry, error)
            raise
        try:
            self._dispatch(entry, instance)
        except (OverflowError, TypeError, ValueError) as error:  # no message can hold it
            self.give_up(entry, error)

    def _abort(self, entry: Entry) -> None:
        address = entry.address
        if address is not None and address[0] in self._connections:
            self._connections[address[0]].send(Abort([address[1]]))

    def _drop(self, entry: Entry) -> None:
        self._chooser.settle(entry)
        self._ledger.drop(entry)
