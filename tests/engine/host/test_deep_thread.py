from __future__ import annotations

import ctypes
import sys
import threading
import time

import pytest

from coordinator.own_memory import private_memory
from engine.host import deep_thread
from engine.host.deep_thread import DeepThread
from tests.waiting import until


class Panic(BaseException):
    """A panic as pyo3 raises it, which is no Exception."""


def panic() -> None:
    raise Panic("in Rust")


def test_a_panic_reaches_the_caller_that_waits_and_not_the_next() -> None:
    thread = DeepThread("test")
    failed, after = thread.submit(panic), thread.submit(lambda: 7)
    with pytest.raises(Panic):
        failed.result(10)
    assert after.result(10) == 7


def test_an_idle_thread_ends_and_the_next_task_starts_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_thread, "IDLE", 0.05)
    idle = []
    thread = DeepThread("test", on_idle=lambda: idle.append(True))
    first = thread.submit(threading.current_thread).result(10)
    until(lambda: not first.is_alive())
    assert idle == [True]
    assert thread.submit(threading.current_thread).result(10) is not first


def test_what_a_deep_recursion_took_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of the stack: the library descends into what clients send."""
    monkeypatch.setattr(deep_thread, "IDLE", 0.05)
    thread = DeepThread("test")
    before = private_memory()
    size, ran = thread.submit(lambda: (descend(20_000), threading.current_thread())).result(20)
    assert size - before > 16 << 20
    until(lambda: not ran.is_alive())
    until(lambda: private_memory() - before < 8 << 20)


def test_threads_that_start_at_once_leave_others_their_stacks(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, set_size = threading.stack_size(), threading.stack_size

    def set_slowly(size: int) -> int:
        before = set_size(size)
        time.sleep(0.1)
        return before

    monkeypatch.setattr(threading, "stack_size", set_slowly)
    callers = [
        threading.Thread(target=DeepThread(name).submit, args=(threading.current_thread,)) for name in "ab"
    ]
    for caller in callers:
        caller.start()
        time.sleep(0.05)  # so the second would find, and put back, the size of the first
    for caller in callers:
        caller.join()
    assert set_size(usual) == usual


def descend(depth: int) -> int:
    """Bytes of the process at this depth of C calls."""
    call = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)

    def deeper(left: int) -> int:
        return private_memory() if left == 0 else step(left - 1)

    step = call(deeper)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(10 * depth)
    try:
        return int(step(depth))
    finally:
        sys.setrecursionlimit(limit)
