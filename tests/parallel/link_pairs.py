"""Links between the members of a group that are all in this process."""

from __future__ import annotations

import socket

from parallel.communicators.native_links import NativeLinks, load, make_tcp_links


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for each in (one, other):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        each.setblocking(False)
    return one, other


def linked(size: int, streams: int = 1) -> list[NativeLinks]:
    """Native links of all members of a group."""
    library = load()
    assert library is not None
    data: list[dict[int, list[socket.socket]]] = [{} for _ in range(size)]
    for one in range(size):
        for other in range(one):
            pairs = [socket_pair() for _ in range(streams)]
            data[one][other], data[other][one] = [a for a, _ in pairs], [b for _, b in pairs]
    return [make_tcp_links(library, rank, size, sockets) for rank, sockets in enumerate(data)]
