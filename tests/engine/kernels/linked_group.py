"""Groups of members in threads, joined by nothing but sockets, for tests of the native step."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence

import numpy as np

from parallel.communicators import native_links
from parallel.communicators.base import CollectiveError
from parallel.communicators.shared_memory import SharedMemoryCommunicator


class LinkedMember:
    """One end of such a group: its links, headers over them, and a deadline."""

    def __init__(self, rank: int, links: native_links.NativeLinks, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, links.size, timeout
        self.links = links
        self.links_address = links.address
        self.hosts: Sequence[int] = range(self.size)
        self.local: SharedMemoryCommunicator | None = None
        self.is_crowded = False
        self.reason: str | None = None
        self._call, self._deadline = "", 0.0

    def on_hosts(self, hosts: Sequence[int], local: SharedMemoryCommunicator | None) -> LinkedMember:
        """The same, where members with equal numbers share the memory of ``local``."""
        self.hosts, self.local = tuple(hosts), local
        return self

    def all_gather_ints(self, row: Sequence[int]) -> list[list[int]]:
        mine = np.array(row, dtype=np.int64)
        rows = [mine.copy() for _ in range(self.size)]
        for peer in range(self.size):
            if peer != self.rank:
                assert self.links.post(peer, [(mine.ctypes.data, mine.nbytes)]) == 0
        for peer in range(self.size):
            while peer != self.rank and self.links.take(peer, rows[peer].ctypes.data, mine.nbytes) != 1:
                self.links.flush()
                self.links.sleep(0.01)
        return [each.tolist() for each in rows]

    def begin_exchange(self, call: str) -> None:
        if self.reason is not None:
            raise CollectiveError(f"{call}: {self.reason}", None, "aborted")
        self._call, self._deadline = call, time.monotonic() + self.timeout

    def check_exchange(self, rank: int, has_arrived: Callable[[], bool]) -> None:
        if self.reason is not None:
            raise CollectiveError(f"{self._call}: {self.reason}", None, "aborted")
        if self.links.broken is not None:
            raise CollectiveError(
                f"{self._call}: rank {self.links.broken.peer} has died", self.links.broken.peer, "closed"
            )
        if time.monotonic() > self._deadline and not has_arrived():
            self.abort()
            raise CollectiveError(f"{self._call}: rank {rank} did not come within", rank, "deadline")

    def abort(self) -> None:
        self.reason = "it was aborted"
        self.links.abort()

    def close(self) -> None:
        self.links.close()


def linked_members(size: int, timeout: float = 60.0, streams: int = 1) -> list[LinkedMember]:
    """All members of a new group over socket pairs on loopback."""
    library = native_links.load()
    assert library is not None
    data: list[dict[int, list[socket.socket]]] = [{} for _ in range(size)]
    listener = socket.create_server(("127.0.0.1", 0))
    for low in range(size):
        for high in range(low + 1, size):
            for _ in range(streams):
                one = socket.create_connection(listener.getsockname())
                other, _ = listener.accept()
                for each in (one, other):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    each.setblocking(False)
                data[low].setdefault(high, []).append(one)
                data[high].setdefault(low, []).append(other)
    listener.close()
    return [
        LinkedMember(rank, native_links.make_tcp_links(library, rank, size, data[rank]), timeout)
        for rank in range(size)
    ]
