"""Connections to the coordinator: :class:`MemberConnection` of an instance, :class:`Watcher`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import zmq.asyncio

from coordinator.addresses import reached
from coordinator.member_state import MemberState
from coordinator.messages import (
    AdaptersReport,
    AdmissionRefused,
    AnswerChecks,
    Drain,
    ExpertLoads,
    FromCoordinator,
    GroupPlan,
    Leave,
    Load,
    Lost,
    OperatorAnswer,
    Reach,
    Reached,
    Register,
    Role,
    Scale,
    StandingOrders,
    State,
    TakeRole,
    ToCoordinator,
    Unknown,
    View,
    ViewChange,
    ViewCurrent,
    Watch,
    WeightsReport,
    Welcome,
)
from coordinator.numerics import Numerics
from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.handshakes import KeyRefused
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncConnection
from coordinator.views import ViewCopy, ViewNews

logger = logging.getLogger(__name__)

ASK_INTERVAL = 0.3
"""Seconds between two tries to register."""
WATCH_INTERVAL = 1.0
"""Seconds between two requests for the view."""
RECONNECT_INTERVAL = 0.05
"""Seconds between two tries while there is no connection."""
COMPLAINT_INTERVAL = 5.0
"""Seconds between two log lines about what is waited for."""
SILENCE_COMPLAINT = 10.0
"""Seconds without an answer after which a warning is logged, and between two of them."""
MAX_QUESTIONS = 16
"""Questions of the coordinator for which connections to others are tried at once."""
SILENCE = 3.0
"""Seconds without an answer after which the coordinator counts as away."""


class RegistrationRefused(Exception):
    """Error: the coordinator refuses this instance, for the reason in the message."""


class StartupTimeout(Exception):
    """Error: instances of the mesh are missing at the deadline; the message names them."""


class MemberConnection:
    """Connection of an instance to the coordinator: registration and heartbeats, in a thread.

    The thread sends heartbeats also during a long step. The coordinator may be away at any time; when it is
    back, it gets everything again.
    """

    def __init__(
        self,
        endpoint: str,
        register: Register,
        load: Callable[[], Load],
        keys: MeshKeys | None = None,
        on_drain: Callable[[float | None], None] = lambda timeout: None,
        role: Role = Role.MIXED,
    ) -> None:
        """Register with the coordinator at ``endpoint``, which may give it another ``role``.

        ``on_drain`` is called in the thread, once per drain command of an operator, with its timeout in
        seconds.
        """
        self._on_drain = on_drain
        self._drain = ""
        self._endpoint = endpoint
        self._keys = keys
        self._state = MemberState(register, role)
        self._load = load
        self._heard_at = self._complained_at = time.monotonic()
        self._progress_at = time.monotonic()
        self._answered = threading.Event()
        self._changed: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = False
        self._trying: set[asyncio.Task[None]] = set()
        """Tries to connect to others, for one question each."""
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def __repr__(self) -> str:
        return f"<MemberConnection {self._state!r}>"

    def start(self) -> None:
        self._thread.start()

    def wait_for_welcome(self, timeout: float) -> Welcome:
        """Wait until the coordinator admits this instance, and log what it waits for.

        Raises:
            RegistrationRefused: it said no.
            StartupTimeout: ``timeout`` seconds went by without any progress.
        """
        while not self._answered.wait(COMPLAINT_INTERVAL):
            waited = time.monotonic() - self._progress_at
            missing = self._state.waits_for or f"the coordinator at {self._endpoint}"
            if waited > timeout:
                raise StartupTimeout(f"gave up after {waited:.0f} s of waiting for {missing}")
            logger.info("waiting for %s (%.0f s of at most %.0f s)", missing, waited, timeout)
        welcome = self._state.welcome
        if self._state.refusal is not None:
            raise RegistrationRefused(self._state.refusal)
        assert welcome is not None
        return welcome

    @property
    def refusal(self) -> str | None:
        """Reason for which the coordinator dropped this instance (its rank went to another)."""
        return self._state.refusal

    @property
    def neighbours(self) -> int:
        """Number of instances on this host, with this one."""
        return self._state.neighbours

    def follow(self, on_form: Callable[[GroupPlan], None], on_fenced: Callable[[], None]) -> None:
        """Subscribe ``on_form`` to each GroupPlan that arrives.

        Some arrive twice; one that is already here is handed over at once. ``on_fenced`` is called when the
        others go on without this instance, which was taken for dead and has registered again. Both are called
        in the membership's thread, so they must be short.
        """
        self._state.on_fenced = on_fenced
        self._state.on_form = on_form
        if self._state.form is not None:
            on_form(self._state.form)

    @property
    def orders(self) -> StandingOrders:
        """The newest standing orders; the same object until there are others."""
        return self._state.orders

    @property
    def follows_orders(self) -> bool:
        """Whether these are in effect here, as far as is known."""
        return self._state.in_effect >= self._state.orders.revision

    def follow_orders(self, on_orders: Callable[[], None]) -> None:
        """Call ``on_orders`` in the membership's thread when there are orders to follow."""
        self._state.on_orders = on_orders

    def in_effect(self, orders: StandingOrders) -> None:
        """Report that these orders are in effect here."""
        self._state.in_effect = max(self._state.in_effect, orders.revision)
        self._wake()

    def report_weights(self, report: WeightsReport) -> None:
        """Report how far this instance is with weight versions, if that has changed."""
        if report != self._state.weights:
            self._state.weights = report
            self._wake()

    def report_adapters(self, report: AdaptersReport) -> None:
        """Report how far this instance is with an adapter to read, if that has changed."""
        if report != self._state.adapters:
            self._state.adapters = report
            self._wake()

    def enter(self, group: GroupPlan | None) -> None:
        """Report the group in which this instance steps now, or none."""
        self._state.enter(group)
        self._wake()

    def report(self, lost: Lost) -> None:
        """Report a lost group until another GroupPlan arrives or a later group is entered."""
        self._state.report(lost)
        self._wake()

    def update(
        self,
        *,
        state: State | None = None,
        phase: str | None = None,
        address: str | None = None,
        store: str | None = None,
        experts: Sequence[Sequence[Sequence[int]]] | None = None,
        expert_layers: int | None = None,
        loads: ExpertLoads | None = None,
        expert_bytes: int | None = None,
        max_experts: int | None = None,
        ready_epoch: int | None = None,
        numerics: Numerics | None = None,
    ) -> None:
        """Send a heartbeat with changed facts at once. ``experts``: by rank and layer."""
        mine = self._state
        mine.store = store or mine.store
        if experts is not None:
            mine.hold(experts)
        mine.expert_layers = mine.expert_layers if expert_layers is None else expert_layers
        mine.loads = loads or mine.loads
        mine.expert_bytes = mine.expert_bytes if expert_bytes is None else expert_bytes
        mine.max_experts = mine.max_experts if max_experts is None else max_experts
        mine.ready_epoch = mine.ready_epoch if ready_epoch is None else ready_epoch
        mine.numerics = numerics or mine.numerics
        mine.state = state or mine.state
        mine.phase = mine.phase if phase is None else phase
        mine.address = address or mine.address
        self._wake()

    def leave(self) -> None:
        """Leave the mesh, and stop the thread. The instance must hold no request any more."""
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
            context, self._endpoint, FromCoordinator, name="coordinator", keys=self._keys
        )
        listening = asyncio.create_task(self._listen(connection))
        guarding = asyncio.create_task(self._watch_key(connection))
        try:
            while not self._leaving and self._state.refusal is None:
                self._complain_of_silence()
                self._changed.clear()
                sent = [connection.send(message) for message in self._state.outgoing(self._load())]
                interval = self._state.heartbeat_interval or ASK_INTERVAL
                interval = interval if all(sent) else RECONNECT_INTERVAL
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), interval)
            if self._state.welcome is not None:
                connection.send(Leave(self._state.register.instance))
        finally:
            listening.cancel()
            guarding.cancel()
            for task in self._trying:
                task.cancel()
            connection.close()
            context.term()

    def _complain_of_silence(self) -> None:
        """Log that the coordinator is silent; serving goes on without it."""
        now = time.monotonic()
        if self._state.welcome is None or now - max(self._heard_at, self._complained_at) < SILENCE_COMPLAINT:
            return
        self._complained_at = now
        logger.warning(
            "no answer from the coordinator at %s for %.0f s; serving goes on",
            self._endpoint,
            now - self._heard_at,
        )

    async def _listen(self, connection: AsyncConnection[FromCoordinator, ToCoordinator]) -> None:
        while True:
            try:
                message = await connection.receive()
            except OtherProtocol as error:
                message = AdmissionRefused(f"the coordinator speaks another protocol: {error}")
            self._heard_at = time.monotonic()
            before, role = self._state.waits_for, self._state.role
            if isinstance(message, Unknown) and self._state.welcome is not None:
                logger.warning("the coordinator does not know this instance (any more): registering again")
            if self._state.take(message):
                self._wake()
            if self._state.waits_for != before:
                self._progress_at = self._heard_at
            if isinstance(message, Welcome) and message.fenced:
                logger.warning("the others went on without this instance: it joins them again")
            if isinstance(message, TakeRole) and message.role is not role:
                logger.info("an operator has set the role of this instance: %s", message.role)
            if isinstance(message, Drain):
                self._drain_once(message)
            if isinstance(message, Reach):
                self._try_ways(connection, message)
            if isinstance(message, Welcome | AdmissionRefused):
                self._answered.set()
            if isinstance(message, AdmissionRefused):
                return

    def _drain_once(self, message: Drain) -> None:
        if message.command != self._drain:
            self._drain = message.command
            self._on_drain(message.timeout)

    def _try_ways(self, connection: AsyncConnection[FromCoordinator, ToCoordinator], question: Reach) -> None:
        """Try connections to other instances in a task, and report the reachable ones."""

        async def answer() -> None:
            name = self._state.register.instance
            connection.send(Reached(name, question.number, await reached(question.peers)))

        if len(self._trying) < MAX_QUESTIONS:  # else the coordinator asks again
            task = asyncio.create_task(answer())
            self._trying.add(task)
            task.add_done_callback(self._trying.discard)

    async def _watch_key(self, connection: AsyncConnection[FromCoordinator, ToCoordinator]) -> None:
        """End a process whose mesh key is refused before it was a member.

        A member serves on: what answers at the coordinator's address is not its coordinator.
        """
        while True:
            await connection.broken()
            refused = await connection.refusal()
            if refused is not None and not self._answered.is_set():
                self._state.take(AdmissionRefused(str(refused)))
                self._answered.set()
                self._wake()
                return


