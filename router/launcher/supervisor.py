"""Supervisor of the processes of one ``serve``: starts, watches, restarts, scales and ends them.

:mod:`router.launcher.restarts` decides what to restart and when, :mod:`router.launcher.children` keeps which
processes there are, :mod:`router.launcher.starter` starts one, :mod:`router.launcher.shutdown` ends all.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Sequence

from coordinator.messages import View
from coordinator.process import process
from coordinator.rpc.handshakes import KeyRefused
from parallel.ending_processes import ending_status
from router.faults import FaultEvent, Faults
from router.launcher.child_process import ChildProcess, exit_status
from router.launcher.children import Children
from router.launcher.launch import ProcessSpec
from router.launcher.losses import Losses
from router.launcher.restarts import Restarts
from router.launcher.shutdown import Shutdown
from router.launcher.starter import ProcessStarter

logger = logging.getLogger(__name__)

COORDINATOR_FIRST = 10.0
"""Most seconds that forked instances wait for the local coordinator.

After that they start without it.
"""
ENDING_INTERVAL = 0.1
"""Seconds between two looks whether an instance's process is ending."""


class Supervisor:
    """Starts the process table, restarts what may be restarted, and ends all in order.

    Before everything is ready, the first process that ends takes all down: its message names the error. Later
    the coordinator and the routers are restarted, instances too with ``--restart``, and instances may come
    and go.
    """

    def __init__(
        self,
        table: Sequence[ProcessSpec],
        *,
        restart: bool = False,
        engine_spec: Callable[[int | None, int], ProcessSpec] | None = None,
        starter: ProcessStarter | None = None,
        shutdown: Shutdown | None = None,
    ) -> None:
        """``restart``: instances that died are started again. ``engine_spec`` makes the table entry of an
        instance from its rank (None: any) and its number within this launcher."""
        self._table = list(table)
        self._roles = frozenset(spec.role for spec in table)
        self._restarts = Restarts(instances=restart)
        self._engine_spec = engine_spec
        self._starter = starter or ProcessStarter()
        self._shutdown = shutdown or Shutdown()
        self._num_keys = 0
        self._watchers: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._status = 0
        self._last_end = ""
        """Name of the process that ended last, and how it ended."""
        self.children = Children()
        self.faults = Faults()
        self.losses = Losses()
        self.on_lost: Callable[[str, str], None] = lambda instance, how: None
        """Called when an instance died, with its name in the mesh and how it died."""
        self.ready = False
        """Whether the mesh serves."""
        self.stopping = False
        """Whether all processes are being ended."""
        self.problem = ""
        """Name of the process that ended first, and how, unless the end was asked for."""

    def __repr__(self) -> str:
        return f"<Supervisor {self.children!r}>"

    async def run(self, until_ready: Callable[[], Awaitable[None]], *, takes_signals: bool = True) -> int:
        """Start all, wait for SIGTERM, SIGINT, SIGHUP, :meth:`stop` or the end of what matters.

        Returns the exit status. ``takes_signals``: they are this program's to handle (main thread only).
        """
        loop = asyncio.get_running_loop()
        with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN  # nohup has it so
        taken = (signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if with_terminal else []))
        for number in taken if takes_signals else ():
            loop.add_signal_handler(number, self._on_signal, number)
        forked = [spec for spec in self._table if spec.role == "engine" and self._starter.forks(spec)]
        self._starter.log_fork_server()
        for spec in self._table:
            if spec not in forked:
                await self.start(spec)
        starting = asyncio.ensure_future(self._start_forked(forked))
        starting.add_done_callback(self._on_started)
        waiting = asyncio.ensure_future(self._wait_until_ready(until_ready))
        await self._ended.wait()
        waiting.cancel()
        self.stopping = True
        self._starter.close()
        await asyncio.wait([starting])
        await self._shutdown.end_all(self.children, self._roles)
        return self._status

    def stop(self) -> None:
        """Let :meth:`run` end all and return."""
        self._end(self._status)

    async def _start_forked(self, table: Sequence[ProcessSpec]) -> None:
        """Start the processes that fork, after the coordinator.

        They take no time to start, so the local coordinator goes first. If it cannot listen, its error says
        why; the others would find the coordinator of another mesh there.
        """
        if "coordinator" in self._roles:
            events = (self.children.has_view, self._ended)
            first = [asyncio.ensure_future(event.wait()) for event in events]
            await asyncio.wait(first, timeout=COORDINATOR_FIRST, return_when=asyncio.FIRST_COMPLETED)
            for each in first:
                each.cancel()
        if not self.stopping:
            await asyncio.gather(*(self.start(spec) for spec in table))

    def _on_started(self, starting: asyncio.Future[None]) -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            logger.error("not all instances could be started: %s", error, exc_info=error)
            self.problem = self.problem or str(error)
            self._end(process.EXIT_FAILED)

    async def start(self, spec: ProcessSpec) -> None:
        """Start one more process."""
        self._num_keys += 1
        await self._start(self._num_keys, spec)

    async def grow(self, ranks: Sequence[int], room: int = 0) -> None:
        """Start instances of these ranks.

        ``room``: how many local ones can have devices of their own.
        """
        assert self._engine_spec is not None
        for rank in ranks:
            logger.info("starting instance %d", rank)
            await self.start(self._engine_spec(rank, self.children.free_number(room)))

    def retire(self, ranks: Sequence[int]) -> None:
        """Have the local instances of these ranks drain and end."""
        coming = self.children.coming
        for key in [key for key, spec in coming.items() if spec.rank in ranks]:
            del coming[key]
        for child in self.children.of_role("engine"):
            if child.rank in ranks and not child.retired:
                logger.info("draining instance %d", child.rank)
                child.retired = True
                child.send_signal(signal.SIGTERM)

    def learn(self, view: View) -> None:
        """Take ranks and readiness of local instances from a view of the mesh."""
        for child in self.children.learn(view):
            self._starter.serves(child.key)

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
            logger.info("%s", self._shutdown.log_line(self._roles, is_ready=self.ready))
        if number == signal.SIGINT and not self.ready:  # as the commands that have no end of their own
            self._end(process.EXIT_INTERRUPTED)
        if self.stopping:
            for child in self.children.running.values():  # asked twice: no more waiting for requests
                if child.spec.role != "coordinator":  # without whom instances cannot leave
                    child.send_signal(signal.SIGTERM)
        self._end(self._status)

    def _end(self, status: int) -> None:
        self._status = self._status or status
        self._ended.set()

    async def _start(self, key: int, spec: ProcessSpec, *, returns: bool = False) -> None:
        """Start a process and watch it; ``returns``: under its former rank."""
        coming = self.children.coming
        if self._starter.forks(spec):
            coming[key] = spec  # counts as running, and can be retired, while it is forked
        name = self.children.new_name()
        child = await self._starter.start(key, spec, name, lambda: coming.pop(key, None) is not None)
        if child is None:
            return
        child.returns = returns
        self.children.running[key] = child
        watcher = asyncio.create_task(self._watch(child))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)

    async def _report_ending(self, child: ChildProcess) -> None:
        """Report a dying instance before the system has released its memory and devices."""
        while not child.is_reported and not child.retired:
            await asyncio.sleep(ENDING_INTERVAL)
            status = ending_status(child.process.pid) if child.instance else None
            if status:
                child.is_reported = True
                self.on_lost(child.instance, process.how_it_ended(status))

    async def _watch(self, child: ChildProcess) -> None:
        reporting = asyncio.create_task(self._report_ending(child))
        try:
            status = await child.ended()
        finally:
            reporting.cancel()
        self.children.remove(child)
        why = child.why_it_ended(status)
        child.last_error.close()
        if status == 0 or child.retired:
            self._starter.forget(child.key)
        if self._ended.is_set():
            return
        how = process.how_it_ended(status)
        log = logger.info if status == 0 else logger.error
        log("%s (pid %d) %s", child.spec.name, child.process.pid, how)
        self._last_end = f"{child.spec.name} (pid {child.process.pid}) {why}"
        if status != 0 and child.instance and not child.is_reported:
            self.on_lost(child.instance, how)
        if status != 0:
            self._record(FaultEvent.DETECTION, "process_exit", f"{child.spec.name} {how}")
        if not self.ready:
            self.problem = self.problem or self._last_end
            self._end(exit_status(status))
        elif not child.retired and self._restarts.wants(
            child.spec.role, status, wanted_its_rank=child.returns and not child.instance
        ):
            await self._restart(child, status)
        elif child.spec.role == "engine":
            if not child.retired:
                self.losses.note(self._last_end)
            self._end_without_instances(status)

    async def _restart(self, child: ChildProcess, status: int) -> None:
        """Start a process again after the pause that is due.

        An instance whose rank was refused may get any.
        """
        coming = self.children.coming
        served_for = 0.0 if child.began is None else time.monotonic() - child.began
        why = self._last_end
        while True:
            delay = self._restarts.after_end(child.key, child.spec.role, served_for)
            if delay is None:
                logger.error("%s ended too often in a row: it is not started again", child.spec.name)
                self.losses.note(f"{why}, too often in a row")
                self._starter.forget(child.key)
                self._end_without_instances(status)
                return
            coming[child.key] = self._successor(child, status)
            logger.info("restarting %s in %.1f s", child.spec.name, delay)
            await asyncio.sleep(delay)
            spec = coming.pop(child.key, None)
            if spec is None or self._ended.is_set():
                self._end_without_instances(0)
                return
            logger.info("restarting %s", spec.name)
            try:
                await self._start(child.key, spec, returns=spec.rank is not None)
            except OSError as error:  # no memory, no process or no descriptor to be had, for now
                logger.error("%s cannot be started: %s", spec.name, error)
                coming.pop(child.key, None)
                served_for = 0.0
            else:
                text = f"{spec.name} is started again after {delay:.1f} s"
                self._record(FaultEvent.RESTART, spec.role, text)
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
        if self.children.has_instances:
            return
        has_endpoint = "router" in self._roles
        is_head = has_endpoint or "coordinator" in self._roles
        if (has_endpoint and status == 0) or (is_head and self.children.others_serve()):
            logger.info("no local instance is left; the mesh stays for others")
            return
        logger.log(logging.ERROR if status else logging.INFO, "no local instance is left")
        self.problem = f"no local instance is left: {self._last_end}"
        self._end(exit_status(status))

    def _record(self, event: FaultEvent, kind: str, text: str) -> None:
        self.faults.record(event, kind, text, time.time())
