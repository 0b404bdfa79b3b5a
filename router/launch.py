"""Every process that ``serve`` starts, in one short file: the table (pure) and its supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import msgspec
from rich.console import Console
from rich.tree import Tree

from coordinator import process
from coordinator.config import CoordinatorConfig
from coordinator.flags import to_argv
from coordinator.messages import Settings
from engine.config import SHIPPED_MODEL, EngineConfig, InstanceConfig
from parallel.topology import threads_per_worker
from router.config import RouterConfig, ServeConfig

logger = logging.getLogger(__name__)

STOP_TIMEOUT = 10.0
"""Seconds a process may take to end before it is told again, and then killed."""
RESTART_DELAY = 0.5
LONGEST_DELAY = 30.0
"""Seconds before a coordinator or router that ended is started again: the first time, and at most."""


class ProcessSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the process table."""

    name: str
    role: str
    """coordinator, engine or router: the package that is run."""
    argv: tuple[str, ...]
    address: str
    threads: int
    rank: int | None = None

    def command(self) -> list[str]:
        return [sys.executable, "-P", "-m", self.role, *self.argv]

    def environment(self) -> dict[str, str]:
        """This process's own, with the thread share and the pid whose death ends the child."""
        threads = str(self.threads)
        return {
            **os.environ,
            process.PARENT_VARIABLE: str(os.getpid()),
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # Waiting threads must not spin on cores that others need.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }


def process_table(
    config: ServeConfig, settings: Settings | None, cores: int, mesh_name: str = ""
) -> list[ProcessSpec]:
    """What to start, in this order. ``settings`` are those of the model, when this side knows it;
    ``mesh_name`` is the coordinator's, so that its launcher tells it from another mesh's."""
    mesh = config.mesh
    table: list[ProcessSpec] = []
    if not mesh.headless:
        table.append(_coordinator(config, settings, mesh_name))
    threads = config.engine.device.cpu_threads or threads_per_worker(mesh.instances_here, cores)
    first = mesh.data_parallel_start_rank
    if first is None and not mesh.headless:
        first = 0
    for number in range(mesh.local_size):
        table.append(_engine(config, None if first is None else first + number, threads))
    if not mesh.headless:
        table.append(_router(config))
    return table


def _coordinator(config: ServeConfig, settings: Settings | None, mesh_name: str) -> ProcessSpec:
    return ProcessSpec(
        name="Coordinator",
        role="coordinator",
        argv=tuple(
            to_argv(
                CoordinatorConfig(
                    mesh=msgspec.structs.replace(
                        config.mesh,
                        data_parallel_size=config.mesh.data_parallel_size or 1,
                        data_parallel_size_local=config.mesh.local_size,
                    ),
                    mesh_name=mesh_name,
                    settings=msgspec.json.encode(settings).decode() if settings else None,
                    log_level=config.log_level,
                )
            )
        ),
        address=config.mesh.coordinator_endpoint,
        threads=1,
    )


def _engine(config: ServeConfig, rank: int | None, threads: int) -> ProcessSpec:
    arguments = InstanceConfig(
        mesh=msgspec.structs.replace(
            config.mesh, data_parallel_start_rank=rank, data_parallel_size_local=None, headless=False
        ),
        engine=config.engine if config.mesh.headless else _with_model(config.engine),
        log_level=config.log_level,
    )
    return ProcessSpec(
        name="Engine" if rank is None else f"Engine_{rank}",
        role="engine",
        argv=tuple(to_argv(arguments)),
        address=f"{config.mesh.instance_address or 'tcp'}:*",
        threads=threads,
        rank=rank,
    )


def _with_model(engine: EngineConfig) -> EngineConfig:
    """The head's instances are told what the head decided; only headless ones learn it from the mesh."""
    model = msgspec.structs.replace(engine.model, model=engine.model.model or SHIPPED_MODEL)
    return msgspec.structs.replace(engine, model=model)


def _router(config: ServeConfig) -> ProcessSpec:
    return ProcessSpec(
        name="Router",
        role="router",
        argv=tuple(
            to_argv(
                RouterConfig(
                    mesh=msgspec.structs.replace(
                        config.mesh,
                        data_parallel_size=None,
                        data_parallel_size_local=None,
                        data_parallel_start_rank=None,
                    ),
                    http=config.http,
                    log_level=config.log_level,
                )
            )
        ),
        address=f"http://{config.http.host}:{config.http.port}",
        threads=1,
    )


def print_table(title: str, table: list[ProcessSpec]) -> None:
    """The process tree, before anything is started."""
    tree = Tree(title, highlight=False)
    for spec in table:
        rank = {"engine": "any free rank" if spec.rank is None else f"rank {spec.rank}"}.get(spec.role, "")
        most = "up to " if spec.rank is None and spec.role == "engine" else ""
        threads = f"{most}{spec.threads} thread{'s' * (spec.threads > 1)}"
        tree.add(f"{spec.name:<12} {rank:<14} {spec.address:<28} {threads}", highlight=False)
    Console(soft_wrap=True).print(tree)


class Supervisor:
    """Starts the table, watches it, and ends it in the right order.

    Before everything is ready, the first process that ends takes all down: its message says what was
    wrong. Later the coordinator and the router are started again, and instances may come and go.
    """

    def __init__(self, table: list[ProcessSpec], drain_timeout: float = 0.0) -> None:
        """``drain_timeout``: seconds that headless instances may take to finish what they have."""
        self._table = table
        self._drain_timeout = drain_timeout
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._ended = asyncio.Event()
        self._stopping = False
        self._restarts: dict[str, tuple[float, float]] = {}
        self._status = 0
        self.ready = False
        """Set by whoever knows that the mesh serves."""

    @property
    def pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self._running.items()}

    async def run(self, until_ready: Callable[[], Awaitable[None]]) -> int:
        """Start all, wait for SIGTERM, SIGINT or the end of what matters; returns the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        for index, spec in enumerate(self._table):
            await self._start(f"{index}", spec)
        waiting = asyncio.ensure_future(self._wait_until_ready(until_ready))
        await self._ended.wait()
        waiting.cancel()
        await self._stop_all()
        return self._status

    async def _wait_until_ready(self, until_ready: Callable[[], Awaitable[None]]) -> None:
        try:
            await until_ready()
            self.ready = True
        except TimeoutError as error:
            logger.error("%s", error)
            self._end(process.EXIT_FAILED)

    def _on_signal(self) -> None:
        if self._stopping:
            for child in self._running.values():  # asked twice: no more waiting for requests
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
        self._end(self._status)

    def _end(self, status: int) -> None:
        self._status = self._status or status
        self._ended.set()

    async def _start(self, key: str, spec: ProcessSpec) -> None:
        child = await asyncio.create_subprocess_exec(
            *spec.command(), env=spec.environment(), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        self._running[key] = child
        self._watchers.append(asyncio.create_task(self._watch(key, spec, child)))

    async def _watch(self, key: str, spec: ProcessSpec, child: asyncio.subprocess.Process) -> None:
        status = await child.wait()
        self._running.pop(key, None)
        if self._stopping or self._ended.is_set():
            return
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        log = logger.info if status == 0 else logger.error
        log("%s (pid %d) %s", spec.name, child.pid, how)
        if not self.ready:
            self._end(_exit_status(status))
        elif spec.role in ("coordinator", "router"):
            await asyncio.sleep(self._next_delay(key))
            if not self._ended.is_set():
                logger.info("starting %s again", spec.name)
                await self._start(key, spec)
        elif not self._roles("engine"):
            logger.error("no local instance is left")
            self._end(_exit_status(status) if self._roles("router") or status else 0)

    def _next_delay(self, key: str) -> float:
        """Seconds before a process is started again: doubled each time it ends soon after a start."""
        now = asyncio.get_running_loop().time()
        started_at, delay = self._restarts.get(key, (float("-inf"), 0.0))
        delay = min(2 * delay, LONGEST_DELAY) if now - started_at < LONGEST_DELAY and delay else RESTART_DELAY
        self._restarts[key] = (now + delay, delay)
        return delay

    def _roles(self, role: str) -> list[asyncio.subprocess.Process]:
        return [child for key, child in self._running.items() if self._table[int(key)].role == role]

    async def _stop_all(self) -> None:
        """Router first, so that nothing new comes in; the coordinator last."""
        self._stopping = True
        for role in ("router", "engine", "coordinator"):
            children = self._roles(role)
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    child.terminate()
            drains = role == "engine" and not self._roles_in_table("router")
            await self._wait_for(children, STOP_TIMEOUT + (self._drain_timeout if drains else 0.0))

    def _roles_in_table(self, role: str) -> bool:
        return any(spec.role == role for spec in self._table)

    async def _wait_for(self, children: list[asyncio.subprocess.Process], patience: float) -> None:
        if not children:
            return
        ended = asyncio.gather(*(child.wait() for child in children))
        for last_resort in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(ended), patience)
                return
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(last_resort)
            patience = 3.0
        await ended


def _exit_status(status: int) -> int:
    return status if status >= 0 else 128 - status
