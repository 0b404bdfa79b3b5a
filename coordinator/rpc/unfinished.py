"""Disconnects peers that send endless message parts, by TCP byte counts (Linux).

ZeroMQ hands out a message when all of its parts are there, and holds them until then without a limit. What
the kernel has received on a connection is compared with what it had received at the last whole message. A
peer that is far beyond the largest message is cut off. The listener looks only while the process grows, and
when no whole message waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator

import msgspec

from coordinator.own_memory import private_memory

GROWTH = 16 << 20
"""Growth of the process in bytes at which connections are examined."""
INTERVAL = 0.1
"""Seconds between two looks at the process's size: an idle step loop turns as often."""
MOST_TOGETHER = 256 << 20
"""Maximum bytes of unfinished messages over all peers; the largest are cut off."""
UNREAD = 8 << 20
"""Allowance in bytes for whole messages still in the kernel or ZeroMQ's thread."""
IDLE_RATE = 100
"""Bytes per second that a connection may receive without a message: ZeroMQ's own heartbeats."""

BYTES_RECEIVED = 128
"""Offset of the count of received bytes in Linux's ``tcp_info``."""
TCP_INFO_BYTES = 136


class Seen(msgspec.Struct):
    """State of a connection at its last whole message: bytes received, and time."""

    received: int = 0
    """Bytes."""
    at: float = 0.0


class Unfinished:
    """Unfinished messages on the connections of one listener."""

    def __init__(self, endpoint: str, max_bytes: int) -> None:
        """``max_bytes``: of a message."""
        port = endpoint.rpartition(":")[2]
        self._port = int(port) if endpoint.startswith("tcp://") and port.isdecimal() else None
        self._most = max_bytes + UNREAD
        self._began = self._looked = time.monotonic()
        self._level: int | None = None
        self._seen: dict[int, Seen] = {}
        """Connections by their socket's inode number: descriptors are used again."""

    def __repr__(self) -> str:
        return f"<Unfinished messages at port {self._port}, {len(self._seen)} connections known>"

    def note_whole(self, descriptor: int) -> None:
        """Record that a whole message came by ZeroMQ's descriptor, which may be closed."""
        if self._port is not None and descriptor >= 0:
            with contextlib.suppress(OSError), _connection(descriptor) as (inode, connection):
                self._seen[inode] = Seen(_received(connection), time.monotonic())

    def cut_floods(self) -> list[int]:
        """Cut off peers with too many bytes since their last whole message.

        Call it while no message waits. Returns the bytes of each. Costs next to nothing unless the process
        has grown.
        """
        now = time.monotonic()
        if self._port is None or now - self._looked < INTERVAL:
            return []
        self._looked = now
        size = private_memory()
        self._level = size if self._level is None else min(self._level, size)
        if size - self._level < GROWTH:
            return []
        self._level = size
        return self._cut(self._unfinished(now))

    def _unfinished(self, now: float) -> dict[int, tuple[int, int]]:
        """Bytes since the last whole message, and the inode, by descriptor. Closed descriptors are
        forgotten."""
        found: dict[int, tuple[int, int]] = {}
        seen: dict[int, Seen] = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError), _connection(int(name)) as (inode, connection):
                if connection.getsockname()[1] != self._port or not connection.getpeername():
                    continue
                last = seen[inode] = self._seen.get(inode) or Seen(0, self._began)
                number = _received(connection) - last.received - int(IDLE_RATE * (now - last.at))
                found[int(name)] = number, inode
        self._seen = seen
        return found

    def _cut(self, unfinished: dict[int, tuple[int, int]]) -> list[int]:
        together = sum(number for number, _ in unfinished.values() if number > 0)
        gone: list[int] = []
        for descriptor, (number, inode) in sorted(unfinished.items(), key=lambda item: -item[1][0]):
            if number <= self._most and together <= MOST_TOGETHER:
                break
            together -= number
            with contextlib.suppress(OSError), _connection(descriptor) as (same, connection):
                if same == inode:
                    _reset(connection)
                    gone.append(number)
        return gone


@contextlib.contextmanager
def _connection(descriptor: int) -> Iterator[tuple[int, socket.socket]]:
    """The TCP connection behind a descriptor, by one of our own, and its inode.

    Raises:
        OSError: it is none.
    """
    own = os.dup(descriptor)
    try:
        found = os.fstat(own)
        if not stat.S_ISSOCK(found.st_mode):
            raise OSError("no socket")
        connection = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            raise OSError("no connection over TCP")
        yield found.st_ino, connection


def _reset(connection: socket.socket) -> None:
    """End a connection at once, in both directions.

    After a mere shutdown its peer could go on sending.
    """
    nobody = struct.pack("=H14x", socket.AF_UNSPEC)
    if ctypes.CDLL(None).connect(connection.fileno(), nobody, len(nobody)) != 0:
        connection.shutdown(socket.SHUT_RDWR)


def _received(connection: socket.socket) -> int:
    """Bytes received by a connection since it was made.

    Raises:
        OSError: the system does not tell.
    """
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    if len(info) < TCP_INFO_BYTES:
        raise OSError("this kernel does not count")
    (number,) = struct.unpack_from("=Q", info, BYTES_RECEIVED)
    return int(number)
