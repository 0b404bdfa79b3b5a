"""Communicators: the contract in ``base``, one file per transport.

:func:`make_communicator` makes them.

Importing this package loads no torch; the backends do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from parallel.communicators.base import CollectiveError, Communicator
from parallel.links.keys import LinkKey
from parallel.links.meeting_contract import Meeting, Prefixed

__all__ = ["Backend", "CollectiveError", "Communicator", "make_communicator"]

Backend = Literal["gloo", "shared_memory", "tcp", "mixed"]


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
) -> Communicator:
    """Meet the other members of the group ``name`` and connect to them.

    Returns when all are connected, so that nobody needs the meeting place any more. ``timeout`` (seconds)
    bounds each call, and the waiting for the others here unless ``forming_timeout`` does. ``host`` is the
    address on which this member is reached, ``key`` what both ends of its links prove (neither for shared
    memory, and gloo knows no key).
    Members of a mixed group share memory if they can, and have the same ``host_name``.
    ``should_stop`` is asked while others have not come; when it says so, forming ends with
    :class:`CollectiveError`, as it does on a timeout.
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
    if kind in ("tcp", "mixed"):
        from parallel.communicators.network import NetworkCommunicator
        from parallel.links.connecting import connect

        sockets = connect(
            own_meeting, rank, size, host=host, name=name, key=key, timeout=timeout, should_stop=should_stop,
            forming_timeout=forming_timeout,
        )  # fmt: skip
        network = NetworkCommunicator(sockets, rank, size, timeout=timeout, should_stop=should_stop)
        if kind == "tcp":
            return network
        from parallel.communicators.mixed import MixedCommunicator

        return MixedCommunicator(
            own_meeting, rank, size, timeout=timeout, network=network, host_name=host_name,
            should_stop=should_stop, forming_timeout=forming_timeout,
        )  # fmt: skip
    raise ValueError(f"no communicator is called {kind!r}: choose gloo, shared_memory, tcp or mixed")
