"""Formation of an epoch's groups: members meet, then connect one communicator per group.

Torch is loaded late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallel.communicators import Backend, Communicator, make_communicator
from parallel.links.keys import LinkKey
from parallel.links.meeting_contract import Meeting
from parallel.links.transports import MeshTransport
from parallel.rounds import memory_order


def choose_backend(asked: str, hosts: Sequence[str], between: str = "auto") -> Backend:
    """The communicator for an ``--all2all-backend``; ``between``: ``--mesh-transport``.

    Those that name how rows are dispatched do so over gloo, as the reference.

    Raises:
        ValueError: shared memory is asked for, but there are several hosts.
    """
    if asked == "shared_memory" and len(set(hosts)) > 1:
        named = ", ".join(sorted(set(hosts)))
        raise ValueError(f"--all2all-backend shared_memory needs all instances on one host, not on {named}")
    if asked == "tcp":
        return "tcp"
    if asked in ("auto", "shared_memory", "nccl"):
        return choose_transport(hosts, between)
    return "gloo"


def choose_transport(hosts: Sequence[str], between: str = "auto") -> Backend:
    """The communicator of a group with members on these hosts.

    Shared memory on one host that can have it, ``between`` (``--mesh-transport``) among several, both where
    some share one.
    """
    distinct = len(set(hosts))
    if distinct == 1 and memory_order.fence_here() is not None:
        return "shared_memory"
    if between == "gloo":
        return "gloo"
    return "mixed" if 1 < distinct < len(hosts) else "tcp"


def on_devices(group: Communicator, meeting: Meeting, number: int, timeout: float, name: str) -> Communicator:
    """The group, with NCCL for tensors of CUDA devices where all members have it.

    ``number`` is that of this member's device. What fails leaves nothing open. Raises as :func:`form` does.
    """
    from parallel.communicators import nccl

    try:
        if not all(can for (can,) in group.all_gather_ints([int(nccl.is_possible())])):
            return group
        return nccl.connect(meeting, group, nccl.cuda_device(number), timeout=timeout, name=name)
    except BaseException:
        group.abort()
        group.close()
        raise


def form(
    meeting: Meeting,
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
    key: LinkKey | None = None,
    host_name: str | None = None,
    between: MeshTransport = "tcp",
) -> Communicator:
    """Form one group of an epoch; returns this member's end when all are connected.

    ``timeout`` (seconds) bounds every call, and how long this waits for the others unless
    ``forming_timeout`` does. ``host`` is the address on which the others reach this member, ``key`` what both
    ends of a link prove, ``host_name`` equal for members that share memory, ``between`` the flag
    ``--mesh-transport``. ``should_stop`` ends the forming
    when a later epoch has come, or there is another reason not to wait any longer; then, and when somebody
    does not come, raises CollectiveError. One client of a meeting place forms one group at a time.
    """
    return make_communicator(
        backend,
        meeting,
        rank,
        size,
        name=f"epoch/{epoch}/{group}",
        timeout=timeout,
        host=host,
        should_stop=should_stop,
        forming_timeout=forming_timeout,
        key=key,
        host_name=host_name,
        transport="tcp" if between == "gloo" else between,
    )
