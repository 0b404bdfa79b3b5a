"""Thread pools for requests with large bodies, so that the event loop stays free.

Tokenising takes 150 bytes of memory per byte of text, and seconds for megabytes. Very long texts have
a thread of their own, so that shorter ones do not wait behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from engine.host.memory import return_freed_memory
from router.errors import ApiError

LARGE_BODY = 50_000
"""Body size in bytes from which work runs in a thread."""
VERY_LARGE_BODY = 1 << 20
"""Body size in bytes above which one request is worked on at a time."""
LARGE_AT_ONCE = 4
"""Requests over ``LARGE_BODY`` that are worked on at once, each in a thread."""
IMAGES_AT_ONCE = 4
"""Requests worked on at once where images may come."""
IMAGES_ELSEWHERE, VERY_LARGE_ELSEWHERE = 64, 32
"""Requests that leave their place at once, see :func:`elsewhere`; further ones keep it."""
MOST_LARGE_WAITING = 512
"""Waiting requests over ``LARGE_BODY``; more are refused with 503."""
MOST_VERY_LARGE_WAITING = 16
"""Waiting requests over ``VERY_LARGE_BODY``; more are refused with 503."""

Result = TypeVar("Result")


class BoundedThreads:
    """Thread pool with a bounded queue of waiting requests."""

    def __init__(
        self,
        name: str,
        at_once: int,
        most_waiting: int,
        most_elsewhere: int = 0,
        *,
        returns_memory: bool = False,
    ) -> None:
        """``most_elsewhere``: requests at once that wait for something else, see :func:`elsewhere`.

        ``returns_memory``: after each work. The C library would keep it for each thread by itself.
        """
        self._threads = ThreadPoolExecutor(at_once + most_elsewhere, thread_name_prefix=name)
        self._most = at_once + most_waiting
        self._taken = threading.BoundedSemaphore(self._most)
        self._at_work = threading.BoundedSemaphore(at_once)
        self._elsewhere = threading.BoundedSemaphore(most_elsewhere)
        self._returns_memory = returns_memory

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do work in a thread; wait for one if all are taken.

        Raises:
            ApiError: too many wait (503).
        """
        if not self._taken.acquire(blocking=False):
            message = "Too many long requests wait to be tokenised; try again in a few seconds."
            raise ApiError(503, message, headers={"retry-after": "5"})
        given_up = threading.Event()
        future = self._threads.submit(contextvars.copy_context().run, self._do, work, given_up)
        future.add_done_callback(self._leave)  # one that is cancelled while it runs leaves at its end
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            given_up.set()
            raise

    def _do(self, work: Callable[[], Result], given_up: threading.Event) -> Result:
        with self._at_work:
            if given_up.is_set():  # while it had a thread, and no place yet
                raise CancelledError
            _own.threads = self
            try:
                return work()
            finally:
                _own.threads = None
                if self._returns_memory:
                    return_freed_memory()  # 12 ms

    @contextlib.contextmanager
    def _being_elsewhere(self) -> Iterator[None]:
        if not self._elsewhere.acquire(blocking=False):
            yield  # and keeps its place at work
            return
        self._at_work.release()
        self._taken.release()
        try:
            yield
        finally:
            self._taken.acquire()
            self._at_work.acquire()
            self._elsewhere.release()

    def _leave(self, future: Future[Any]) -> None:
        self._taken.release()


class _Own(threading.local):
    """The pool that a thread belongs to."""

    threads: BoundedThreads | None = None
    """None: it belongs to no pool."""


_own = _Own()


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Let others work while this request waits for a URL or another process."""
    threads = _own.threads
    with contextlib.nullcontext() if threads is None else threads._being_elsewhere():
        yield


_large = BoundedThreads("large", LARGE_AT_ONCE, MOST_LARGE_WAITING)
_images = BoundedThreads("images", IMAGES_AT_ONCE, MOST_LARGE_WAITING, IMAGES_ELSEWHERE)
_very_large = BoundedThreads(
    "very-large", 1, MOST_VERY_LARGE_WAITING, VERY_LARGE_ELSEWHERE, returns_memory=True
)


async def run_sized(work: Callable[[], Result], size: int, *, waits: bool = False) -> Result:
    """Do work in a thread for a large body, else at once; ``size`` in bytes.

    ``waits``: in a thread in every case, since it may wait for others.

    Raises:
        ApiError: it would have to wait for too many others (503).
    """
    if waits and size <= VERY_LARGE_BODY:
        return await _images.run(work)
    if size <= LARGE_BODY:
        return work()
    return await (_large if size <= VERY_LARGE_BODY else _very_large).run(work)
