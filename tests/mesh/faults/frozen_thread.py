"""One thread of a process is stopped, others run: like hangs in native code.

A signal stops all threads; ptrace stops one.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

PTRACE_CONT, PTRACE_SEIZE, PTRACE_INTERRUPT = 7, 0x4206, 0x4207
PTRACE_O_EXITKILL = 0x100000
"""Option: the traced process ends with this one."""
WALL = 0x40000000
"""Option of waitpid: threads that are no children are waited for, too."""

TRIES = 30
LOOK_SECONDS = 3.0
"""Seconds in which a process whose other threads run reports the frozen one."""


class FrozenThread:
    """The main thread of a process, stopped for good."""

    def __init__(self, pid: int, stalled_for: Callable[[], float]) -> None:
        """Freeze the main thread of process ``pid``; returns once it stands still.

        ``stalled_for``: seconds for which that thread has done nothing, as the process's other threads report. They
        report nothing if it was stopped while it held Python's lock: it is then resumed, and stopped again.
        """
        self._pid = pid
        self._stalled_for = stalled_for
        self._stands = threading.Event()
        self._problem: Exception | None = None
        self._status: int | None = None
        self._thread = threading.Thread(target=self._trace, name="tracer", daemon=True)
        self._thread.start()  # all calls must come from one thread
        assert self._stands.wait(TRIES * LOOK_SECONDS)
        if self._problem is not None:
            raise self._problem

    @property
    def status(self) -> int:
        """Exit status of the process once it has ended, as in ``subprocess``."""
        self._thread.join(60)
        assert self._status is not None, "it has not ended"
        return self._status

    def _trace(self) -> None:
        try:
            self._freeze()
        except Exception as error:  # noqa: BLE001 (raised where it is waited for)
            self._problem = error
        self._stands.set()
        if self._problem is None:
            _, status = os.waitpid(self._pid, WALL)  # its parent hears of its end when we have
            while os.WIFSTOPPED(status):  # a signal, or the beginning of its end
                _, status = os.waitpid(self._pid, WALL)
            self._status = os.waitstatus_to_exitcode(status)

    def _freeze(self) -> None:
        _ptrace(PTRACE_SEIZE, self._pid, PTRACE_O_EXITKILL)
        for _ in range(TRIES):
            _ptrace(PTRACE_INTERRUPT, self._pid)
            _, status = os.waitpid(self._pid, WALL)
            assert os.WIFSTOPPED(status), "it has ended"
            if self._others_go_on():
                return
            _ptrace(PTRACE_CONT, self._pid)
            time.sleep(0.01)
        raise AssertionError(f"process {self._pid} has Python's lock whenever it is stopped")

    def _others_go_on(self) -> bool:
        """Whether the process's other threads report more than once that the frozen one does nothing.

        A single report may be old, from the stop before.
        """
        deadline = time.monotonic() + LOOK_SECONDS
        last, times = self._stalled_for(), 0
        while time.monotonic() < deadline:
            now = self._stalled_for()
            if now > last:
                last, times = now, times + 1
                if times > 1 and now > 1.0:
                    return True
            time.sleep(0.1)
        return False


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    library.ptrace.restype = ctypes.c_long
    if library.ptrace(request, pid, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace request {request:#x}: {os.strerror(number)}")
