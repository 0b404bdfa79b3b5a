"""``python -m engine.probe.links``: one host's end of a network measurement between hosts.

Prints the same answer on all hosts, as JSON. The hosts meet at a port of the first one, tell each other what
they are, then measure pair after pair, and all together if they are more than two. The links are those that
tensors take in a mesh, and prove its key. What goes wrong on one host, the others report, too.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from coordinator.addresses import AddressError, interfaces, own, toward
from coordinator.distribution import installed_version
from coordinator.rpc import keys
from coordinator.rpc.codec import PROTOCOL
from coordinator.rpc.keys import link_key
from engine.probe.facts import HostFacts, LinkFacts, ProbeFailed, Timing
from parallel import measure
from parallel.communicators.base import CollectiveError
from parallel.links.infiniband import active_ports
from parallel.links.keys import LinkKey
from parallel.links.meeting import MeetingClient, MeetingHost
from parallel.links.meeting_contract import Meeting

LOOK_SECONDS = 0.2
"""Seconds between two checks whether another host has failed."""
LAST_SECONDS = 2.0
"""Seconds in which other hosts learn of a failure."""
_FAILED = "failed"


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of a measurement by ``lockstep doctor``, as JSON in the only argument."""

    rank: int
    size: int
    master_address: str
    master_port: int
    own_address: str | None
    timeout: float
    """Seconds to wait for the others, and at most for any call."""
    mesh_key_file: str | None = None


def run(ask: ProbeRequest) -> LinkFacts:
    """Measure: meet the other hosts, exchange facts, time the collectives.

    Raises:
        CollectiveError: somebody did not come in time, or was lost.
        AddressError: no address to use.
    """
    import torch

    torch.set_num_threads(1)
    address = _address(ask)
    where = own("--master-addr", ask.master_address) if ask.rank == 0 else ask.master_address
    key = _key(ask)
    meeting = _meet(ask, where, key)
    facts = _facts(ask.rank, address, str(torch.__version__))
    try:
        found = _find_out(meeting, ask, address, facts, key)
    except CollectiveError as error:
        with contextlib.suppress(CollectiveError):
            if not meeting.check([_FAILED]):
                meeting.set(_FAILED, str(error).encode())
            _leave(meeting, ask, LAST_SECONDS)
        raise
    _leave(meeting, ask, ask.timeout)
    return found


def _find_out(
    meeting: MeetingHost | MeetingClient,
    ask: ProbeRequest,
    address: str,
    facts: HostFacts,
    key: LinkKey | None,
) -> LinkFacts:
    hosts = [
        msgspec.json.decode(each, type=HostFacts)
        for each in _all_say(meeting, "host", ask, msgspec.json.encode(facts))
    ]
    timings: list[Timing] = []
    members = list(range(ask.size))
    for ranks in [list(pair) for pair in itertools.combinations(members, 2)] + [members] * (ask.size > 2):
        name = "timings/" + "-".join(map(str, ranks))
        if ask.rank in ranks:
            found = _measure(meeting, ranks, ask, address, key)
            if ask.rank == ranks[0]:
                meeting.set(name, msgspec.json.encode(found))
        timings += msgspec.json.decode(_get(meeting, name, ask), type=list[Timing])
    return LinkFacts(hosts=hosts, timings=timings)


def _leave(meeting: MeetingHost | MeetingClient, ask: ProbeRequest, seconds: float) -> None:
    """Report that this host has all results; rank 0 leaves last."""
    meeting.set(f"done/{ask.rank}", b"")
    if isinstance(meeting, MeetingHost):
        names, deadline = [f"done/{rank}" for rank in range(ask.size)], time.monotonic() + seconds
        while meeting.find(names, deadline - time.monotonic()) is None and time.monotonic() < deadline:
            pass


def _key(ask: ProbeRequest) -> LinkKey | None:
    try:
        return None if ask.mesh_key_file is None else link_key(keys.load(Path(ask.mesh_key_file)))
    except keys.KeyFileError as error:
        raise CollectiveError(str(error)) from error


