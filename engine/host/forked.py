"""Processes that are forked from one which has its libraries loaded already (no torch).

Loading torch and transformers takes seconds of CPU. So a process that starts several instances or workers, or
may have to start one again, starts a fork server first (:mod:`engine.host.fork_server`) and asks it for them.
What it makes is, to the asker, like any child process: the kernel counts it as the asker's child, so its end,
its exit status and the death of its parent are seen the usual way, and it outlives the fork server.

How that is done: the server forks twice, and the process between ends at once. The kernel gives its orphan
to the nearest ancestor that reaps orphans (PR_SET_CHILD_SUBREAPER), which the asker is while it asks.

Nothing depends on a fork server: on :class:`Unforked` the caller falls back to a normal process start.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from coordinator.process import process

PR_SET_CHILD_SUBREAPER = 36
MAX_MESSAGE = 1 << 17
"""Bytes of one message to or from the fork server."""
MAX_DESCRIPTORS = 32
"""File descriptors passed along with one request to the fork server."""
ANSWER_TIMEOUT = 120.0
"""Timeout of a fork in seconds, including the server's initial loading."""
OFF = "LOCKSTEP_FORK_SERVER"
"""Environment variable; 0: every process is started normally, without forking."""


class Fork(msgspec.Struct, frozen=True):
    """Request for a fork; standard streams and inherited descriptors are sent along."""

    entry: str
    """Function to run, as ``module:function``; its result is the exit status."""
    argv: tuple[str, ...]
    environment: dict[str, str]
    descriptors: tuple[int, ...]
    """Descriptor numbers that inherited descriptors get in the child."""
    directory: str
    parent: int
    branches: bool = False
    """Whether the child gets a fork server of its own."""


class Born(msgspec.Struct, frozen=True, tag=True):
    pid: int


class ForkFailed(msgspec.Struct, frozen=True, tag="Failed"):
    reason: str


class Unforked(Exception):
    """Error: the process could not be forked; the message has the reason.

    It can be started the plain way.
    """


