"""Real processes for tests: started as by users, watched by their logs, always ended."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from coordinator.config import MeshConfig
from coordinator.member_connection import fetch_view
from coordinator.messages import View
from coordinator.process.process import PARENT_VARIABLE
from coordinator.rpc import keys, own_key
from coordinator.rpc.keys import MeshKeys
from engine.host.forked import Forked, ForkServer, Unforked, is_possible, modules_of, thread_environment

START_TIMEOUT = 120.0


FIRST_PORT, LAST_PORT = 10_000, 29_999
"""Ports of tests.

They are below those that systems give to connections, which could take one before a test binds it.
"""

_ports = random.Random(os.getpid()).sample(range(FIRST_PORT, LAST_PORT + 1), LAST_PORT + 1 - FIRST_PORT)
"""Those left, in an order of this process: several test at once."""


def free_port() -> int:
    """A port that no process listens on now; another one each time."""
    while True:
        port = _ports.pop()
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


BUSY = 3
"""How many times longer things may take on a machine that has other work."""


def wait_until(condition: Callable[[], Any], timeout: float, what: str = "", every: float = 0.05) -> Any:
    """Poll until ``condition`` gives something true, and return that.

    ``timeout``: seconds on a quiet machine; nothing is asserted about them, so a busy one gets more.
    ``every``: seconds between two looks; more where a look starts a process.
    """
    timeout *= BUSY
    deadline = time.monotonic() + timeout
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what or condition}"
        time.sleep(every)


WARM = {"router.launcher.serve": "router.launcher.serve:main_serve", "engine": "engine.__main__:main"}
"""Modules that load torch, or start what does, and what each runs."""

LAUNCHED = ("router.launcher.serve", "coordinator.__main__", "router.__main__", "router.server")
"""What ``serve``, coordinators and routers load."""


@cache
def fork_server(*prefix: str) -> ForkServer:
    """Fork server of this test run, which saves each mesh seconds of loading libraries.

    A fork server that ``serve`` starts itself does the same. LOCKSTEP_FORK_SERVER=0 does without.
    """
    server = ForkServer.start([*modules_of("qwen3_moe"), *LAUNCHED], prefix)
    atexit.register(server.close)
    return server


def warm_start(
    module: str, argv: Sequence[str], environment: dict[str, str], log: int, prefix: Sequence[str]
) -> Forked | None:
    """A command line forked with its libraries loaded; None if it must start normally."""
    if module not in WARM or not is_possible("cpu", 0):
        return None
    with open(os.devnull) as nothing:
        streams = (nothing.fileno(), log, log)
        kept = {name: value for name, value in thread_environment(1).items() if name not in environment}
        kept[PARENT_VARIABLE] = str(os.getpid())  # it ends with this run, whatever ends that
        try:
            return fork_server(*prefix).fork(
                WARM[module],
                argv,
                {**environment, **kept},
                streams=streams,
                branches=module == "router.launcher.serve",
            )
        except Unforked as problem:
            print(f"started the plain way: {problem}", file=sys.stderr)
            return None


class Command:
    """One command line of ours, running."""

    def __init__(
        self,
        log: Path,
        module: str,
        *argv: str,
        env: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """``prefix``: a command that becomes the command line given behind it."""
        self.log_file = log
        environment = {**os.environ, **(env or {})}
        with log.open("wb") as file:
            self.process: subprocess.Popen[bytes] | Forked = (
                warm_start(module, argv, environment, file.fileno(), prefix)
            ) or subprocess.Popen(
                [*prefix, sys.executable, "-P", "-m", module, *argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        family = self.family()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for member in family:
            if member.is_running():
                member.kill()
        self.process.wait(10)
        if kind is not None:
            print(f"---- {self.log_file.name}\n{self.log}")

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def family(self, *, itself: bool = False) -> list[psutil.Process]:
        """Descendants of this process, and with ``itself`` the process, too."""
        if self.process.returncode is not None:
            return []  # its number may be another process's by now
        try:
            process = psutil.Process(self.process.pid)
            return [process] * itself + process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, title: str, timeout: float = 10) -> psutil.Process:
        """The descendant whose process title begins with ``lockstep: TITLE``."""

        def find() -> psutil.Process | None:
            for member in self.family():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if " ".join(member.cmdline()).startswith(f"lockstep: {title}"):
                        return member
            return None

        found: psutil.Process = wait_until(find, timeout, title)
        return found

    def wait_for(self, text: str, timeout: float = START_TIMEOUT) -> None:
        """Wait until the log has ``text``; fails at once if the process ends without."""

        def said() -> bool:
            ended = self.process.poll() is not None
            if text in self.log:
                return True
            assert not ended, f"ended with {self.process.returncode} before it said {text!r}:\n{self.log}"
            return False

        wait_until(said, timeout, f"{text!r} in\n{self.log}")

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Send a signal and wait for the end; the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)

    def end(self, timeout: float = START_TIMEOUT) -> int:
        """Wait for the process to end by itself; the exit status."""
        return self.process.wait(timeout)


class Ports:
    """The two ports of one mesh, and what to ask there."""

    def __init__(self, address: str = "127.0.0.1", key_file: Path | None = None) -> None:
        """``address``: of the coordinator. ``key_file``: with the mesh's key, unless it makes its own."""
        self.http, self.rpc = free_port(), free_port()
        self._address, self._key_file = address, key_file

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def head(self) -> list[str]:
        return ["--port", str(self.http), *self.join()]

    def join(self) -> list[str]:
        key = [] if self._key_file is None else ["--mesh-key-file", str(self._key_file)]
        return ["-dpa", self._address, "-dpp", str(self.rpc), *key]

    def view(self) -> View:
        """The coordinator's. Asked for without a command, since tests ask often."""
        asked = fetch_view(f"tcp://{self._address}:{self.rpc}", 30.0, self.keys())
        with ThreadPoolExecutor(1) as thread:  # the caller may run an event loop
            return thread.submit(asyncio.run, asked).result()

    def keys(self) -> MeshKeys | None:
        """The key of this mesh."""
        if self._key_file is not None:
            return keys.load(self._key_file)
        return own_key.find(MeshConfig(data_parallel_rpc_port=self.rpc))

    def status(self) -> str:
        """What ``lockstep status`` prints."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "router.tools.status", *self.join()],
            capture_output=True,
            check=True,
            text=True,
            timeout=30,
        ).stdout


def serve(log: Path, *argv: str, env: dict[str, str] | None = None, prefix: Sequence[str] = ()) -> Command:
    """``serve ARGV`` with logs in ``log``."""
    return Command(log, "router.launcher.serve", *argv, env=env, prefix=prefix)