def _meet(ask: ProbeRequest, where: str, key: LinkKey | None) -> MeetingHost | MeetingClient:
    if ask.rank > 0:
        return MeetingClient(where, ask.master_port, key, ask.timeout, may_be_early=True)
    try:
        return MeetingHost(where, ask.master_port, key)
    except OSError as error:
        raise CollectiveError(f"cannot listen on {where}:{ask.master_port}: {error.strerror}") from error


def _measure(
    meeting: Meeting, ranks: Sequence[int], ask: ProbeRequest, address: str, key: LinkKey | None
) -> list[Timing]:
    from parallel import groups

    group = groups.form(
        meeting, 0, ranks.index(ask.rank), len(ranks), "tcp", ask.timeout,
        group="-".join(map(str, ranks)), host=address, key=key,
    )  # fmt: skip
    try:
        timings = []
        for collective, num_bytes in measure.cells():
            seconds = measure.measure(group, collective, num_bytes)
            sent = measure.bytes_sent(collective, num_bytes, len(ranks))
            timings.append(
                Timing(
                    ranks=list(ranks),
                    collective=collective,
                    num_bytes=num_bytes,
                    seconds=seconds,
                    bytes_per_second=sent / seconds,
                )
            )
        return timings
    finally:
        group.close()


def _address(ask: ProbeRequest) -> str:
    if ask.own_address is not None:
        return own("--instance-address", ask.own_address)
    if ask.rank == 0:
        return own("--master-addr", ask.master_address)
    return toward(ask.master_address, ask.master_port)


def _facts(rank: int, address: str, torch_version: str) -> HostFacts:
    found = interfaces()
    used = next((each for each in found if each.address == address), None)
    faster = [str(each) for each in found if used and each.mbit > used.mbit > 0]
    return HostFacts(
        rank=rank,
        host=socket.gethostname(),
        address=address,
        interface=used.name if used else "lo",
        mbit=used.mbit if used else 0,
        mtu=used.mtu if used else 0,
        lockstep=installed_version(),
        protocol=PROTOCOL,
        torch=torch_version,
        faster=faster,
        infiniband=active_ports(),
    )


def _all_say(meeting: MeetingHost | MeetingClient, what: str, ask: ProbeRequest, mine: bytes) -> list[bytes]:
    """Values of all hosts by rank; a host that is late is named."""
    meeting.set(f"{what}/{ask.rank}", mine)
    return [_get(meeting, f"{what}/{rank}", ask) for rank in range(ask.size)]


def _get(meeting: MeetingHost | MeetingClient, key: str, ask: ProbeRequest) -> bytes:
    """A value of another host, waited for.

    Raises:
        CollectiveError: it does not come; or a host has failed, and why.
    """
    deadline = time.monotonic() + ask.timeout
    try:
        while (found := meeting.find([key], LOOK_SECONDS)) is None:
            if meeting.check([_FAILED]):
                raise _OtherFailed(meeting.get(_FAILED).decode())
            if time.monotonic() > deadline:
                break
        else:
            return found[0]
    except _OtherFailed:
        raise
    except CollectiveError as error:
        raise CollectiveError(f"node rank 0, which leads, is gone: {error}") from error
    kind, _, who = key.partition("/")
    come = "did not come" if kind == "host" else "did not finish"
    refused = meeting.refused if isinstance(meeting, MeetingHost) else 0
    hint = f"; {refused} connections were refused: do all have the same key and version?" if refused else ""
    raise CollectiveError(f"node rank {who} {come} within {ask.timeout:g} s{hint}")


class _OtherFailed(CollectiveError):
    """Failure that another host reports."""


def main() -> int:
    answer: LinkFacts | ProbeFailed
    try:
        answer = run(msgspec.json.decode(sys.argv[1], type=ProbeRequest))
    except (CollectiveError, AddressError) as error:
        answer = ProbeFailed(str(error))
    print(msgspec.json.encode(answer).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
