"""Supervises the processes of one ``serve``: starts, watches, scales and stops them in order.

:mod:`router.launcher.restarts` decides what to restart, and when.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
import uuid
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from coordinator.messages import Member, State, View
from coordinator.process import process
from coordinator.process.last_error import LastError
from coordinator.rpc.handshakes import KeyRefused
from engine.host.forked import Forked, ForkServer, Unforked
from router.faults import FaultEvent, Faults
from router.launcher.cache_files import CacheFiles
from router.launcher.child_process import ChildProcess, exit_status, fork, spawn
from router.launcher.launch import ProcessSpec
from router.launcher.losses import Losses
from router.launcher.restarts import Restarts
from router.launcher.scaling import free_number

logger = logging.getLogger(__name__)

REMEMBERED_PIDS = 256
"""Processes of ours that ended, and that the view may still show."""
COORDINATOR_FIRST = 10.0
"""Seconds that forked instances wait for the coordinator, which they can do without."""
STOP_TIMEOUT = 10.0
"""Seconds for a process to end before it is signalled again, and then killed."""


class Supervisor:
    """Starts the process table, restarts what may be restarted, and ends all in order.

    Before everything is ready, the first process that ends takes all down: its message names the error. Later
    the coordinator and the routers are restarted, instances too if that was asked for, and instances may come
    and go.
    """

    def __init__(
        self,
        table: Sequence[ProcessSpec],
        *,
        drain_timeout: float = 0.0,
        shutdown_timeout: float = 0.0,
        restart: bool = False,
        engine_spec: Callable[[int | None, int], ProcessSpec] | None = None,
        doors: Sequence[socket.socket] = (),
        fork_server: ForkServer | None = None,
        caches: CacheFiles | None = None,
    ) -> None:
        """``drain_timeout``: seconds that headless instances may take to finish what they have.
        ``shutdown_timeout``: seconds that routers may take to finish requests.
        ``engine_spec`` makes the instance of a rank (None: of any), with a number among ours. ``doors`` are
        held open for routers to come, and closed at the end; so is ``fork_server``, which makes the
        instances, if there is one. ``caches``: memory of their KV caches, which outlives them."""
        self._table = list(table)
        self._drain_timeout = drain_timeout
        self._shutdown_timeout = shutdown_timeout
        self._restarts = Restarts(instances=restart)
        self._engine_spec = engine_spec
        self._doors = doors
        self._fork_server = fork_server
        self._caches = caches
        self._children: dict[int, ChildProcess] = {}
        self._coming_back: dict[int, ProcessSpec] = {}
        self._num_keys = 0
        self._gone: deque[int] = deque(maxlen=REMEMBERED_PIDS)
        self._gone_names: deque[str] = deque(maxlen=REMEMBERED_PIDS)
        self._names: deque[str] = deque(maxlen=REMEMBERED_PIDS)
        self._watchers: set[asyncio.Task[None]] = set()
        self._known = asyncio.Event()
        """A view has come."""
        self._ended = asyncio.Event()
        self._stopping = False
        self._status = 0
        self._last_end = ""
        """Which process ended last, and how."""
        self._view: View | None = None
        self.faults = Faults()
        self.losses = Losses()
        self.on_lost: Callable[[str, str], None] = lambda instance, how: None
        """Called when the process of an instance (its name in the mesh) died, and how."""
        self.ready = False
        """Set by the caller once the mesh serves."""
        self.problem = ""
        """What ended first, and how, when that was not asked for."""

    def __repr__(self) -> str:
        names = " ".join(f"{child.spec.name}:{child.process.pid}" for child in self._children.values())
        return f"<Supervisor {names}>"

    # ---- what the launcher asks

    @property
    def ranks(self) -> list[int]:
        """Ranks of local instances that run, or soon will, and are not leaving."""
        running = [child.rank for child in self._of_role("engine") if child.stays]
        soon = [spec.rank for spec in self._coming_back.values() if spec.role == "engine"]
        return sorted(rank for rank in (*running, *soon) if rank is not None)

    @property
    def leaving(self) -> list[str]:
        """Names of local instances that are leaving or have ended, perhaps unknown to the mesh."""
        told = [child.instance or child.name for child in self._of_role("engine") if child.retired]
        return [*told, *self._gone_names]

    @property
    def num_serving(self) -> int:
        """Our instances that are ready."""
        return sum(child.began is not None for child in self._of_role("engine"))

    @property
    def pids(self) -> list[int]:
        """Process ids of all processes that run."""
        return [child.process.pid for child in self._children.values()]

    @property
    def stopping(self) -> bool:
        """Whether all processes are being ended."""
        return self._stopping

    @property
    def local_members(self) -> list[Member]:
        """Our instances in the newest view."""
        members = self._view.members if self._view else []
        return [member for member in members if member.instance in self._names]

    def started(self, instance: str) -> bool:
        """Whether the instance of this name is ours."""
        return instance in self._names

    async def run(self, until_ready: Callable[[], Awaitable[None]], *, takes_signals: bool = True) -> int:
        """Start all, wait for SIGTERM, SIGINT, SIGHUP, :meth:`stop` or the end of what matters.

        Returns the exit status. ``takes_signals``: they are this program's to handle (main thread only).
        """
        loop = asyncio.get_running_loop()
        with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup has it so
        taken = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if with_terminal else []))
        for number in taken if takes_signals else ():
            loop.add_signal_handler(number, self._on_signal, number)
        forked = [spec for spec in self._table if self._forks(spec)]
        if self._fork_server is not None:
            logger.info("the fork server (pid %d) loads libraries for all instances", self._fork_server.pid)
        for spec in self._table:
            if spec not in forked:
                await self.start(spec)
        starting = asyncio.ensure_future(self._start_forked(forked))
        starting.add_done_callback(self._on_started)
        waiting = asyncio.ensure_future(self._wait_until_ready(until_ready))
        await self._ended.wait()
        waiting.cancel()
        await self._stop_all(starting)
        return self._status

    def stop(self) -> None:
        """Let :meth:`run` end all and return."""
        self._end(self._status)

    async def _start_forked(self, table: Sequence[ProcessSpec]) -> None:
        """Start the processes that fork, after the coordinator.

        They take no time to start, so the local coordinator goes first. If it cannot listen, its error says
        why; the others would find the coordinator of another mesh there.
        """
        if any(spec.role == "coordinator" for spec in self._table):
            first = [asyncio.ensure_future(event.wait()) for event in (self._known, self._ended)]
            await asyncio.wait(first, timeout=COORDINATOR_FIRST, return_when=asyncio.FIRST_COMPLETED)
            for each in first:
                each.cancel()
        if not self._stopping:
            await asyncio.gather(*(self.start(spec) for spec in table))

    def _on_started(self, starting: asyncio.Future[None]) -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            logger.error("not all instances could be started: %s", error, exc_info=error)
            self.problem = self.problem or str(error)
            self._end(process.EXIT_FAILED)

    async def start(self, spec: ProcessSpec) -> None:
        """One process more."""
        self._num_keys += 1
        await self._start(self._num_keys, spec)

    async def grow(self, ranks: Sequence[int], room: int = 0) -> None:
        """Instances of these ranks more.

        ``room``: how many of ours can have devices of their own.
        """
        assert self._engine_spec is not None
        for rank in ranks:
            logger.info("starting instance %d", rank)
            await self.start(self._engine_spec(rank, self._free_number(room)))

    def _free_number(self, room: int) -> int:
        running = self._of_role("engine")
        staying = [child.spec.number for child in running if child.stays]
        staying += [spec.number for spec in self._coming_back.values() if spec.role == "engine"]
        return free_number(staying, [child.spec.number for child in running if not child.stays], room)

    def retire(self, ranks: Sequence[int]) -> None:
        """Have our instances of these ranks drain and end."""
        for key, spec in list(self._coming_back.items()):
            if spec.rank in ranks:
                del self._coming_back[key]
        for child in self._of_role("engine"):
            if child.rank in ranks and not child.retired:
                logger.info("draining instance %d", child.rank)
                child.retired = True
                child.tell(signal.SIGTERM)

    def learn(self, view: View) -> None:
        """Ranks that the coordinator gave to our instances, and since when they serve."""
        self._view = view
        self._known.set()
        here = socket.gethostname()
        of_pid = {child.process.pid: child for child in self._of_role("engine")}
        of_name = {child.name: child for child in of_pid.values()}
        for child in of_pid.values():
            child.is_member = False
        for member in view.members:
            ours = of_name.get(member.instance) or (of_pid.get(member.pid) if member.host == here else None)
            if ours is not None:
                ours.rank, ours.instance, ours.is_member = member.rank, member.instance, True
                ours.retired = ours.retired or not member.state.stays
                if member.state is State.READY and ours.began is None:
                    ours.began = time.monotonic()
                    if self._caches is not None:
                        self._caches.serves(ours.key)

    # ---- life

    async def _wait_until_ready(self, until_ready: Callable[[], Awaitable[None]]) -> None:
        try:
            await until_ready()
            self.ready = True
        except TimeoutError as error:
            logger.error("%s", error)
            self.problem = str(error)
            self._end(process.EXIT_FAILED)
        except KeyRefused as error:
            logger.error("%s", error)
            self._end(process.EXIT_REFUSED)

    def _on_signal(self, number: int) -> None:
        if not self._ended.is_set():
            logger.info("%s", self._end_line())
        if number == signal.SIGINT and not self.ready:  # as the commands that have no end of their own
            self._end(process.EXIT_INTERRUPTED)
        if self._stopping:
            for child in self._children.values():  # asked twice: no more waiting for requests
                if child.spec.role != "coordinator":  # without whom instances cannot leave
                    child.tell(signal.SIGTERM)
        self._end(self._status)

    def _end_line(self) -> str:
        """The log line of an end that was asked for, with the time for requests."""
        if not self.ready:
            return "ends before the mesh is ready"
        if any(spec.role == "router" for spec in self._table):
            return f"ends: requests may run for {self._shutdown_timeout:g} s more (--shutdown-timeout)"
        if any(spec.role == "engine" for spec in self._table):
            return f"ends: instances drain for at most {self._drain_timeout:g} s (--drain-timeout)"
        return "ends"

    def _end(self, status: int) -> None:
        self._status = self._status or status
        self._ended.set()

    async def _start(self, key: int, spec: ProcessSpec, *, returns: bool = False) -> None:
        name = uuid.uuid4().hex[:12]
        self._names.append(name)
        environment = {**spec.environment(), process.INSTANCE_VARIABLE: name}
        if self._caches is not None and spec.is_instance:
            environment |= self._caches.begin(key)
        with contextlib.ExitStack() as unless_started:
            last_error = unless_started.enter_context(LastError())
            started = await self._start_process(key, spec, environment | last_error.environment)
            if started is None:
                return
            unless_started.pop_all()
        began = None if spec.is_instance else time.monotonic()  # when an instance serves, a view tells
        child = ChildProcess(
            key, spec, started, began, spec.rank, last_error, name=name, returns=returns
        )  # fmt: skip
        self._children[key] = child
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _start_process(
        self, key: int, spec: ProcessSpec, environment: dict[str, str]
    ) -> Process | Forked | None:
        """None: it was ordered to go before it came."""
        started: Process | Forked | None = None
        if self._forks(spec):
            self._coming_back[key] = spec
            started = await self._fork(spec, environment)
            if self._coming_back.pop(key, None) is None or self._stopping:  # retired meanwhile
                if started is not None:
                    started.kill()
                    await started.ended()
                return None
        return started or await spawn(spec, environment)

    def _forks(self, spec: ProcessSpec) -> bool:
        return self._fork_server is not None and not self._fork_server.problem and spec.may_be_forked

    async def _fork(self, spec: ProcessSpec, environment: dict[str, str]) -> Forked | None:
        """None: it needs a normal process start."""
        assert self._fork_server is not None
        try:
            return await fork(self._fork_server, spec, environment)
        except Unforked as problem:
            if not self._stopping:
                logger.warning("%s; falling back to a normal process start for %s", problem, spec.name)
            return None

    async def _watch(self, child: ChildProcess) -> None:
        status = await child.ended()
        self._children.pop(child.key, None)
        why = child.why_it_ended(status)
        child.last_error.close()
        self._gone.append(child.process.pid)
        self._gone_names.append(child.name)
        if self._caches is not None and (status == 0 or child.retired):
            self._caches.forget(child.key)
        if self._ended.is_set():
            return
        how = process.how_it_ended(status)
        log = logger.info if status == 0 else logger.error
        log("%s (pid %d) %s", child.spec.name, child.process.pid, how)
        self._last_end = f"{child.spec.name} (pid {child.process.pid}) {why}"
        if status != 0 and child.instance:
            self.on_lost(child.instance, how)
        if status != 0:
            self._record(FaultEvent.DETECTION, "process_exit", f"{child.spec.name} {how}")
        if not self.ready:
            self.problem = self.problem or self._last_end
            self._end(exit_status(status))
        elif not child.retired and self._restarts.wants(
            child.spec.role, status, wanted_its_rank=child.returns and not child.instance
        ):
            await self._start_again(child, status)
        elif child.spec.role == "engine":
            if not child.retired:
                self.losses.note(self._last_end)
            self._end_without_instances(status)

    async def _start_again(self, child: ChildProcess, status: int) -> None:
        """After the pause that is due, under the old rank.

        Under any, if that was refused.
        """
        served_for = 0.0 if child.began is None else time.monotonic() - child.began
        why = self._last_end
        while True:
            delay = self._restarts.after_end(child.key, child.spec.role, served_for)
            if delay is None:
                logger.error("%s ended too often in a row: it is not started again", child.spec.name)
                self.losses.note(f"{why}, too often in a row")
                if self._caches is not None:
                    self._caches.forget(child.key)
                self._end_without_instances(status)
                return
            self._coming_back[child.key] = self._successor(child, status)
            logger.info("restarting %s in %.1f s", child.spec.name, delay)
            await asyncio.sleep(delay)
            spec = self._coming_back.pop(child.key, None)
            if spec is None or self._ended.is_set():
                self._end_without_instances(0)
                return
            logger.info("restarting %s", spec.name)
            try:
                await self._start(child.key, spec, returns=spec.rank is not None)
            except OSError as error:  # no memory, no process or no descriptor to be had, for now
                logger.error("%s cannot be started: %s", spec.name, error)
                self._coming_back.pop(child.key, None)
                served_for = 0.0
            else:
                self._record(
                    FaultEvent.RESTART, spec.role, f"{spec.name} is started again after {delay:.1f} s"
                )
                return

    def _successor(self, child: ChildProcess, status: int) -> ProcessSpec:
        if child.spec.role != "engine" or child.rank is None or self._engine_spec is None:
            return child.spec
        rank = None if status == process.EXIT_REFUSED else child.rank
        return self._engine_spec(rank, child.spec.number)

    def _end_without_instances(self, status: int) -> None:
        """End a launcher without instances, which has nothing left to do.

        It stays if it is the head of instances elsewhere, or was scaled to zero on purpose: others may come.
        """
        if self._of_role("engine") or any(spec.role == "engine" for spec in self._coming_back.values()):
            return
        has_endpoint = any(spec.role == "router" for spec in self._table)
        is_head = has_endpoint or any(spec.role == "coordinator" for spec in self._table)
        if (has_endpoint and status == 0) or (is_head and self._others_serve()):
            logger.info("no local instance is left; the mesh stays for others")
            return
        logger.log(logging.ERROR if status else logging.INFO, "no local instance is left")
        self.problem = f"no local instance is left: {self._last_end}"
        self._end(exit_status(status))

    def _others_serve(self) -> bool:
        """Whether instances that are not ours are ready, as far as is known."""
        here = socket.gethostname()
        members = self._view.members if self._view else []
        return any(
            member.state is State.READY
            and member.instance not in self._gone_names
            and (member.host != here or member.pid not in self._gone)
            for member in members
        )

    def _record(self, event: FaultEvent, kind: str, text: str) -> None:
        self.faults.record(event, kind, text, time.time())

    def _of_role(self, role: str) -> list[ChildProcess]:
        return [child for child in self._children.values() if child.spec.role == role]

    # ---- the end

    async def _stop_all(self, starting: asyncio.Future[None]) -> None:
        """Routers first, so that nothing new comes in; the coordinator last."""
        self._stopping = True
        if self._fork_server is not None:
            self._fork_server.close()
        await asyncio.wait([starting])
        for door in self._doors:
            door.close()
        is_head = any(spec.role == "router" for spec in self._table)
        for role in ("router", "engine", "coordinator"):
            children = self._of_role(role)
            for child in children:
                child.tell(signal.SIGTERM)
            await self._wait_for(children, self._patience(role, is_head))

    def _patience(self, role: str, is_head: bool) -> float:
        """Seconds that processes of a role get to end, and their requests with them."""
        drains = role == "engine" and not is_head
        running = self._drain_timeout if drains else self._shutdown_timeout if role == "router" else 0.0
        return STOP_TIMEOUT + running

    async def _wait_for(self, children: list[ChildProcess], patience: float) -> None:
        if not children:
            return
        ended = asyncio.gather(*(child.ended() for child in children))
        for last_resort in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), patience)
                return
            for child in children:
                child.tell(last_resort)
            patience = 3.0
        await ended
