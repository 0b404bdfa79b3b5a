"""A thread with a large stack, for libraries that recurse into what clients send."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")

STACK_BYTES = 256 << 20
"""Bytes of the thread's stack.

Pages that were never touched cost nothing; touched pages are held until the thread ends.
"""

IDLE = 10.0
"""Seconds without a task after which the thread ends."""

_starting = threading.Lock()
"""Held while a thread starts: the size of new stacks is the whole process's."""


class DeepThread:
    """Runs tasks one after another in a thread with a deep stack.

    The thread starts with the first task, and ends after :data:`IDLE` seconds without one.
    """

    def __init__(self, name: str, *, on_idle: Callable[[], None] = lambda: None) -> None:
        """``on_idle``: called by the thread before it ends."""
        self._name = name
        self._on_idle = on_idle
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"<DeepThread {self._name}, {self.num_waiting} tasks>"

    @property
    def num_waiting(self) -> int:
        """Tasks that have not begun."""
        return self._tasks.qsize()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Queue work; may be called from any thread."""
        future: Future[Result] = Future()
        self._tasks.put((future, work))
        with _starting:
            if self._thread is None:
                before = threading.stack_size(STACK_BYTES)
                try:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                finally:
                    threading.stack_size(before)
        return future

    def _run(self) -> None:
        while True:
            try:
                future, work = self._tasks.get(timeout=IDLE)
            except Empty:
                self._on_idle()
                if self._ends():
                    return
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (handed to the caller; a panic of Rust is no Exception)
                future.set_exception(error)
            del future, work  # what they hold is not kept until the next task

    def _ends(self) -> bool:
        """Whether the thread ends now, since no task has come meanwhile."""
        with _starting:
            if self._tasks.empty():
                self._thread = None
        return self._thread is None
