"""Background work of a serving instance, at lower priority than its steps."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

NICENESS = 10
"""Added niceness of background threads: a tenth of a core beside busy ones."""
LEAST_PRIORITY = 19
"""Lowest thread priority: the greatest niceness of Linux."""
SWITCH_INTERVAL = 0.0001
"""Seconds after which a thread that runs Python lets another go on.

By default that is 5 ms, which is as long as a step.
"""

CHORE_PAUSE = 0.03
"""Pause before each background job, in seconds."""
RELEASE_DELAY = 0.25
"""Seconds until memory is given back, after the first steps in a new group."""

SHARE_BESIDE_STEPS = 0.12
"""Share of a core for preparing new weights while steps run.

If steps stood still whenever it works, they would take 1 / (1 - 0.12) of their time: 14 % more.
"""
SLICE = 0.001
"""Seconds of such work after which it pauses."""
LONGEST_REST = 0.5
"""Longest pause of such work, in seconds."""
STEPS_RECENT = 1.0
"""Seconds after a step began for which steps count as running."""

Result = TypeVar("Result")


def be_nicer(niceness: int = NICENESS) -> None:
    """Lower the priority of the calling thread and of those that it starts."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        nicer = min(LEAST_PRIORITY, os.getpriority(os.PRIO_PROCESS, thread) + niceness)
        os.setpriority(os.PRIO_PROCESS, thread, nicer)


def beside_steps(work: Callable[[], Result]) -> Result:
    """Run a function in a low-priority thread, and wait for its result.

    Threads that it starts have as little. So it should start none that go on behind it.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    future: Future[Result] = Future()

    def run() -> None:
        be_nicer()
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (raised by the caller)
            future.set_exception(error)

    threading.Thread(target=run, name="background", daemon=True).start()
    return future.result()


class Pace:
    """Share of a core that background work takes while steps run."""

    def __init__(self, num_steps: Callable[[], int], share: float = SHARE_BESIDE_STEPS) -> None:
        """``num_steps``: steps that were begun so far; called from any thread."""
        self._num_steps = num_steps
        self._share = share
        self._seen = num_steps()
        self._stepped_at = -STEPS_RECENT
        """When a step was last seen to have begun."""
        self._owed = 0.0
        """Seconds of pauses that are still to come."""
        self._used = time.thread_time()

    def __repr__(self) -> str:
        return f"<Pace {self._share:.0%} of a core>"

    def rest(self) -> None:
        """Sleep after a slice of work, if steps run; called often, in one thread."""
        worked = (now := time.thread_time()) - self._used
        if worked < SLICE:
            return
        self._used, moment = now, time.monotonic()
        if (count := self._num_steps()) != self._seen:
            self._seen, self._stepped_at = count, moment
        if moment - self._stepped_at >= STEPS_RECENT:
            self._owed = 0.0
            return
        self._owed += worked * (1 / self._share - 1)
        pause = min(self._owed, LONGEST_REST)
        self._owed -= pause
        time.sleep(pause)


class Chores:
    """Background thread that runs small jobs in order, outside the step loop.

    To start a thread takes as long as a step where cores are busy, so there is one for all. It pauses before
    each, so that no step has more than one beside it.
    """

    def __init__(self, name: str, pause: float = CHORE_PAUSE) -> None:
        self._pause = pause
        self._closing = threading.Event()
        self._waiting: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], object]) -> None:
        """Queue a job; from any thread."""
        self._waiting.put(work)

    def close(self, patience: float = 2.0) -> None:
        """Stop the thread after the jobs already queued."""
        self._closing.set()
        self._waiting.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        while (work := self._waiting.get()) is not None:
            self._closing.wait(self._pause)
            try:
                work()
            except Exception:
                logger.exception("%s: something was not done", self._thread.name)


class _Released:
    """Tensors, and their holders, whose memory a thread gives back after a while."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[tuple[float, list[Any]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, tensors: list[Any]) -> None:
        self._waiting.put((time.monotonic() + RELEASE_DELAY, tensors))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="letting-go", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        import torch

        while True:
            at, tensors = self._waiting.get()
            time.sleep(max(0.0, at - time.monotonic()))
            with torch.inference_mode():
                while tensors:
                    dropped = tensors.pop()
                    if isinstance(dropped, torch.Tensor):
                        dropped.set_()  # its memory goes without the lock of the interpreter
                    del dropped


_released = _Released()


def drop_later(objects: list[Any]) -> None:
    """Drop objects that hold much memory, in another thread.

    The caller keeps none of them.
    """
    _released.put(objects)


def let_go(tensors: list[Any]) -> None:
    """Give back the memory of torch's tensors, which nobody uses any more, soon.

    To unmap hundreds of megabytes takes as long as a step, and threads that map memory meanwhile wait for it.
    So that is not done where one placement of experts takes the place of another. Tensors on devices go at
    once.
    """
    if any(tensor.device.type == "cpu" for tensor in tensors):
        _released.put(tensors)
