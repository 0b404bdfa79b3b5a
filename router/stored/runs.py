"""Runs of stored answers, each in a task that no connection ends.

A run is begun by a request, or adopted from the store: to follow the router that owns it, and to go on in its
place once that is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from enum import StrEnum
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from router.api.stored_terms import StoredTerms
from router.dispatch.ledger import MAX_FRUITLESS
from router.errors import ApiError, error_body, from_mesh, unexpected
from router.ids import repeat_ids
from router.mesh import Mesh, MeshError
from router.metrics.metrics import Metrics
from router.metrics.request_histograms import CountedRequests
from router.stored.conversation_store import addition
from router.stored.database import StoreUnusable
from router.stored.event_log import EventLog
from router.stored.journal import RETRY_SECONDS, Journal, JournalMesh
from router.stored.replayed_body import Handler, inner_request
from router.stored.store import AnswerState, AnswerStore, StoredAnswer, id_of, key_of, unpacked

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.5
"""Interval at which dead routers, cancelled answers and readers that stay away are looked for."""
FOLLOW_SECONDS = 0.05
"""Interval at which a run follows another router's tokens."""
EXPIRY_SECONDS = 60.0
REFUSED_SECONDS = 10.0
"""Time for adapters of adopted runs."""
REPEATED_HEADERS = (b"x-data-parallel-rank", b"x-session-affinity", b"x-session-id", b"x-lockstep-capsule")
"""Request headers that change an answer or its instance; ``x-request-timeout`` is for one connection."""


class Purpose(StrEnum):
    """Why an answer is stored."""

    STORED = "stored"
    """Its client wants it again later."""
    BACKGROUND = "background"
    """As ``STORED``, and no client waits."""
    RESUMABLE = "resumable"
    """Its client may lose the connection."""


class RunRequest(msgspec.Struct, frozen=True):
    """A request as it can be run again, at any router."""

    kind: str
    """Name of its handler."""
    body: bytes
    headers: list[tuple[bytes, bytes]]
    request_id: str
    key: int
    """Number of the client's API key."""
    created: int
    """Seconds since 1970."""
    seed: int
    purpose: Purpose
    model: str
    """Fingerprint of the model that answers: tokens of another one cannot be continued."""
    conversation: str = ""
    """Id of the conversation that it goes on with."""
    new_items: bytes = b""
    """Items, in JSON, that the request adds to the conversation."""


class NewAnswer(msgspec.Struct, frozen=True):
    """A request for an answer that is to be stored."""

    kind: str
    """Name of its handler."""
    id: str
    client_id: str
    """Its id without what the API puts before."""
    purpose: Purpose
    body: bytes
    items: bytes = b""
    """Items of the conversation that it answers, in JSON."""
    conversation: str = ""
    """Id of the conversation to which new items and answer are added."""
    new_items: bytes = b""
    """Those items, in JSON."""


class RouterEnds(Exception):
    """The router ends, and its connections with it: readers go on at another one."""


