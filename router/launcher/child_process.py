"""Child process of a ``serve``: its start, its state, and its exit status."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, Process
from dataclasses import dataclass

from coordinator.process import process
from coordinator.process.last_error import LastError
from engine.host.forked import Forked, ForkServer
from router.launcher.launch import ProcessSpec


@dataclass
class ChildProcess:
    """A running child process of the launcher, with its mesh state."""

    key: int
    """Key in the process table; a restarted process keeps it."""
    spec: ProcessSpec
    process: Process | Forked
    began: float | None
    """Monotonic time at which it began to serve; None while an instance loads."""
    rank: int | None
    last_error: LastError
    """File with the last error that the process logged."""
    instance: str = ""
    """Name in the mesh; empty until an instance has registered."""
    name: str = ""
    """Name that the launcher gave the child for registering."""
    returns: bool = False
    """Whether it was started to take over its predecessor's rank."""
    is_reported: bool = False
    """Whether the coordinator knows that it died."""
    is_member: bool = False
    """Whether it is in the newest view of the mesh."""
    retired: bool = False
    """Whether it was ordered to drain and end.

    It never comes back, and its process may outlive its membership.
    """

    async def ended(self) -> int:
        """Wait for the child's end; returns its exit status as in subprocess."""
        if isinstance(self.process, Forked):
            return await self.process.ended()
        return await self.process.wait()

    @property
    def stays(self) -> bool:
        """Whether it serves or will; False once it has left the mesh."""
        return not self.retired and (self.is_member or not self.instance)

    def why_it_ended(self, status: int) -> str:
        """Exit status in words, with the last logged error if it ended itself."""
        how, error = process.how_it_ended(status), self.last_error.read() if status > 0 else ""
        return f"{how}: {error}" if error else how

    def send_signal(self, number: int) -> None:
        """Send the child a signal if it still runs."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)


async def spawn(spec: ProcessSpec, environment: dict[str, str]) -> Process:
    """Start a child process normally, as a new program."""
    return await asyncio.create_subprocess_exec(
        *spec.command(),
        env=environment,
        stdin=DEVNULL,
        start_new_session=True,
        pass_fds=spec.descriptors,
    )


async def fork(server: ForkServer, spec: ProcessSpec, environment: dict[str, str]) -> Forked:
    """Start a child process by the fork server, with its libraries loaded.

    Raises:
        Unforked: it has to be spawned.
    """
    return await asyncio.to_thread(
        server.fork,
        f"{spec.main_module}:main",
        spec.argv,
        environment,
        spec.descriptors,
        branches=bool(spec.workers),
    )


def exit_status(status: int) -> int:
    """Exit status as shells report it: 128 plus the number of a signal."""
    return status if status >= 0 else 128 - status
