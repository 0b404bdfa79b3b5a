"""One thread of a process is stopped, others run: like hangs in native code.

A signal stops all threads; ptrace stops one.
"""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

PTRACE_CONT, PTRACE_SEIZE, PTRACE_INTERRUPT = 7, 0x4206, 0x4207
PTRACE_O_EXITKILL = 0x100000
"""Option: the traced process ends with this one."""
WALL = 0x40000000
"""Option of waitpid: threads that are no children are waited for, too."""

TRIES = 10
LOOK_SECONDS = 3.0
"""Seconds in which a process whose other threads run reports the frozen one."""


CATCHES = 300
"""Stops until one finds the thread in native code.

It is there for a good part of each step.
"""
NATIVE = "/kernels/step-"
"""Part of the path of compiled kernels, which run without Python's lock."""


class FrozenThread:
    """The main thread of a process, stopped for good."""

    def __init__(self, pid: int, stalled_for: Callable[[], float]) -> None:
        """Freeze the main thread of process ``pid``; returns once it stands still.

        ``stalled_for``: seconds for which that thread has done nothing, as the process's other threads report. They
        report nothing if it was stopped while it held Python's lock: so it is stopped in compiled kernels, where there
        are any. It is resumed and stopped again if they report nothing all the same.
        """
        self._pid = pid
        self._stalled_for = stalled_for
        self._stands = threading.Event()
        self._problem: Exception | None = None
        self._status: int | None = None
        self._thread = threading.Thread(target=self._trace, name="tracer", daemon=True)
        self._thread.start()  # all calls must come from one thread
        assert self._stands.wait(2 * TRIES * LOOK_SECONDS)
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
            self._stop_in_native_code()
            if self._others_go_on():
                return
            self._let_go_on()
        raise AssertionError(f"process {self._pid} has Python's lock whenever it is stopped")

    def _stop_in_native_code(self) -> None:
        code = native_code(self._pid)
        for _ in range(CATCHES):
            _ptrace(PTRACE_INTERRUPT, self._pid)
            _, status = os.waitpid(self._pid, WALL)
            assert os.WIFSTOPPED(status), "it has ended"
            if not code or any(counter_of(self._pid) in each for each in code):
                return
            self._let_go_on()
        raise AssertionError(f"process {self._pid} is never found in its kernels")

    def _let_go_on(self) -> None:
        """Resume it for a random time, so that it stops at another place."""
        _ptrace(PTRACE_CONT, self._pid)
        time.sleep(random.uniform(0.001, 0.02))

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


def native_code(pid: int) -> list[range]:
    """Where a process has mapped compiled kernels; nowhere without a compiler."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    bounds = [line.split()[0].split("-") for line in lines if NATIVE in line]
    return [range(int(begin, 16), int(end, 16)) for begin, end in bounds]


def counter_of(pid: int) -> int:
    """Address of the next instruction of a main thread that stands still."""
    return int(Path(f"/proc/{pid}/task/{pid}/syscall").read_text().split()[-1], 16)


def _ptrace(request: int, pid: int, data: int = 0) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    library.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    library.ptrace.restype = ctypes.c_long
    if library.ptrace(request, pid, None, data) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"ptrace request {request:#x}: {os.strerror(number)}")
