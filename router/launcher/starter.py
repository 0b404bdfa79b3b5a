"""Start of one child process, forked where that is possible, else a new program."""

from __future__ import annotations

import contextlib
import logging
import time
from asyncio.subprocess import Process
from collections.abc import Callable

from coordinator.process import process
from coordinator.process.last_error import LastError
from engine.host.forked import Forked, ForkServer, Unforked
from router.launcher.cache_files import CacheFiles
from router.launcher.child_process import ChildProcess, fork, spawn
from router.launcher.launch import ProcessSpec

logger = logging.getLogger(__name__)


class ProcessStarter:
    """Starts processes with a name, memory of their KV cache, and file for errors."""

    def __init__(self, fork_server: ForkServer | None = None, caches: CacheFiles | None = None) -> None:
        """``fork_server``: forks instances, and is closed with this object; None: all are started normally.
        ``caches``: memory of the instances' KV caches, which outlives them."""
        self._fork_server = fork_server
        self._caches = caches
        self._closed = False

    def __repr__(self) -> str:
        return f"<ProcessStarter with {self._fork_server!r}>"

    def log_fork_server(self) -> None:
        """Log the fork server's pid if there is one."""
        if self._fork_server is not None:
            logger.info("the fork server (pid %d) loads libraries for all instances", self._fork_server.pid)

    def forks(self, spec: ProcessSpec) -> bool:
        """Whether this process would be forked.

        Routers and the coordinator load little: only a fork server that was there before may have them.
        """
        server = self._fork_server
        return server is not None and not server.problem and spec.main_module in server.modules

    async def start(
        self, key: int, spec: ProcessSpec, name: str, still_wanted: Callable[[], bool]
    ) -> ChildProcess | None:
        """Start a process; None if it was retired while it was forked.

        ``name``: under which an instance registers. ``still_wanted`` is asked once after a fork.

        Raises:
            OSError: no memory, process or descriptor is left.
        """
        environment = {**spec.environment(), process.INSTANCE_VARIABLE: name}
        if self._caches is not None and spec.is_instance:
            environment |= self._caches.begin(key)
        with contextlib.ExitStack() as unless_started:
            last_error = unless_started.enter_context(LastError())
            started = await self._start(spec, environment | last_error.environment, still_wanted)
            if started is None:
                return None
            unless_started.pop_all()
        began = None if spec.is_instance else time.monotonic()  # an instance loads first: a view has its time
        return ChildProcess(key, spec, started, began, spec.rank, last_error, name=name)

    def serves(self, key: int) -> None:
        """Free the KV cache of the predecessor of an instance that has become ready."""
        if self._caches is not None:
            self._caches.serves(key)

    def forget(self, key: int) -> None:
        """Free the KV caches of an instance that ended in order or is not restarted."""
        if self._caches is not None:
            self._caches.forget(key)

    def close(self) -> None:
        """Fork no more; processes that are being forked are ended at once."""
        self._closed = True
        if self._fork_server is not None:
            self._fork_server.close()

    async def _start(
        self, spec: ProcessSpec, environment: dict[str, str], still_wanted: Callable[[], bool]
    ) -> Process | Forked | None:
        if self.forks(spec):
            forked = await self._fork(spec, environment)
            if not still_wanted() or self._closed:
                if forked is not None:
                    forked.kill()
                    await forked.ended()
                return None
            if forked is not None:
                return forked
        return await spawn(spec, environment)

    async def _fork(self, spec: ProcessSpec, environment: dict[str, str]) -> Forked | None:
        """Forked process; None if it needs a normal process start."""
        assert self._fork_server is not None
        try:
            return await fork(self._fork_server, spec, environment)
        except Unforked as problem:
            if not self._closed:
                logger.warning("%s; falling back to a normal process start for %s", problem, spec.name)
            return None
