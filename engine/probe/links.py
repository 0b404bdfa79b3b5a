"""``python -m engine.probe.links``: one host's end of a network measurement between hosts.

Prints the same answer on all hosts, as JSON. The hosts meet at a port of the first one, tell each other what
they are, then measure pair after pair, and all together if they are more than two.
"""

from __future__ import annotations

import itertools
import socket
import sys
import time
from collections.abc import Sequence

import msgspec

from coordinator.addresses import AddressError, interfaces, own, toward
from coordinator.distribution import installed_version
from coordinator.rpc.codec import PROTOCOL
from engine.probe.facts import Failed, HostFacts, Links, Timing
from engine.probe.infiniband import active_ports
from parallel import measure
from parallel.communicators.base import CollectiveError
from parallel.links.meeting import MeetingClient, MeetingHost
from parallel.links.meeting_contract import Meeting


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What ``lockstep doctor`` asks for, as JSON in the only argument."""

    rank: int
    size: int
    master_address: str
    master_port: int
    own_address: str | None
    timeout: float
    """Seconds to wait for the others, and at most for any call."""


def run(ask: Ask) -> Links:
    """Meet, tell, measure.

    Raises:
        CollectiveError: somebody did not come in time, or was lost.
        AddressError: no address to use.
    """
    import torch

    torch.set_num_threads(1)
    is_host = ask.rank == 0
    address = _address(ask)
    where = own("--master-addr", ask.master_address) if is_host else ask.master_address
    meeting = _meet(ask, where)
    facts = _facts(ask.rank, address, str(torch.__version__))
    hosts = [
        msgspec.json.decode(each, type=HostFacts)
        for each in _all_say(meeting, "host", ask, msgspec.json.encode(facts))
    ]
    timings: list[Timing] = []
    members = list(range(ask.size))
    for ranks in [list(pair) for pair in itertools.combinations(members, 2)] + [members] * (ask.size > 2):
        key = "timings/" + "-".join(map(str, ranks))
        if ask.rank in ranks:
            found = _measure(meeting, ranks, ask, address)
            if ask.rank == ranks[0]:
                meeting.set(key, msgspec.json.encode(found))
        timings += msgspec.json.decode(_get(meeting, key, ask), type=list[Timing])
    meeting.set(f"done/{ask.rank}", b"")
    if is_host:  # they meet here, so this one leaves last
        for rank in members:
            _get(meeting, f"done/{rank}", ask)
    return Links(hosts=hosts, timings=timings)


def _meet(ask: Ask, where: str) -> MeetingHost | MeetingClient:
    if ask.rank > 0:
        return MeetingClient(where, ask.master_port, timeout=ask.timeout, may_be_early=True)
    try:
        return MeetingHost(where, ask.master_port)
    except OSError as error:
        raise CollectiveError(f"cannot listen on {where}:{ask.master_port}: {error.strerror}") from error


def _measure(meeting: Meeting, ranks: Sequence[int], ask: Ask, address: str) -> list[Timing]:
    from parallel import groups

    name = "-".join(map(str, ranks))
    group = groups.form(
        meeting, 0, ranks.index(ask.rank), len(ranks), "gloo", ask.timeout, group=name, host=address
    )
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


def _address(ask: Ask) -> str:
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


def _all_say(meeting: Meeting, what: str, ask: Ask, mine: bytes) -> list[bytes]:
    """What each host says, by rank; who does not come in time is named."""
    meeting.set(f"{what}/{ask.rank}", mine)
    return [_get(meeting, f"{what}/{rank}", ask) for rank in range(ask.size)]


def _get(meeting: Meeting, key: str, ask: Ask) -> bytes:
    deadline = time.monotonic() + ask.timeout
    try:
        while (found := meeting.find([key], deadline - time.monotonic())) is None:
            if time.monotonic() > deadline:
                break
        else:
            return found[0]
    except CollectiveError as error:
        raise CollectiveError(f"node rank 0, which leads, is gone: {error}") from error
    kind, _, who = key.partition("/")
    come = "did not come" if kind == "host" else "did not finish"
    raise CollectiveError(f"node rank {who} {come} within {ask.timeout:g} s")


def main() -> int:
    answer: Links | Failed
    try:
        answer = run(msgspec.json.decode(sys.argv[1], type=Ask))
    except (CollectiveError, AddressError) as error:
        answer = Failed(str(error))
    print(msgspec.json.encode(answer).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
