"""Relay of messages to workers on other hosts, in a thread (no torch).

Both crews of several hosts have one: :mod:`engine.executor.nodes.driver` over ZeroMQ, and
:mod:`engine.executor.cluster.crew` over calls of Ray actors. What the loop does is theirs; its start, its end
and the ends of workers are here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from engine.executor.ends import RelayedWorker

logger = logging.getLogger(__name__)

END_TIMEOUT = 5.0
"""Seconds for the thread to start its loop, and again for its end."""


class Relay:
    """Thread that serves workers elsewhere until it is closed."""

    def __init__(
        self,
        name: str,
        serve: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
        failed: Callable[[Exception], None],
    ) -> None:
        """``serve`` runs in the thread's loop, until its event is set.

        ``failed`` is called in the thread if ``serve`` raises, which ends the thread.
        """
        self._serve, self._failed = serve, failed
        self.workers: list[RelayedWorker] = []
        """Workers elsewhere, whose ends are given up when the relay is closed."""
        self._closing = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runs = threading.Event()
        """Set when the loop runs, or has failed."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __repr__(self) -> str:
        return f"<Relay {self._thread.name} to {len(self.workers)} workers>"

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def call(self, what: Callable[[], None]) -> None:
        """Run a function in the thread's loop, if that has not ended."""
        if self._runs.wait(END_TIMEOUT) and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(what)

    def close(self, last: Callable[[], None] = lambda: None) -> None:
        """End the thread after a ``last`` call in its loop; free its workers' ends."""

        def close() -> None:
            last()
            self._closing.set()

        if self._thread.is_alive():
            self.call(close)
        if self._thread.ident is not None:
            self._thread.join(END_TIMEOUT)
        if not self._thread.is_alive():
            for worker in self.workers:
                worker.forget()
            self.workers.clear()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._run_loop())
        except Exception as error:  # noqa: BLE001 (the engine's thread must not wait for one that is gone)
            self._failed(error)
        finally:
            self._runs.set()

    async def _run_loop(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._runs.set()
        await self._serve(self._closing)
