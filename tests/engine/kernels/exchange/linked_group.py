"""Groups of members in threads, joined by sockets."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from parallel.communicators.mixed import MixedCommunicator
from parallel.communicators.network import NetworkCommunicator
from parallel.links.forming_group import FormingGroup
from parallel.links.meeting import MeetingHost
from tests.parallel.link_pairs import connected

PATIENCE = 60.0

LinkedMember = NetworkCommunicator | MixedCommunicator


def linked_group(
    size: int,
    *,
    hosts: Sequence[int] | None = None,
    timeout: float = PATIENCE,
    native: bool = True,
    streams: int = 1,
    send_buffer_bytes: int = 0,
) -> list[LinkedMember]:
    """All members of a new group.

    ``hosts``: those with equal numbers share memory. ``send_buffer_bytes``: of what the system keeps of a
    connection's outgoing bytes, about; 0: as it is.
    """
    sockets = connected(size, streams)
    for each in (stream for one in sockets for peer in one.data.values() for stream in peer):
        if send_buffer_bytes:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
    meeting = MeetingHost("127.0.0.1")

    def member(rank: int) -> LinkedMember:
        group = NetworkCommunicator(sockets[rank], rank, size, timeout=timeout, native=native)
        if hosts is None:
            return group
        forming = FormingGroup(meeting, rank, size, timeout=timeout)
        return MixedCommunicator(forming, group, host_name=f"host {hosts[rank]}")

    try:
        return of_all(size, member)
    finally:
        meeting.close()


def of_all(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Results of a function of all ranks, in threads."""
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(body, rank) for rank in range(size)]
        return [future.result(PATIENCE) for future in futures]
