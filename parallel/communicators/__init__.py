"""Communicators: ends of a group of members, one file for each kind.

:func:`make_communicator` makes them.

Importing this package loads no torch; the backends do.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Literal

from parallel.communicators.base import CollectiveError, Communicator
from parallel.links.forming_group import FormingGroup
from parallel.links.keys import LinkKey
from parallel.links.meeting_contract import Meeting, Prefixed
from parallel.links.transports import LinkTransport, make_links

if TYPE_CHECKING:
    from parallel.communicators.network import NetworkCommunicator

__all__ = ["Backend", "CollectiveError", "Communicator", "make_communicator"]

Backend = Literal["gloo", "shared_memory", "tcp", "ucx", "mixed"]


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
    transport: LinkTransport = "tcp",
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
    forming = FormingGroup(
        Prefixed(meeting, name), rank, size, timeout=timeout, forming_timeout=forming_timeout,
        should_stop=should_stop,
    )  # fmt: skip
    if kind == "gloo":
        from parallel.communicators.gloo import GlooCommunicator

        return GlooCommunicator(forming, host=host)
    if kind == "shared_memory":
        from parallel.communicators.shared_memory import SharedMemoryCommunicator

        return SharedMemoryCommunicator(forming)
    if kind not in ("tcp", "ucx", "mixed"):
        raise ValueError(f"no communicator is called {kind!r}: choose gloo, shared_memory, tcp, ucx or mixed")
    network = _connected(forming, "ucx" if kind == "ucx" else transport, host=host, name=name, key=key)
    if kind != "mixed":
        return network
    from parallel.communicators.mixed import MixedCommunicator

    return MixedCommunicator(forming, network, host_name=host_name)


def _connected(
    forming: FormingGroup, transport: LinkTransport, *, host: str, name: str, key: LinkKey | None
) -> NetworkCommunicator:
    """This member's end of a group over links, whose transport the members agree on."""
    from parallel.communicators.network import NetworkCommunicator
    from parallel.links.connecting import connect

    with ExitStack() as undo:
        links = make_links(forming, transport, host=host)
        if links is not None:
            undo.callback(links.close)
        sockets = connect(forming, host=host, name=name, key=key, streams=1 if links is None else 0)
        undo.pop_all()
    return NetworkCommunicator(
        sockets,
        forming.rank,
        forming.size,
        timeout=forming.timeout,
        should_stop=forming.should_stop,
        links=links,
    )
