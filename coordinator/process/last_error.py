"""The last error that a process logged, for the launcher that started it.

The launcher holds a file in memory and names it in the environment; the process opens it by that name
whenever it logs an error. So nothing is inherited, and what a process wrote survives it, however it ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
from types import TracebackType

VARIABLE = "LOCKSTEP_LAST_ERROR"
"""Environment variable with path, device and inode of the file, separated by colons."""
MOST_BYTES = 2000
"""Bytes of the error that are kept."""


class LastError:
    """Launcher's side: an in-memory file for the child's last error, if possible."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.memfd_create("last-error")

    def __repr__(self) -> str:
        return f"<LastError {self._descriptor}>"

    def __enter__(self) -> LastError:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that name the file to the child."""
        if self._descriptor is None:
            return {}
        found = os.fstat(self._descriptor)
        path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        return {VARIABLE: f"{path}:{found.st_dev}:{found.st_ino}"}

    def read(self) -> str:
        """The error, in one line; empty without one."""
        if self._descriptor is None:
            return ""
        text = os.pread(self._descriptor, MOST_BYTES, 0).decode(errors="replace")
        return " ".join("".join(each if each.isprintable() else " " for each in text).split())

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class LastErrorHandler(logging.Handler):
    """Child's side: log handler that writes each error over the last one."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)

    def __repr__(self) -> str:
        return f"<LastErrorHandler {os.environ.get(VARIABLE, '')}>"

    def emit(self, record: logging.LogRecord) -> None:
        """Write an error to the in-memory file, which never blocks."""
        path, _, identity = os.environ.get(VARIABLE, "").partition(":")
        if not path:
            return
        with contextlib.suppress(OSError, ValueError):  # the launcher is gone, or in another namespace
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                if identity == f"{found.st_dev}:{found.st_ino}":  # else the number is another file's by now
                    os.ftruncate(descriptor, 0)
                    os.pwrite(descriptor, _text(record).encode(errors="replace")[:MOST_BYTES], 0)
            finally:
                os.close(descriptor)


def _text(record: logging.LogRecord) -> str:
    text, error = record.getMessage(), record.exc_info[1] if record.exc_info else None
    return text if error is None else f"{text}: {type(error).__name__}: {error}"
