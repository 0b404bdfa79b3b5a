"""Links between the members of a group that are all in this process."""

from __future__ import annotations

import socket
from collections.abc import Collection

from parallel.communicators.native_links import NativeLinks, load, make_tcp_links
from parallel.communicators.python_links import PythonLinks
from parallel.links.sockets import GroupSockets


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setblocking(False)
    return one, other


def connected(size: int, streams: int = 1) -> list[GroupSockets]:
    """Sockets of all members of a group."""
    groups = [GroupSockets({}, {}) for _ in range(size)]
    for one in range(size):
        for other in range(one):
            pairs = [socket_pair() for _ in range(streams)]
            groups[one].data[other], groups[other].data[one] = [a for a, _ in pairs], [b for _, b in pairs]
            groups[one].control[other], groups[other].control[one] = socket_pair()
    return groups


def linked(
    size: int, streams: int = 1, in_python: Collection[int] = ()
) -> list[NativeLinks] | list[PythonLinks]:
    """Links of all members of a group: native, but for those of these ranks."""
    library = load()
    assert library is not None
    links = []
    for rank, sockets in enumerate(connected(size, streams)):
        for each in sockets.control.values():
            each.close()
        if rank in in_python:
            links.append(PythonLinks(rank, size, sockets.data))
        else:
            links.append(make_tcp_links(library, rank, size, sockets.data))
    return links
