"""Real processes for tests: started as a user starts them, watched through their logs, always ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import psutil

from coordinator.messages import View

START_TIMEOUT = 120.0


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


BUSY = 3
"""How many times longer things may take on a machine that has other work."""


def wait_until(condition: Callable[[], Any], timeout: float, what: str = "") -> Any:
    """Poll until ``condition`` gives something true, and return that.

    ``timeout``: seconds on a quiet machine; nothing is asserted about them, so a busy one gets more.
    """
    timeout *= BUSY
    deadline = time.monotonic() + timeout
    while True:
        found = condition()
        if found:
            return found
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what or condition}"
        time.sleep(0.05)


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
        """``prefix``: a command that runs the command line given behind it."""
        self.log_file = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-m", module, *argv],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
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
        """This process's descendants; and ``itself``, if told so."""
        if self.process.returncode is not None:
            return []  # its number may be another process's by now
        try:
            process = psutil.Process(self.process.pid)
            return [process] * itself + process.children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, title: str) -> psutil.Process:
        """The descendant whose process title begins with ``lockstep: TITLE``."""

        def find() -> psutil.Process | None:
            for member in self.family():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if " ".join(member.cmdline()).startswith(f"lockstep: {title}"):
                        return member
            return None

        found: psutil.Process = wait_until(find, 10, title)
        return found

    def wait_for(self, text: str, timeout: float = START_TIMEOUT) -> None:
        """Wait until the log says ``text``; fails at once if the process ends without."""

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

    def __init__(self) -> None:
        self.http, self.rpc = free_port(), free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http}"

    def head(self) -> list[str]:
        return ["--port", str(self.http), *self.join()]

    def join(self) -> list[str]:
        return ["-dpa", "127.0.0.1", "-dpp", str(self.rpc)]

    def view(self) -> View:
        """What ``lockstep status --json`` says."""
        output = subprocess.run(
            [sys.executable, "-P", "-m", "router.status", "--json", *self.join()],
            capture_output=True,
            check=True,
            timeout=30,
        ).stdout
        return msgspec.json.decode(output, type=View)

    def status(self) -> str:
        """What ``lockstep status`` prints."""
        return subprocess.run(
            [sys.executable, "-P", "-m", "router.status", *self.join()],
            capture_output=True,
            check=True,
            text=True,
            timeout=30,
        ).stdout


def serve(log: Path, *argv: str, env: dict[str, str] | None = None) -> Command:
    """``serve ARGV`` with logs in ``log``."""
    return Command(log, "router.serve", *argv, env=env)
