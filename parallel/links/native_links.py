"""Links between members as native code calls them: the table of ``native/links.hpp``.

This module loads no torch.

``native/tcp_links.cpp`` fills the table for TCP sockets. A pipe to a peer that has several sockets is striped
over them by position: bytes [k * STRIPE_BYTES, (k + 1) * STRIPE_BYTES) go over socket k modulo their number.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from parallel.compiler import INCLUDE
from parallel.native_source import NativeLibrary, NativeSource

OFF = "LOCKSTEP_NATIVE_COLLECTIVES"
"""Environment variable; 0 selects collectives in Python."""
SLOWER = "; Python does the same, slower"
"""End of the log line about native collectives or links that cannot be compiled."""
STRIPE_BYTES = 256 << 10
"""Bytes in a row of a pipe that go over one of several sockets."""

_Int, _Address = ctypes.c_int64, ctypes.c_void_p


class Part(ctypes.Structure):
    """The struct ``LinksPart``: memory to send."""

    _fields_ = (("data", _Address), ("num_bytes", _Int))


class LinksTable(ctypes.Structure):
    """The struct ``Links``; its functions run without the interpreter's lock."""

    _fields_ = (
        ("self", _Address),
        ("rank", _Int),
        ("size", _Int),
        ("post", ctypes.CFUNCTYPE(_Int, _Address, _Int, ctypes.POINTER(Part), _Int)),
        ("take", ctypes.CFUNCTYPE(_Int, _Address, _Int, _Address, _Int)),
        ("flush", ctypes.CFUNCTYPE(_Int, _Address, _Int)),
        ("sleep", ctypes.CFUNCTYPE(_Int, _Address, ctypes.c_double)),
        ("abort", ctypes.CFUNCTYPE(None, _Address)),
        ("broken_peer", _Int),
        ("broken_error", _Int),
        ("bytes_sent", ctypes.POINTER(_Int)),
        ("bytes_received", ctypes.POINTER(_Int)),
        ("seconds_waited", ctypes.POINTER(ctypes.c_double)),
    )


SOURCE = NativeSource(
    path=INCLUDE / "tcp_links.cpp",
    headers=(INCLUDE / "links.hpp",),
    structs={"links": LinksTable},
    keeps_errno=True,
    off=OFF,
    absent="native links: off,",
    instead=SLOWER,
)


class BrokenLink(NamedTuple):
    """What broke a group's links first."""

    peer: int | None
    """None: no peer did, the links were aborted."""
    error: int
    """The errno; 0: the peer closed its end."""


class NativeLinks:
    """One member's table of links, with the sockets that it uses.

    Calls come from one thread; only :meth:`abort` may come from another.
    """

    def __init__(
        self, address: int, release: Callable[[int], object], sockets: Sequence[socket.socket] = ()
    ) -> None:
        """``address`` is that of a table; ``release`` frees it, before the sockets are closed."""
        self.address = address
        """Address of the table, for native code; 0 after :meth:`close`."""
        self.table = LinksTable.from_address(address)
        self.rank, self.size = int(self.table.rank), int(self.table.size)
        self._release = release
        self._sockets = list(sockets)
        self._lock = threading.RLock()  # abort may come from a signal handler
        self._last = [0] * self.size, [0] * self.size, [0.0] * self.size

    def __repr__(self) -> str:
        standing = "closed" if not self.address else "broken" if self.broken else "open"
        return f"<NativeLinks rank {self.rank} of {self.size}, {standing}>"

    @property
    def broken(self) -> BrokenLink | None:
        """What broke the links first, as far as calls have noticed."""
        with self._lock:
            if not self.address or (self.table.broken_peer < 0 and not self.table.broken_error):
                return None
            peer = self.table.broken_peer
            return BrokenLink(peer if peer >= 0 else None, self.table.broken_error)

    @property
    def bytes_sent(self) -> list[int]:
        """Bytes given to the system for each peer."""
        return self._counters()[0]

    @property
    def bytes_received(self) -> list[int]:
        """Bytes that came from each peer."""
        return self._counters()[1]

    @property
    def seconds_waited(self) -> list[float]:
        """Seconds for which calls have waited for each peer."""
        return self._counters()[2]

    def _counters(self) -> tuple[list[int], list[int], list[float]]:
        """All counters by peer; after :meth:`close` as they were then."""
        with self._lock:
            if self.address:
                table, size = self.table, self.size
                self._last = table.bytes_sent[:size], table.bytes_received[:size], table.seconds_waited[:size]
            return self._last

    def post(self, peer: int, parts: Sequence[tuple[int, int]]) -> int:
        """Queue memory (address, bytes) for a peer; see ``links.hpp``."""
        return int(
            self.table.post(
                self.table.self, peer, (Part * len(parts))(*(Part(*part) for part in parts)), len(parts)
            )
        )

    def take(self, peer: int, address: int, num_bytes: int) -> int:
        """Receive from a peer; see ``links.hpp``."""
        return int(self.table.take(self.table.self, peer, address, num_bytes))

    def flush(self, peer: int = -1) -> int:
        """Send what is queued for a peer, or for all; see ``links.hpp``."""
        return int(self.table.flush(self.table.self, peer))

    def sleep(self, seconds: float) -> int:
        """Sleep until a link can go on; see ``links.hpp``."""
        return int(self.table.sleep(self.table.self, seconds))

    def add_wait(self, peer: int, seconds: float) -> None:
        """Count seconds for which a call of Python has waited for a peer."""
        self.table.seconds_waited[peer] += seconds

    def abort(self) -> None:
        """Make this and every later call fail; safe from any thread, and when called twice."""
        with self._lock:
            if self.address:
                self.table.abort(self.table.self)

    def close(self) -> None:
        """Release the table and close its sockets, after the last call.

        What is queued is dropped.
        """
        self._counters()
        with self._lock:
            address, self.address = self.address, 0
            if address:
                del self.table
                self._release(address)
        for each in self._sockets:
            each.close()


class TcpLibrary:
    """The compiled links over TCP."""

    def __init__(self, opened: NativeLibrary) -> None:
        self.make: Any = opened.bind("tcp_links", _Int, _Int, _Address, _Int)
        self.free: Any = opened.bind("tcp_links_free", _Int, result=None)


@cache
def load() -> TcpLibrary | None:
    """The compiled links, built first if need be; None where that fails.

    The reason is logged once.
    """
    return SOURCE.load(TcpLibrary)


def make_tcp_links(
    library: TcpLibrary, rank: int, size: int, data: Mapping[int, Sequence[socket.socket]]
) -> NativeLinks:
    """Links over connected sockets, which belong to what is returned.

    ``data`` has equally many sockets to each other rank, in the order that the peer has them, too.

    Raises:
        OSError: there are no file descriptors left.
        ValueError: a peer is missing, or has another number of sockets.
    """
    streams = max((len(sockets) for sockets in data.values()), default=1)
    fds = (_Int * (size * streams))()
    for peer in range(size):
        if peer == rank:
            continue
        sockets = data.get(peer, ())
        if len(sockets) != streams or not streams:
            raise ValueError(f"rank {peer} has {len(sockets)} sockets, and others {streams}")
        for number, each in enumerate(sockets):
            fds[peer * streams + number] = each.fileno()
    address = library.make(rank, size, fds, streams)
    if not address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return NativeLinks(address, library.free, [each for sockets in data.values() for each in sockets])
