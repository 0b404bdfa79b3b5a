"""Communicators: the contract in ``base``, one file per transport.

:func:`make_communicator` makes them.

Importing this package loads no torch; the backends do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Literal

from parallel.communicators.base import CollectiveError, Communicator
from parallel.links.keys import LinkKey
from parallel.links.meeting_contract import Meeting, Prefixed

__all__ = ["Backend", "CollectiveError", "Communicator", "make_communicator"]

Backend = Literal["gloo", "shared_memory", "tcp", "ucx", "mixed"]
Transport = Literal["auto", "tcp", "ucx"]
"""What the kinds tcp and mixed send tensors over between hosts.

auto: UCX where all members have an RDMA device that is up, else TCP.
"""


def make_communicator(
    kind: Backend,
    meeting: Meeting,
    rank: int,
    size: int,
    *,
    name: str,
    timeout: float,
    host: str = "127.0.0.1",
    should_stop: Callable[[], bool] | None = None,
    forming_timeout: float | None = None,
    key: LinkKey | None = None,
    host_name: str | None = None,
    transport: Transport = "tcp",
) -> Communicator:
    """Meet the other members of the group ``name`` and connect to them.

    Returns when all are connected, so that nobody needs the meeting place any more. ``timeout`` (seconds)
    bounds each call, and the waiting for the others here unless ``forming_timeout`` does. ``host`` is the
    address on which this member is reached, ``key`` what both ends of its links prove (neither for shared
    memory, and gloo knows no key). ``transport`` is what the kinds tcp and mixed send tensors over, the same
    for all members; the kind ucx is tcp over UCX.
    Members of a mixed group share memory if they can, and have the same ``host_name``.
    ``should_stop`` is asked while others have not come; when it says so, forming ends with
    :class:`CollectiveError`, as it does on a timeout.

    Raises:
        CollectiveError: somebody does not come, or forming was stopped.
        ValueError: the rank, the kind or the transport is not possible; the message says why.
    """
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in a group of {size}")
    own_meeting = Prefixed(meeting, name)
    if kind == "gloo":
        from parallel.communicators.gloo import GlooCommunicator

        return GlooCommunicator(
            own_meeting, rank, size, timeout=timeout, host=host, should_stop=should_stop,
            forming_timeout=forming_timeout,
        )  # fmt: skip
    if kind == "shared_memory":
        from parallel.communicators.shared_memory import SharedMemoryCommunicator

        return SharedMemoryCommunicator(
            own_meeting, rank, size, timeout=timeout, should_stop=should_stop, forming_timeout=forming_timeout
        )
    if kind in ("tcp", "ucx", "mixed"):
        from parallel.communicators.network import NetworkCommunicator
        from parallel.links.connecting import connect
        from parallel.links.ucx_links import meet

        links = meet(
            own_meeting, rank, size, "ucx" if kind == "ucx" else transport, host=host,
            timeout=timeout if forming_timeout is None else forming_timeout, should_stop=should_stop,
        )  # fmt: skip
        with ExitStack() as undo:
            if links is not None:
                undo.callback(links.close)
            sockets = connect(
                own_meeting, rank, size, host=host, name=name, key=key, timeout=timeout,
                should_stop=should_stop, streams=1 if links is None else 0, forming_timeout=forming_timeout,
            )  # fmt: skip
            undo.pop_all()
        network = NetworkCommunicator(
            sockets, rank, size, timeout=timeout, should_stop=should_stop, links=links
        )
        if kind != "mixed":
            return network
        from parallel.communicators.mixed import MixedCommunicator

        return MixedCommunicator(
            own_meeting, rank, size, timeout=timeout, network=network, host_name=host_name,
            should_stop=should_stop, forming_timeout=forming_timeout,
        )  # fmt: skip
    raise ValueError(f"no communicator is called {kind!r}: choose gloo, shared_memory, tcp, ucx or mixed")