class Watcher:
    """Newest view of the mesh, for routers, the launcher and ``lockstep status``."""

    def __init__(
        self,
        endpoint: str,
        name: str,
        context: zmq.asyncio.Context | None = None,
        keys: MeshKeys | None = None,
        *,
        launcher: str = "",
        on_scale: Callable[[Scale], Awaitable[OperatorAnswer]] | None = None,
    ) -> None:
        """A ``launcher`` gives its mesh's name, and is asked by ``on_scale`` for other numbers of
        instances."""
        self._context = context or zmq.asyncio.Context.instance()
        self._connection: AsyncConnection[FromCoordinator, ToCoordinator] = AsyncConnection(
            self._context, endpoint, FromCoordinator, name="coordinator", keys=keys
        )
        self._message = Watch(name, launcher)
        self.answers: Callable[[], AnswerChecks] = AnswerChecks
        """Shadow checks of this router, for the coordinator."""
        self.adapters_in_use: Callable[[], tuple[str, ...]] = tuple
        """Digests of retired adapters that requests of this router have."""
        self._on_scale = on_scale
        self._heard_at: float | None = None
        self._copy = ViewCopy()

    @property
    def view(self) -> View | None:
        """The newest view; None before the first one."""
        return self._copy.view

    @property
    def head(self) -> View | None:
        """Head of the newest view, without its members."""
        return self._copy.head

    @property
    def silent_for(self) -> float | None:
        """Seconds since the coordinator was heard; None if it never was."""
        return None if self._heard_at is None else time.monotonic() - self._heard_at

    async def run(self, on_news: Callable[[ViewNews], None]) -> None:
        """Call ``on_news`` after each change of :attr:`view`, until cancelled.

        Serving goes on while the coordinator is away.

        Raises:
            OtherProtocol: the coordinator is of another version.
            KeyRefused: it has another mesh key, or one of the two has none.
        """
        tasks = [
            asyncio.create_task(each) for each in (self._ask(), self._watch_key(), self._receive(on_news))
        ]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in ended:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            self._connection.close(linger_ms=0)

    async def _receive(self, on_news: Callable[[ViewNews], None]) -> None:
        while True:
            message = await self._connection.receive()
            if self._heard_at is None or time.monotonic() - self._heard_at > SILENCE:
                logger.debug("the coordinator answers")
            self._heard_at = time.monotonic()
            if isinstance(message, View | ViewChange | ViewCurrent):
                news = self.take(message)
                if news is not None:
                    on_news(news)
            elif isinstance(message, Scale) and self._on_scale is not None:
                self._connection.send(await self._on_scale(message))

    def take(self, message: View | ViewChange | ViewCurrent) -> ViewNews | None:
        """Apply a message to the view; asks for the whole if a change was missed."""
        missed = self._copy.misses_some
        news = self._copy.take(message)
        if self._copy.misses_some and not missed:
            self._connection.send(self._watch())
        return news

    async def _watch_key(self) -> None:
        """Refused keys count only until the coordinator has answered once.

        Later a refusal is just an absence.
        """
        while True:
            await self._connection.broken()
            refused = await self._connection.refusal()
            if refused is not None and self._heard_at is None:
                raise KeyRefused(f"the coordinator at {self._connection.endpoint} refused us: {refused}")

    def tell_odd(self, odd: dict[str, int]) -> None:
        """Report verdicts of shadow checks to the coordinator, by instance."""
        self._message = msgspec.structs.replace(self._message, odd=odd)
        self._connection.send(self._watch())

    def _watch(self) -> Watch:
        series, number = self._copy.known
        return msgspec.structs.replace(
            self._message,
            series=series,
            number=number,
            answers=self.answers(),
            adapters=self.adapters_in_use(),
        )

    def send(self, message: ToCoordinator) -> bool:
        """Send another message to the coordinator; False without a connection."""
        return self._connection.send(message)

    async def _ask(self) -> None:
        complained_at = time.monotonic()
        while True:
            sent = self._connection.send(self._watch())
            await asyncio.sleep(WATCH_INTERVAL if sent else RECONNECT_INTERVAL)
            now = time.monotonic()
            silent = now - (self._heard_at or complained_at)
            if silent > SILENCE and now - complained_at > COMPLAINT_INTERVAL:
                complained_at = now
                logger.warning("no answer from the coordinator at %s", self._connection.endpoint)


async def fetch_view(endpoint: str, timeout: float, keys: MeshKeys | None = None) -> View:
    """A single fetch of the mesh's view.

    Raises:
        TimeoutError: no answer.
        KeyRefused: the coordinator has another mesh key, or one of the two has none.
    """
    context = zmq.asyncio.Context()
    watcher = Watcher(endpoint, "status", context, keys)
    arrived: asyncio.Future[View] = asyncio.get_running_loop().create_future()

    def first(_: ViewNews) -> None:
        if not arrived.done() and watcher.view is not None:
            arrived.set_result(watcher.view)

    def ended(watching: asyncio.Task[None]) -> None:
        error = None if watching.cancelled() else watching.exception()
        if error is not None and not arrived.done():
            arrived.set_exception(error)

    watching = asyncio.create_task(watcher.run(first))
    watching.add_done_callback(ended)
    try:
        return await asyncio.wait_for(arrived, timeout)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError, KeyRefused, OtherProtocol):
            await watching
        context.term()
