"""Forming the groups of an epoch: a rendezvous store, then one communicator per group.

Torch is loaded late.

The store is needed only until a group is formed; its host keeps it that long, and no group suffers
when it goes away afterwards. Each epoch has names of its own in it, so several can share one.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from parallel.communicators import Backend, CollectiveError, Communicator, make_communicator

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_BACKLOG = 1024  # all members connect at once
CONNECT_TIMEOUT = 5.0
"""Seconds within which the host of a store answers."""
PAUSE = 0.05
"""Seconds between two looks for a store that does not listen yet."""


def open_store(
    host: str, port: int | None, *, is_host: bool, timeout: float, may_be_early: bool = False
) -> TCPStore:
    """The store at ``host``: served from here if ``is_host``, else connected to, within ``timeout`` seconds.

    A port that refuses is one whose host is gone, unless who connects ``may_be_early``, because the port was
    agreed before anybody listened there: then it is tried again until the time is over.

    The server listens on this one address (torch's own would listen on all interfaces) and, without a
    port, on a free one: advertise ``store.port`` afterwards.
    """
    from torch.distributed import TCPStore

    patience = timedelta(seconds=timeout)
    if is_host:
        listener = _listen(host, port or 0)
        port = listener.getsockname()[1]
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=patience,
            master_listen_fd=listener.detach(),  # the store's from here on
        )
    if not port:
        raise ValueError("to connect to a store, its port must be known")
    _see_that_it_listens(host, port, timeout, may_be_early)
    try:
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
    except RuntimeError as error:
        raise CollectiveError(f"no store answers at {host}:{port} within {timeout:g} s", 0) from error


def join_store(address: str) -> TCPStore:
    """The store at ``host:port``, which listens there already."""
    host, _, port = address.rpartition(":")
    return open_store(host, int(port), is_host=False, timeout=CONNECT_TIMEOUT)


def _see_that_it_listens(host: str, port: int, timeout: float, may_be_early: bool) -> None:
    """Check that the store listens before torch connects.

    torch would try again and again, and log that at length.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), max(deadline - time.monotonic(), PAUSE)).close()
            return
        except OSError as error:
            if not may_be_early or time.monotonic() + PAUSE > deadline:
                raise CollectiveError(f"no store answers at {host}:{port} ({error})", 0) from error
        time.sleep(PAUSE)


def choose_backend(asked: str, hosts: Sequence[str]) -> Backend:
    """The transport for an ``--all2all-backend``.

    Shared memory is used where it is asked for, or where the choice is free and all members are on one host.

    Raises:
        ValueError: shared memory is asked for, but there are several hosts.
    """
    one_host = len(set(hosts)) == 1
    if asked == "shared_memory" and not one_host:
        named = ", ".join(sorted(set(hosts)))
        raise ValueError(f"--all2all-backend shared_memory needs all instances on one host, not on {named}")
    return "shared_memory" if one_host and asked in ("shared_memory", "auto") else "gloo"


def form(
    store: TCPStore,
    epoch: int,
    rank: int,
    size: int,
    backend: Backend,
    timeout: float,
    *,
    group: str = "all",
    host: str = "127.0.0.1",
    should_stop: Callable[[], bool] | None = None,
    forming_timeout: float | None = None,
) -> Communicator:
    """Form one group of an epoch; returns this member's end when all are connected.

    ``timeout`` (seconds) bounds every call, and how long this waits for the others unless
    ``forming_timeout`` does. ``host`` is the address on which the others
    reach this member. ``should_stop`` ends the forming when a later epoch has come, or there is another
    reason not to wait any longer; then, and when somebody does not come, raises CollectiveError. One
    client of a store forms one group at a time.
    """
    return make_communicator(
        backend,
        store,
        rank,
        size,
        name=f"epoch/{epoch}/{group}",
        timeout=timeout,
        host=host,
        should_stop=should_stop,
        forming_timeout=forming_timeout,
    )


def _listen(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener
