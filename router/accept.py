"""How front ends share one listening socket evenly.

All wait on the same queue of connections, so that none is left behind in the queue of a process that died.
Left alone, whoever wakes up first would take all that is there, and its streams with it, should it die. So a
front end takes one connection at a time, and lets those with fewer open ones go first: it waits for a
moment, and if the connection is still there then (they are busy, or dead), takes it after all.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

COURTESY = 0.002
"""Seconds for which a connection is left to front ends with fewer."""
PAUSE = 0.5
"""Seconds without accepting after the system refused a connection (too many open files)."""
SLOT_BYTES = 4


class Tally:
    """Open connections of each front end, in memory that all of them share through a small file."""

    def __init__(self, file: Path, number: int, count: int) -> None:
        """``number`` of this front end among ``count``."""
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, count * SLOT_BYTES)
            self._slots = memoryview(mmap.mmap(descriptor, count * SLOT_BYTES)).cast("i")
        finally:
            os.close(descriptor)
        self._number = number
        self.tell(0)

    def __repr__(self) -> str:
        return f"<Tally of {self._number}: {self._slots.tolist()}>"

    def tell(self, num_connections: int) -> None:
        self._slots[self._number] = num_connections

    def is_ahead(self) -> bool:
        """Whether another front end has fewer."""
        return min(self._slots) < self._slots[self._number]


class Acceptor:
    """Accepts connections of one listening socket for one front end. Stands in for an ``asyncio.Server``."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[], asyncio.Protocol],
        num_connections: Callable[[], int],
        tally: Tally,
        backlog: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._listener = listener
        self._make_protocol = make_protocol
        self._num_connections = num_connections
        self._tally = tally
        self._tls = tls
        self._opening: set[asyncio.Task[object]] = set()
        self._loop = asyncio.get_running_loop()
        self._later: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        listener.listen(backlog)
        self._loop.add_reader(listener.fileno(), self._on_readable)

    def __repr__(self) -> str:
        return f"<Acceptor {self._tally!r}>"

    def close(self) -> None:
        """Take no more connections. The socket stays open."""
        if self._later is not None:
            self._later.cancel()
        self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        """Nothing is left to wait for: the server keeps its connections itself."""

    def _on_readable(self) -> None:
        self._tally.tell(self._num_connections() + len(self._opening))
        if self._tally.is_ahead():
            self._wait(COURTESY, self._after_courtesy)
        else:
            self._accept()

    def _after_courtesy(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._on_readable)
        self._accept()

    def _wait(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._later = self._loop.call_later(seconds, then)

    def _accept(self) -> None:
        """One connection, if another front end was not faster."""
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            logger.error("a connection cannot be accepted: %s", error)
            self._wait(PAUSE, self._after_courtesy)
            return
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._tls)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._on_opened)
        self._tally.tell(self._num_connections() + len(self._opening))

    def _on_opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            logger.debug("a connection broke before it was used: %s", error)
