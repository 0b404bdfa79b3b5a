"""Talking to the coordinator: as an instance (:class:`Membership`), or as a watcher (:class:`Watcher`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import zmq.asyncio

from coordinator.messages import (
    Beat,
    Form,
    FromCoordinator,
    Heartbeat,
    Leave,
    Load,
    Refused,
    Register,
    State,
    ToCoordinator,
    Unknown,
    View,
    Wait,
    Watch,
    Welcome,
)
from coordinator.rpc import AsyncConnection, OtherProtocol

logger = logging.getLogger(__name__)

ASK_INTERVAL = 0.3
"""Seconds between two tries to register."""
WATCH_INTERVAL = 1.0
RECONNECT_INTERVAL = 0.05
"""Seconds between two tries while there is no connection."""
COMPLAINT_INTERVAL = 5.0
SILENCE_COMPLAINT = 10.0
SILENCE = 3.0
"""Seconds without an answer after which the coordinator is said to be away."""


class RegistrationRefused(Exception):
    """The coordinator will not have this instance; the message is its reason."""


class StartupTimeout(Exception):
    """Nobody came in time; the message says who was missing."""


class Membership:
    """An instance's place in the mesh, kept by a thread of its own: signs of life go out also while a
    step takes long. The coordinator may be away at any time; it is told all again when it is back.
    """

    def __init__(self, endpoint: str, register: Register, load: Callable[[], Load]) -> None:
        self._endpoint = endpoint
        self._register = register
        self._load = load
        self._state = State.LOADING
        self._phase = "starting"
        self._address = self._store = ""
        self._form: Form | None = None
        self._formed = threading.Event()
        self._welcome: Welcome | None = None
        self._refusal: str | None = None
        self._epoch = register.epoch
        self._neighbours = 1
        self._heard_at = self._complained_at = time.monotonic()
        self._waits_for = f"the coordinator at {endpoint}"
        self._progress_at = time.monotonic()
        self._answered = threading.Event()
        self._changed: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = False
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def __repr__(self) -> str:
        rank = self._welcome.rank if self._welcome else "?"
        return f"<Membership rank {rank} {self._state} epoch {self._epoch}>"

    def start(self) -> None:
        self._thread.start()

    def wait_for_welcome(self, timeout: float) -> Welcome:
        """Wait for the coordinator's answer, saying what is waited for.

        Raises:
            RegistrationRefused: it said no.
            StartupTimeout: ``timeout`` seconds went by without any progress.
        """
        while not self._answered.wait(COMPLAINT_INTERVAL):
            waited = time.monotonic() - self._progress_at
            if waited > timeout:
                raise StartupTimeout(f"gave up after {waited:.0f} s of waiting for {self._waits_for}")
            logger.info("waiting for %s (%.0f s of at most %.0f s)", self._waits_for, waited, timeout)
        if self._refusal is not None:
            raise RegistrationRefused(self._refusal)
        assert self._welcome is not None
        return self._welcome

    @property
    def refusal(self) -> str | None:
        """Why the coordinator no longer wants this instance (its rank went to another meanwhile)."""
        return self._refusal

    @property
    def neighbours(self) -> int:
        """Instances on this host, this one included."""
        return self._neighbours

    def wait_for_group(self, timeout: float) -> Form:
        """Wait until all instances of the mesh are loaded, saying who is missing.

        Raises:
            RegistrationRefused: the coordinator no longer wants this instance.
            StartupTimeout: ``timeout`` seconds went by.
        """
        began = time.monotonic()
        while not self._formed.wait(COMPLAINT_INTERVAL):
            waited = time.monotonic() - began
            if waited > timeout:
                raise StartupTimeout(f"gave up after {waited:.0f} s of waiting for the other instances")
            logger.info("waiting for the other instances of the mesh (%.0f s)", waited)
        if self._refusal is not None:
            raise RegistrationRefused(self._refusal)
        assert self._form is not None
        return self._form

    def update(
        self,
        *,
        state: State | None = None,
        phase: str | None = None,
        address: str | None = None,
        store: str | None = None,
    ) -> None:
        """Say something new about this instance; sent at once."""
        self._store = store or self._store
        self._state = state or self._state
        self._phase = self._phase if phase is None else phase
        self._address = address or self._address
        self._wake()

    def leave(self) -> None:
        """Say goodbye and stop. The instance must hold no request any more."""
        self._leaving = True
        self._wake()
        self._thread.join(timeout=2.0)

    def _wake(self) -> None:
        if self._loop is not None and self._changed is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._changed.set)

    # ---- in the thread

    def _run(self) -> None:
        asyncio.run(self._talk())

    async def _talk(self) -> None:
        self._loop, self._changed = asyncio.get_running_loop(), asyncio.Event()
        context = zmq.asyncio.Context(io_threads=1)
        connection: AsyncConnection[FromCoordinator, ToCoordinator] = AsyncConnection(
            context, self._endpoint, FromCoordinator, name="coordinator"
        )
        listening = asyncio.create_task(self._listen(connection))
        try:
            while not self._leaving and self._refusal is None:
                self._complain_of_silence()
                sent = connection.send(self._next_message())
                interval = self._welcome.heartbeat_interval if self._welcome else ASK_INTERVAL
                interval = interval if sent else RECONNECT_INTERVAL
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), interval)
                self._changed.clear()
            if self._welcome is not None:
                connection.send(Leave(self._register.instance))
        finally:
            listening.cancel()
            connection.close()
            context.term()

    def _complain_of_silence(self) -> None:
        """Serving goes on without a coordinator, but whoever reads the log should know."""
        now = time.monotonic()
        if self._welcome is None or now - max(self._heard_at, self._complained_at) < SILENCE_COMPLAINT:
            return
        self._complained_at = now
        logger.warning(
            "no answer from the coordinator at %s for %.0f s; serving goes on",
            self._endpoint,
            now - self._heard_at,
        )

    def _next_message(self) -> ToCoordinator:
        if self._welcome is None:
            return self._register
        return Heartbeat(
            instance=self._register.instance,
            state=self._state,
            phase=self._phase,
            address=self._address,
            store=self._store,
            load=self._load(),
        )

    async def _listen(self, connection: AsyncConnection[FromCoordinator, ToCoordinator]) -> None:
        while True:
            try:
                message = await connection.receive()
            except OtherProtocol as error:
                self._refuse(f"the coordinator speaks another protocol: {error}")
                return
            self._heard_at = time.monotonic()
            match message:
                case Welcome():
                    self._welcomed(message)
                case Wait(reason):
                    if self._waits_for != reason:
                        self._waits_for, self._progress_at = reason, time.monotonic()
                case Refused(reason):
                    self._refuse(reason)
                case Beat(epoch, neighbours):
                    self._epoch, self._neighbours = epoch, neighbours
                case Form():
                    self._form = message
                    self._formed.set()
                case Unknown():
                    self._register_again()
                case View():
                    continue  # for watchers; an instance needs no view

    def _welcomed(self, message: Welcome) -> None:
        self._welcome, self._epoch = message, message.epoch
        self._register = msgspec.structs.replace(
            self._register, rank=message.rank, settings=message.settings, size=None
        )
        self._answered.set()
        self._wake()

    def _refuse(self, reason: str) -> None:
        self._refusal = reason
        self._answered.set()
        self._formed.set()
        self._wake()

    def _register_again(self) -> None:
        if self._welcome is not None:
            logger.warning("the coordinator does not know this instance (any more): registering again")
            self._register = msgspec.structs.replace(self._register, epoch=self._epoch)
            self._welcome = None
            self._wake()


class Watcher:
    """Keeps the newest view of the world, for routers, the launcher and ``lockstep status``."""

    def __init__(self, endpoint: str, name: str, context: zmq.asyncio.Context | None = None) -> None:
        self._context = context or zmq.asyncio.Context.instance()
        self._connection: AsyncConnection[FromCoordinator, ToCoordinator] = AsyncConnection(
            self._context, endpoint, FromCoordinator, name="coordinator"
        )
        self._name = name
        self._heard_at: float | None = None
        self.view: View | None = None

    async def run(self, on_view: Callable[[View], None]) -> None:
        """Call ``on_view`` with each view until cancelled. Serving goes on while the coordinator is away.

        Raises:
            OtherProtocol: the coordinator is of another version.
        """
        asking = asyncio.create_task(self._ask())
        try:
            while True:
                message = await self._connection.receive()
                if self._heard_at is None or time.monotonic() - self._heard_at > SILENCE:
                    logger.debug("the coordinator answers")
                self._heard_at = time.monotonic()
                if isinstance(message, View):
                    self.view = message
                    on_view(message)
        finally:
            asking.cancel()
            self._connection.close(linger_ms=0)

    async def _ask(self) -> None:
        complained_at = time.monotonic()
        while True:
            sent = self._connection.send(Watch(self._name))
            await asyncio.sleep(WATCH_INTERVAL if sent else RECONNECT_INTERVAL)
            now = time.monotonic()
            silent = now - (self._heard_at or complained_at)
            if silent > SILENCE and now - complained_at > COMPLAINT_INTERVAL:
                complained_at = now
                logger.warning("no answer from the coordinator at %s", self._connection.endpoint)


async def fetch_view(endpoint: str, timeout: float) -> View:
    """The view, asked for once.

    Raises:
        TimeoutError: no answer.
    """
    context = zmq.asyncio.Context()
    watcher = Watcher(endpoint, "status", context)
    arrived: asyncio.Future[View] = asyncio.get_running_loop().create_future()

    def first(view: View) -> None:
        if not arrived.done():
            arrived.set_result(view)

    watching = asyncio.create_task(watcher.run(first))
    try:
        return await asyncio.wait_for(arrived, timeout)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        context.term()
