"""Forming the groups of an epoch: a meeting place, then one communicator per group.

Torch is loaded late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from parallel.communicators import Backend, Communicator, make_communicator
from parallel.links.meeting_contract import Meeting


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
) -> Communicator:
    """Form one group of an epoch; returns this member's end when all are connected.

    ``timeout`` (seconds) bounds every call, and how long this waits for the others unless
    ``forming_timeout`` does. ``host`` is the address on which the others
    reach this member. ``should_stop`` ends the forming when a later epoch has come, or there is another
    reason not to wait any longer; then, and when somebody does not come, raises CollectiveError. One
    client of a meeting place forms one group at a time.
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
    )