class Run:
    """One answer that is being made, and the readers of its stream."""

    def __init__(self, id: str, tenant: str, request: RunRequest, *, owned: bool) -> None:
        self.id = id
        self.tenant = tenant
        self.key = key_of(tenant, id)
        """Its key in the store."""
        self.request = request
        self.log = EventLog(None if request.kind == "responses" else id)
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the stream, once its first event is there."""
        self.owned = owned
        """Whether this router makes it, rather than following another one."""
        self.counts: CountedRequests | None = None if owned else CountedRequests()
        """Counts of an answer that another router began, until it has ended."""
        self.task: asyncio.Task[None] | None = None
        self.cancelled = False
        self.num_lost = 0
        """Instances that ended under it, over all its tries without any token."""
        self.refused_at: float | None = None
        """When a mesh that has a model first refused what another router had taken."""
        self._readers = 0
        self._left_at = time.monotonic()

    def __repr__(self) -> str:
        return f"<Run {self.id}: {self.log}, {self._readers} readers>"

    @classmethod
    def ended(cls, row: StoredAnswer, events: list[bytes]) -> Run:
        """An answer that has ended, as a run with all its events."""
        run = cls.elsewhere(row)
        run.log.replace(events)
        return run

    @classmethod
    def elsewhere(cls, row: StoredAnswer) -> Run:
        """An answer that another router has begun."""
        request = msgspec.msgpack.decode(row.request, type=RunRequest)
        return cls(id_of(row.id), row.tenant, request, owned=False)

    @contextlib.contextmanager
    def reader(self) -> Iterator[None]:
        """Context of a client that reads the stream."""
        self._readers += 1
        try:
            yield
        finally:
            self._readers -= 1
            self._left_at = time.monotonic()

    def is_left(self, window: float) -> bool:
        """Whether nobody has read a stream for so many seconds that somebody should read."""
        waits = self.request.purpose is Purpose.RESUMABLE or not self.owned
        return waits and not self._readers and time.monotonic() - self._left_at > window


class Runs:
    """All runs of this router."""

    def __init__(
        self,
        store: AnswerStore,
        mesh: Mesh,
        handlers: Mapping[str, Handler],
        counts: Metrics,
        *,
        window: float,
        ttl: float,
    ) -> None:
        """``window``: seconds that a resumable stream waits for its client; ``ttl``: that others are kept."""
        self.store = store
        self._mesh = mesh
        self._handlers = handlers
        self.counts = counts
        self._window = window
        self._ttl = ttl
        self._runs: dict[str, Run] = {}
        self._is_closing = False
        self._takes_over = True
        self._complaint = ""

    def __repr__(self) -> str:
        return f"<Runs {list(self._runs)}>"

    # ---- begin, find

    async def begin(self, request: Request, new: NewAnswer) -> Run:
        """Begin a new answer.

        Raises:
            ApiError, MeshError: the request is refused.
            StoreFull, StoreUnusable, AnswerExists: it cannot be stored.
        """
        again = RunRequest(
            kind=new.kind,
            body=new.body,
            headers=[each for each in request.scope["headers"] if each[0] in REPEATED_HEADERS],
            request_id=new.client_id,
            key=getattr(request.state, "key", 0),
            created=int(time.time()),
            seed=random.SystemRandom().getrandbits(63),
            purpose=new.purpose,
            model=fingerprint_of(self._mesh),
            conversation=new.conversation,
            new_items=new.new_items,
        )
        tenant = tenant_of(request)
        run = Run(new.id, tenant, again, owned=True)
        row = StoredAnswer(
            id=run.key,
            tenant=tenant,
            created=time.time(),
            expires=self._expiry(again),
            state=AnswerState.RUNNING,
            owner=self.store.owner,
            request=msgspec.msgpack.encode(again),
            input=new.items,
        )
        await self.store.begin(row)
        journal = Journal(run.key, self.store, [], None, lambda: self._lost(run))
        try:
            response, scope = await self._handled(run, journal)
        except BaseException:
            await self.store.delete(run.key)
            raise
        self.counts.store.events["answer_begun"] += 1
        self._start(run, self._made(run, response, scope))
        return run

    async def find(self, id: str, tenant: str) -> Run | None:
        """The running answer of this id; one of another router is followed."""
        key = key_of(tenant, id)
        if (run := self._runs.get(key)) is not None:
            return run
        row = await self.store.get(key)
        if row is None or row.state is not AnswerState.RUNNING:
            return None
        return self._runs.get(key) or self._adopt(row)

    def _adopt(self, row: StoredAnswer) -> Run:
        run = Run.elsewhere(row)
        self._start(run, self._followed(run))
        return run

    async def cancel(self, key: str, answer: bytes) -> None:
        """Cancel an answer, wherever it runs; ``answer`` is what is left of it."""
        await self.store.cancel(key, answer)
        if (run := self._runs.get(key)) is not None:
            self._stop(run)

    async def delete(self, key: str) -> None:
        """Delete an answer; one that runs ends."""
        if (run := self._runs.get(key)) is not None:
            self._stop(run)
        await self.store.delete(key)

    def complain(self, error: Exception) -> None:
        """Log why an answer is not stored, once until it is another reason."""
        if str(error) != self._complaint:
            self._complaint = str(error)
            logger.error("answers are not stored: %s", error)

    # ---- run

    def _start(self, run: Run, work: Awaitable[None]) -> None:
        self._runs[run.key] = run

        async def whole() -> None:
            repeat_ids(run.request.seed)
            try:
                await work
            except StoreUnusable as error:
                logger.error("answer %s is lost for later readers: %s", run.id, error)
                if not run.log.events:
                    run.log.end(ApiError(503, "The store of answers fails."))
                else:
                    run.log.end(None if run.owned else RouterEnds())
            except Exception:
                logger.exception("the run of answer %s failed", run.id)
                run.log.end(None if run.log.events else unexpected())
                if run.owned:  # else the next one would fail in the same way
                    await self._store_end(run, unexpected())
            finally:
                self._runs.pop(run.key, None)

        run.task = asyncio.create_task(whole())

    def _stop(self, run: Run) -> None:
        run.cancelled = True
        if run.task is not None:
            run.task.cancel()
        run.log.end()

    async def _handled(self, run: Run, journal: Journal) -> tuple[Response, Scope]:
        """The response that will stream the answer, and the scope to call it with."""
        again = run.request
        counts = run.counts
        mesh = JournalMesh(self._mesh, journal, None if counts is None else partial(_is_passing, run))
        # one that another router has begun was let in there
        terms = StoredTerms(again.created, again.seed, mesh, is_limited=counts is None, counts=counts)
        request = inner_request(again.body, again.request_id, again.key, terms, again.headers)
        return await self._handlers[again.kind](request), request.scope

    async def _made(self, run: Run, response: Response, scope: Scope, *, retries: bool = False) -> None:
        """Generate an answer to its end.

        Raises:
            _Unavailable: no instance takes it, and ``retries``.
        """

        async def never() -> Message:
            await asyncio.get_running_loop().create_future()
            raise AssertionError("nobody hangs up")

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                run.headers = list(message["headers"])
            else:
                run.log.write(message["body"])

        error: ApiError | None = None
        is_final = not retries
        try:
            await response(scope, never, send)
        except MeshError as raised:
            error = from_mesh(raised)
            is_final = is_final or _ends_instances(run, raised)
        except ApiError as raised:
            error = raised
        if self._is_closing:
            return
        if error is not None and error.status == 503 and not is_final:
            raise _Unavailable from error
        await self._store_end(run, error)
        run.log.end(error)

    async def _store_end(self, run: Run, error: ApiError | None) -> None:
        state, answer = (AnswerState.FAILED, error_body(error)) if error is not None else outcome_of(run)
        also = None
        if run.request.conversation and state is AnswerState.DONE and answer is not None:
            added = msgspec.json.decode(run.request.new_items) + msgspec.json.decode(answer)["output"]
            also = addition(run.request.conversation, run.tenant, added, time.time() + self._ttl)
        await self.store.end(run.key, state, self._expiry(run.request), answer, run.log.events, also)
        self.counts.store.events[f"answer_{state}"] += 1
        if run.counts is not None:
            self.counts.take(run.counts)

    async def _followed(self, run: Run) -> None:
        """Follow another router's run, and go on with it once that router is dead."""

        async def continues() -> bool:
            if await self.store.claim(run.key):
                if not run.owned:
                    run.owned = True
                    self.counts.store.events["answer_taken_over"] += 1
                    logger.info("goes on with answer %s, whose router is gone", run.id)
                return False
            await asyncio.sleep(FOLLOW_SECONDS)
            return True

        watching = asyncio.create_task(self._ended_elsewhere(run))
        try:
            while not run.log.has_ended:
                making = asyncio.create_task(self._remade(run, continues))
                await asyncio.wait((making, watching), return_when=asyncio.FIRST_COMPLETED)
                if not making.done():
                    making.cancel()
                    await asyncio.gather(making, return_exceptions=True)
                    watching.result()  # where the store has failed, readers would wait for ever
                    return
                try:
                    making.result()
                except _Unavailable:
                    await asyncio.sleep(RETRY_SECONDS)
        finally:
            watching.cancel()

    async def _remade(self, run: Run, continues: Callable[[], Awaitable[bool]]) -> None:
        run.log.rewind()
        repeat_ids(run.request.seed)
        if self._mesh.model is None:
            raise _Unavailable("nobody has said yet which model is served")
        recorded = await self.store.tokens(run.key, 0)
        journal = Journal(run.key, self.store, recorded, continues, lambda: self._lost(run))
        try:
            if run.request.model != fingerprint_of(self._mesh):
                raise ApiError(409, "The model has changed since this answer began.")
            response, scope = await self._handled(run, journal)
        except MeshError as error:
            raise _Unavailable from error
        except ApiError as error:
            now = time.monotonic()
            run.refused_at = now if run.refused_at is None else run.refused_at
            is_early = error.status == 404 and now - run.refused_at < REFUSED_SECONDS
            if error.status == 503 or is_early or await continues():  # a living router goes on with it
                raise _Unavailable from error
            await self._store_end(run, error)
            run.log.end(error)
            return
        await self._made(run, response, scope, retries=True)

    async def _ended_elsewhere(self, run: Run) -> None:
        """Wait until another router has ended the answer, then take its events from the store."""
        while True:
            row = await self.store.get(run.key)
            if row is None or (row.state is not AnswerState.RUNNING and not run.owned):
                run.log.replace(unpacked(row.events) if row is not None and row.events else run.log.events)
                return
            await asyncio.sleep(FOLLOW_SECONDS)

    # ---- beside them

    async def keep(self) -> None:
        """Take over answers of dead routers, and end those that nobody wants, until cancelled."""
        expired_at = -EXPIRY_SECONDS
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            try:
                await self._sweep()
                if time.monotonic() - expired_at > EXPIRY_SECONDS:
                    expired_at = time.monotonic()
                    self.counts.store.num_bytes = await self.store.expire()
            except StoreUnusable as error:
                logger.warning("%s", error)
                await asyncio.sleep(10 * SWEEP_SECONDS)

    async def _sweep(self) -> None:
        for run in list(self._runs.values()):
            if run.is_left(self._window):
                logger.info("nobody has come back for the stream %s: it ends", run.id)
                self._stop(run)
                if run.owned:
                    await self.store.delete(run.key)
                    self.counts.store.events["answer_abandoned"] += 1
            elif run.owned:
                await self._end_if_lost(run)
        if self._takes_over and self._mesh.healthy and self._mesh.model is not None:
            for row in await self.store.orphans():
                if row.id not in self._runs:
                    self._adopt(row)

    async def _end_if_lost(self, run: Run) -> None:
        """End a run whose answer another router has cancelled or deleted, or has taken over."""
        row = await self.store.get(run.key)
        if row is None or row.state is AnswerState.CANCELLED:
            self._stop(run)
        elif row.owner != self.store.owner:
            self._leave(run)

    async def _lost(self, run: Run) -> None:
        """End a run that cannot write; returns only when it is cancelled."""
        try:
            await self._end_if_lost(run)
        except StoreUnusable as error:
            logger.warning("%s", error)
        if not run.log.has_ended:
            self._leave(run)
        await asyncio.get_running_loop().create_future()

    def _leave(self, run: Run) -> None:
        """Leave an answer to the router that took it over, and cut its readers off."""
        logger.warning("answer %s was taken over by another router: this one was taken for dead", run.id)
        if run.task is not None:
            run.task.cancel()
        run.log.end(RouterEnds())

    def drain(self) -> None:
        """Take over no more answers."""
        self._takes_over = False

    async def drained(self) -> None:
        """Wait until every answer that this router makes has ended."""
        while tasks := [each.task for each in self._runs.values() if each.owned and each.task is not None]:
            await asyncio.wait(tasks)

    def close(self) -> None:
        """End all runs, but leave them in the store: other routers go on with them."""
        self._is_closing = True
        for run in list(self._runs.values()):
            if run.task is not None:
                run.task.cancel()
            run.log.end(RouterEnds())

    def _expiry(self, again: RunRequest) -> float:
        return time.time() + (self._window if again.purpose is Purpose.RESUMABLE else self._ttl)


