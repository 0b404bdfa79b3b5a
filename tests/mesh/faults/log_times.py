"""When lines were written to the logs of a mesh, read while they are written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

from tests.mesh.harness import Command

INTERVAL = 0.004
"""Seconds between two looks: what all times are uncertain by."""


class LogTimes(threading.Thread):
    """Follows all logs, those of commands that come later included."""

    def __init__(self, commands: Callable[[], Sequence[Command]]) -> None:
        super().__init__(daemon=True)
        self._commands = commands
        self._stopped = threading.Event()
        self._files: dict[Command, BinaryIO] = {}
        self._begun: dict[Command, bytes] = {}
        """The part of a line that is written by now."""
        self.lines: list[tuple[float, str]] = []

    def __enter__(self) -> LogTimes:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self.join()
        for file in self._files.values():
            file.close()

    def run(self) -> None:
        while not self._stopped.is_set():
            now = time.monotonic()
            for command in list(self._commands()):
                if command not in self._files:
                    self._files[command] = command.log_file.open("rb")
                new = self._files[command].read()
                if new:
                    *lines, rest = (self._begun.get(command, b"") + new).split(b"\n")
                    self._begun[command] = rest
                    self.lines += [(now, line.decode(errors="replace")) for line in lines]
            time.sleep(INTERVAL)

    def since(self, moment: float, text: str) -> list[tuple[float, str]]:
        """Lines with this text, and when they came."""
        return [(at, line) for at, line in list(self.lines) if at >= moment and text in line]
