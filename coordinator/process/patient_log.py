"""Log handler that never blocks its process when the log's reader stalls.

Lines are written by a thread of their own. A thread that logs never waits: lines that find no room are
dropped and counted, and a line in their place has the count.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from queue import SimpleQueue

MOST_LINES = 20_000
"""Lines that wait to be written; more are dropped and counted."""
MOST_BYTES = 8 << 20
"""Bytes of lines that wait to be written."""

MOST_AT_ONCE = 64
"""Maximum lines written in one system call."""

FLUSH_TIMEOUT = 1.0
"""Seconds that the end of a process waits for its last lines to be written."""

LOOK_AGAIN = 1.0
"""Seconds between two looks at a descriptor that takes nothing and cannot be waited for."""


class PatientHandler(logging.Handler):
    """Log handler that writes lines to a descriptor from a thread, with a bounded queue.

    Forked processes go on with an empty queue and a thread of their own.
    """

    def __init__(self, descriptor: int = 2) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._forget()

    def __repr__(self) -> str:
        return f"<PatientHandler {self._put_lines - self._written_lines} lines wait, {self._dropped} dropped>"

    def _forget(self) -> None:
        """Start with an empty queue, as after a fork: the parent writes its own lines."""
        self._pid = os.getpid()
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._put_lines = self._put_bytes = 0
        """Changed by threads that log, under the handler's lock."""
        self._written_lines = self._written_bytes = 0
        """Changed by the thread."""
        self._dropped = 0
        """Lines dropped since the last line that counted them."""
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line or count it as dropped, without blocking; under the handler's lock."""
        try:
            if self._pid != os.getpid():
                self._forget()
            line = self.format(record).encode(errors="backslashreplace") + b"\n"
            if not self._has_room(len(line)):
                self._dropped += 1
                return
            self._tell_dropped()
            self._put(line)
        except Exception:  # noqa: BLE001 (logging must not fail its caller)
            self.handleError(record)

    def flush(self) -> None:
        """Wait a bounded time until all queued lines are written."""
        if self._pid != os.getpid():
            return
        self._tell_dropped()
        deadline = time.monotonic() + FLUSH_TIMEOUT
        while self._written_lines < self._put_lines and time.monotonic() < deadline:
            time.sleep(0.001)

    def _has_room(self, size: int) -> bool:
        waiting = self._put_bytes - self._written_bytes
        return self._put_lines - self._written_lines < MOST_LINES and waiting + size <= MOST_BYTES

    def _tell_dropped(self) -> None:
        if self._dropped:
            text = "%d lines of this log were dropped: its reader did not keep up"
            made = logging.getLogRecordFactory()(
                __name__, logging.WARNING, __file__, 0, text, (self._dropped,), None, "_tell_dropped"
            )
            self._dropped = 0
            self._put(self.format(made).encode() + b"\n")

    def _put(self, line: bytes) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, args=(self._lines,), name="log", daemon=True)
            self._thread.start()
        self._put_lines += 1
        self._put_bytes += len(line)
        self._lines.put(line)

    # ---- the thread

    def _run(self, lines: SimpleQueue[bytes]) -> None:
        while True:
            taken = [lines.get()]
            while len(taken) < MOST_AT_ONCE and not lines.empty():
                taken.append(lines.get())
            text = b"".join(taken)
            with contextlib.suppress(OSError):  # its reader is gone: there is nowhere to log it
                self._write(text)
            self._written_bytes += len(text)
            self._written_lines += len(taken)

    def _write(self, text: bytes) -> None:
        while text:
            try:
                text = text[os.write(self._descriptor, text) :]
            except BlockingIOError:  # somebody made it one that does not block
                select.select([], [self._descriptor], [], LOOK_AGAIN)
