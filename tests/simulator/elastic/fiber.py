"""Code that blocks, in a simulator: a thread that runs while the simulator waits.

So a schedule stays one sequence of events, and a seed stays a schedule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Ended(BaseException):
    """Raised inside where it waits: the schedule is over."""


class Fiber:
    """A function that waits in the middle, and goes on when it is given something."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._inside, self._outside = threading.Lock(), threading.Lock()
        self._inside.acquire()
        self._outside.acquire()
        self._given: object = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def go_on(self, given: object = None) -> None:
        """Run until it waits again; it raises ``given`` inside if that is an exception.

        Raises:
            BaseException: what it does not catch.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        self._given = given
        self._inside.release()
        self._outside.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def wait(self) -> Any:
        """Inside: let the simulator go on; returns what it gives next."""
        self._outside.release()
        self._inside.acquire()
        if isinstance(self._given, BaseException):
            raise self._given
        return self._given

    def close(self) -> None:
        """End the thread, where it waits."""
        if self._thread is not None and self._thread.is_alive():
            self.go_on(Ended())
            self._thread.join()

    def _run(self) -> None:
        self._inside.acquire()
        try:
            self._work()
        except Ended:
            pass
        except BaseException as error:  # noqa: BLE001 (raised again outside)
            self._error = error
        self._outside.release()
