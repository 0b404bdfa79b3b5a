"""Links between the members of a group that are all in this process."""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Collection

import pytest

from parallel.links import ucx_links
from parallel.links.native_links import NativeLinks, load, make_tcp_links
from parallel.links.python_links import PythonLinks
from parallel.links.sockets import GroupSockets

UCX_WAYS = {"UCX over TCP": ("lo", "tcp"), "UCX over shared memory": (None, "posix,sysv,cma,self")}
"""Devices and transports of UCX that every host has."""


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


def needs_ucx() -> None:
    """Skip the test where UCX is not installed."""
    why = ucx_links.why_not()
    if why is not None:
        pytest.skip(why)


def ucx_linked(size: int, way: str) -> list[ucx_links.UcxLinks]:
    """Links over UCX of all members of a group."""
    needs_ucx()
    library = ucx_links.load()
    links = [ucx_links.UcxLinks(library, rank, size, *UCX_WAYS[way]) for rank in range(size)]
    addresses = [each.worker_address for each in links]
    for each in links:
        each.connect(addresses)
    _wire_up(links)
    return links


def _wire_up(links: list[ucx_links.UcxLinks]) -> None:
    """Send a byte from each member to each, at which UCX connects.

    Both ends must go on for that.
    """
    size = len(links)
    pairs = [(one, other) for one in range(size) for other in range(size) if one != other]
    byte = ctypes.create_string_buffer(1)
    for one, other in pairs:
        links[one].post(other, [(ctypes.addressof(byte), 1)])
    missing = set(pairs)
    ends = time.monotonic() + 10.0
    while missing or not all(each.flush() for each in links):
        assert time.monotonic() < ends
        missing -= {pair for pair in missing if links[pair[1]].take(pair[0], ctypes.addressof(byte), 1)}
    for one, other in pairs:
        links[one].table.bytes_sent[other] = links[other].table.bytes_received[one] = 0