class _Unavailable(Exception):
    """No instance takes the answer now."""


def _is_passing(run: Run, error: MeshError, has_begun: bool) -> bool:
    """Whether an adopted answer is tried again; ``has_begun``: the last try gave tokens."""
    if has_begun:
        run.num_lost = 0
    return error.status == 503 and not _ends_instances(run, error)


def _ends_instances(run: Run, error: MeshError) -> bool:
    """Whether a run has ended too many instances to be tried again."""
    run.num_lost += error.num_lost
    return error.is_final or run.num_lost >= MAX_FRUITLESS


def fingerprint_of(mesh: Mesh) -> str:
    """Fingerprint of the model that is served; empty if none is."""
    return mesh.model.fingerprint if mesh.model is not None else ""


def outcome_of(run: Run) -> tuple[AnswerState, bytes | None]:
    """How an answer ended, and the whole of it if its last event has that."""
    if run.request.kind != "responses":
        return AnswerState.DONE, None
    _, _, last = run.log.events[-1].partition(b"data: ")
    event = msgspec.json.decode(last, type=_LastEvent)
    failed = event.type == "response.failed"
    return AnswerState.FAILED if failed else AnswerState.DONE, bytes(event.response)


class _LastEvent(msgspec.Struct):
    type: str
    response: msgspec.Raw


def tenant_of(request: Request) -> str:
    """Digest of the API key that a client presented."""
    headers = request.headers
    _, _, token = headers.get("authorization", "").partition(" ")
    key = (token.strip() or headers.get("x-api-key", "")) if hasattr(request.state, "key") else ""
    return hashlib.sha256(b"lockstep tenant " + key.encode()).hexdigest()[:32]