def thread_environment(threads: int) -> dict[str, str]:
    """Environment variables for thread counts, which libraries read when loaded.

    Equal in all processes that compute, but for the number.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Waiting threads must not spin on cores that others need.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


class Forked:
    """Handle of a forked child process, with the methods of :class:`subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        """``pid``: of a child of this process that nobody else waits for."""
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = os.pidfd_open(pid)
        self._reaping = threading.Lock()
        self._ended: asyncio.Future[int] | None = None

    def __repr__(self) -> str:
        return f"<Forked {self.pid}, {'runs' if self.returncode is None else f'status {self.returncode}'}>"

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # it was never watched
            os.close(self._pidfd)

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        with self._reaping:
            if self.returncode is None:
                with contextlib.suppress(ChildProcessError):
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                    if pid:
                        self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, at most ``timeout`` seconds; returns the exit status.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(f"pid {self.pid}", timeout or 0.0)
            poll.poll(None if left is None else left * 1000)
        return status

    async def ended(self) -> int:
        """Wait for the end in an event loop, always the same one."""
        if self._ended is None:
            loop = asyncio.get_running_loop()
            ended = self._ended = loop.create_future()

            def reap() -> None:
                status = self.poll()
                if status is not None:
                    loop.remove_reader(self._pidfd)
                    if not ended.done():
                        ended.set_result(status)

            loop.add_reader(self._pidfd, reap)
        return await asyncio.shield(self._ended)

    def send_signal(self, number: int) -> None:
        """Send a signal; does nothing if the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Client of a fork server; one that failed once is not used again."""

    def __init__(
        self,
        connection: socket.socket,
        child: subprocess.Popen[bytes] | Forked,
        modules: Iterable[str] = (),
    ) -> None:
        """``modules``: those that it has loaded, or loads before it answers."""
        self.modules = frozenset(modules)
        self._connection = connection
        self._child = child
        self._asking = threading.Lock()
        self._owner = os.getpid()
        self.problem = ""
        """Reason why the fork server is no longer used; empty while it works."""

    def __repr__(self) -> str:
        return f"<ForkServer pid {self._child.pid}{', ' * bool(self.problem)}{self.problem}>"

    @property
    def pid(self) -> int:
        return self._child.pid

    @classmethod
    def start(cls, modules: Sequence[str], prefix: Sequence[str] = (), *, mesh: str = "") -> ForkServer:
        """Start a fork server, which loads these modules now.

        It can be asked at once and answers when it has them. ``prefix``: a command that becomes the command
        line given behind it. ``mesh``: port and model of the mesh, for its title.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            child = subprocess.Popen(
                [
                    *prefix,
                    sys.executable,
                    "-P",
                    "-m",
                    "engine.host.fork_server",
                    str(theirs.fileno()),
                    *modules,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={
                    **os.environ,
                    **thread_environment(1),
                    "OPENBLAS_NUM_THREADS": "1",  # it would start threads when it is loaded
                    process.PARENT_VARIABLE: str(os.getpid()),
                    process.MESH_VARIABLE: mesh,
                },
                start_new_session=True,
            )
        return cls(ours, child, modules)

    def fork(
        self,
        entry: str,
        argv: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int] = (),
        *,
        streams: tuple[int, int, int] | None = None,
        branches: bool = False,
        timeout: float = ANSWER_TIMEOUT,
    ) -> Forked:
        """A process of ours that runs this function, ``module:function``, in a session of its own.
        ``streams``: its standard input, output and error; None for an empty one and ours.

        Raises:
            Unforked: it was not made.
        """
        try:
            directory = os.getcwd()
        except OSError as error:
            raise Unforked(f"the working directory is gone: {error}") from error
        request = Fork(
            entry, tuple(argv), dict(environment), tuple(descriptors), directory, os.getpid(), branches
        )
        try:
            frame = msgspec.msgpack.encode(request)
        except ValueError as error:  # bytes of a variable or of the directory that are no UTF-8
            raise Unforked(f"the fork server takes valid UTF-8 only: {error}") from error
        with contextlib.ExitStack() as held, self._asking:
            if self.problem:
                raise Unforked(self.problem)
            try:
                nothing = held.enter_context(open(os.devnull))
            except OSError as error:  # for now: the server has nothing to do with it
                raise Unforked(f"{os.devnull} cannot be opened: {error.strerror}") from error
            try:
                with _takes_orphans():
                    self._connection.settimeout(timeout)
                    passed = (*(streams or (nothing.fileno(), 1, 2)), *descriptors)
                    socket.send_fds(self._connection, [frame], passed)
                    payload = self._connection.recv(MAX_MESSAGE)
                if not payload:
                    raise OSError("it has ended")
                answer = msgspec.msgpack.decode(payload, type=Born | ForkFailed)
            except (OSError, msgspec.MsgspecError) as error:
                self.problem = f"the fork server is lost: {error}"
                self._connection.close()
                self._child.kill()
                self._child.wait()
                raise Unforked(self.problem) from error
        if isinstance(answer, ForkFailed):
            raise Unforked(answer.reason)
        try:
            return Forked(answer.pid)
        except OSError as error:  # nobody could watch it
            os.kill(answer.pid, signal.SIGKILL)
            os.waitpid(answer.pid, 0)
            raise Unforked(f"pid {answer.pid} cannot be watched: {error.strerror}") from error

    def close(self) -> None:
        """End the server; its processes live on. Callers that wait for it get ``Unforked``."""
        if os.getpid() != self._owner:
            return
        self.problem = self.problem or "the fork server is closed"
        self._child.kill()
        self._child.wait()
        with self._asking:
            self._connection.close()


_reaping = threading.Lock()
_num_reaping = 0


@contextlib.contextmanager
def _takes_orphans() -> Iterator[None]:
    """Context in which orphaned descendants become children of this process (subreaper)."""
    global _num_reaping
    with _reaping:
        _num_reaping += 1
        _set_subreaper(True)
    try:
        yield
    finally:
        with _reaping:
            _num_reaping -= 1
            if not _num_reaping:
                _set_subreaper(False)


def _set_subreaper(wanted: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


inherited: ForkServer | None = None
"""This process's own fork server, when it was itself forked and asked for one."""


def is_possible(device: str, num_cuda_devices: int) -> bool:
    """Whether processes that compute on this device may be forked.

    CUDA does not survive a fork; torch does not touch it before it is used, but nobody should have to rely on
    that.
    """
    if os.environ.get(OFF) == "0" or sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    return device == "cpu" or (device == "auto" and not num_cuda_devices)


def modules_of(model_type: str) -> list[str]:
    """Modules that an instance with a model of this type imports.

    A module that there is not is left out.
    """
    name = model_type.replace("-", "_")
    models = [f"transformers.models.{name}.modeling_{name}"] if name.isidentifier() else []
    return [
        "engine.__main__",
        "engine.executor.uni",
        "engine.executor.spread_mp",
        "engine.groups.spread",
        "engine.executor.worker",
        "engine.executor.worker_groups",
        *models,
    ]
