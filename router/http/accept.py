"""Accepts connections evenly among routers, and no more than there are files for.

All routers wait on the same queue of connections, so that none is left behind in the queue of a process that
died. Without more, the first router to wake up would take all that is there, and all those streams would be
lost if it died. So a router takes one connection at a time, and lets those with fewer open ones go first. It
waits for a moment, and if the connection is still there then (they are busy, or dead), takes it after all.

A single router uses this, too: libuv closes connections that it has no file for, without a word. Here they
wait in the queue until others end, and some files are kept back for what requests need.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import mmap
import os
import resource
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

from coordinator.process.process import SHORTAGES
from coordinator.process.runtime import open_reserved
from coordinator.rpc.complaints import Complaints

logger = logging.getLogger(__name__)

COURTESY = 0.002
"""Seconds for which a connection is left to routers with fewer connections."""
PAUSE = 0.1
"""Seconds without accepting while there are no files for more connections."""
KEPT_FILES = 64
"""Files kept back from connections, at least: for instances that join, tokenizers, counts."""
KEPT_PART = 16
"""One in so many of all files is kept back, where that is more."""
UNLIMITED = 1 << 62
"""Files of a process that has no limit."""
MOST_AT_ONCE = 64
"""Most connections that a single router accepts in one turn of its loop."""
SLOT_BYTES = 4


def most_files(limit: int) -> int:
    """Files that may be open when one more connection is accepted. ``limit``: ``ulimit -n``."""
    if limit == resource.RLIM_INFINITY:
        return UNLIMITED
    return limit - min(max(KEPT_FILES, limit // KEPT_PART), limit // 4)


class Tally:
    """Open connections of each router, in memory shared through a small file."""

    def __init__(self, file: Path | None, number: int, count: int) -> None:
        """``number`` of this router among ``count``; a single one needs no ``file``.

        Raises:
            OSError: there is no space for the file.
        """
        if file is None:
            self._slots = memoryview(bytearray(count * SLOT_BYTES)).cast("i")
        else:
            self._slots = self._shared(file, count)
        self._number = number
        self.tell(0)

    @staticmethod
    def num_bytes(count: int) -> int:
        """Size of the file for so many routers."""
        return count * SLOT_BYTES

    @staticmethod
    def _shared(file: Path, count: int) -> memoryview[int]:
        descriptor = open_reserved(file, Tally.num_bytes(count))
        try:
            return memoryview(mmap.mmap(descriptor, Tally.num_bytes(count))).cast("i")
        finally:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"<Tally of {self._number}: {self._slots.tolist()}>"

    @property
    def is_alone(self) -> bool:
        """Whether there is no other router."""
        return len(self._slots) == 1

    def tell(self, num_connections: int) -> None:
        self._slots[self._number] = num_connections

    def is_ahead(self) -> bool:
        """Whether another router has fewer connections."""
        return min(self._slots) < self._slots[self._number]


class Acceptor:
    """Accepts connections of one listening socket for one router. Stands in for an ``asyncio.Server``."""

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
        self._most_files = most_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._newest_file = 0
        self._refusals = Complaints(logger, "connections wait until others end")
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
        """Return at once, since the server keeps its connections itself."""

    def _on_readable(self) -> None:
        if self._tally.is_alone:
            for _ in range(MOST_AT_ONCE):
                if not self._accept():
                    return
            return
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

    def _accept(self) -> bool:
        """Accept one connection, if no other router was faster and a file is free.

        Returns whether it did.
        """
        try:
            if not self._has_room():
                self._pause(SHORTAGES[errno.EMFILE])
                return False
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            self._pause(SHORTAGES.get(error.errno or 0, error.strerror or str(error)))
            return False
        self._newest_file = connection.fileno()
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opening: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(self._make_protocol, connection, ssl=self._tls)
        )
        self._opening.add(opening)
        opening.add_done_callback(self._on_opened)
        self._tally.tell(self._num_connections() + len(self._opening))
        return True

    def _pause(self, why: str) -> None:
        self._refusals.add(why)
        self._wait(PAUSE, self._after_courtesy)

    def _has_room(self) -> bool:
        """Whether enough file descriptors are left for a connection.

        A new file gets the lowest free number, which shows how many are open. They are counted only once the
        newest connection had a high number.
        """
        if self._newest_file < self._most_files:
            return True
        self._newest_file = os.dup(self._listener.fileno())
        os.close(self._newest_file)
        return self._newest_file < self._most_files

    def _on_opened(self, opening: asyncio.Task[object]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled() and (error := opening.exception()) is not None:
            logger.debug("a connection broke before it was used: %s", error)
