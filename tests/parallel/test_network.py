"""A communicator over sockets against what comes over them; its members are in this process."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from parallel.communicators import CollectiveError
from parallel.communicators.network import NetworkCommunicator, Speed, two_step_limit
from parallel.links.sockets import GroupSockets
from parallel.rounds.notes import note_of
from tests.parallel.link_pairs import connected

pytestmark = pytest.mark.mesh

ROOT = Path(__file__).parents[2]
TIMEOUT = 10.0
SOON = 2.0
WAYS = (True, False)
"""Native members, and those that keep to Python."""


class Group:
    """All members of a group, and the sockets that they use."""

    def __init__(self, size: int, *, timeout: float = TIMEOUT, streams: int = 1, native: bool = True) -> None:
        self.sockets: list[GroupSockets] = connected(size, streams)
        with ThreadPoolExecutor(size) as pool:
            forming = [
                pool.submit(NetworkCommunicator, sockets, rank, size, timeout=timeout, native=native)
                for rank, sockets in enumerate(self.sockets)
            ]
        self.members = [each.result() for each in forming]

    def data(self, rank: int, peer: int) -> socket.socket:
        """The socket by which a test speaks for a member, whose communicator makes no calls."""
        return self.sockets[rank].data[peer][0]

    def fails(self, rank: int, call: Callable[[NetworkCommunicator], object]) -> CollectiveError:
        """The error of a call, which must come soon."""
        began = time.monotonic()
        with pytest.raises(CollectiveError) as caught:
            call(self.members[rank])
        assert time.monotonic() - began < SOON
        return caught.value

    def close(self) -> None:
        for each in self.members:
            each.close()


@pytest.fixture(params=WAYS, ids=("native", "Python"))
def group(request: pytest.FixtureRequest) -> Iterator[Group]:
    group = Group(2, native=request.param)
    yield group
    group.close()


def message(call: str, noted: int, payload: bytes, num_bytes: int | None = None) -> bytes:
    header = struct.pack("=qq", note_of(call, noted), len(payload) if num_bytes is None else num_bytes)
    return header + payload


def test_what_is_no_message_ends_the_group_and_names_who_sent_it(group: Group) -> None:
    group.data(1, 0).send(b"GET / HTTP/1.1\r\n\r\n")
    error = group.fails(0, lambda member: member.all_reduce(torch.ones(3)))
    assert re.fullmatch(r"all_reduce on rank 0: rank 1 calls \w+ of -?\d+ bytes", str(error))
    assert (error.rank, error.evidence) == (1, "closed")
    later = group.fails(0, lambda member: member.all_gather_ints([1]))
    assert str(later).replace("all_gather_ints", "all_reduce") == str(error)
    # What rank 0 sent before may be enough for one call.
    there = group.fails(1, lambda member: [member.all_reduce(torch.ones(3)) for _ in range(2)])
    assert str(there) == "all_reduce on rank 1: rank 0 has given up because of rank 1"
    assert there.rank == 1


@pytest.mark.parametrize("num_bytes", [0, 8, 1 << 62, -1])
def test_another_number_of_bytes_is_never_taken(group: Group, num_bytes: int) -> None:
    group.data(1, 0).send(message("all_reduce", 12, b"", num_bytes))
    error = group.fails(0, lambda member: member.all_reduce(torch.ones(3)))
    assert str(error) == f"all_reduce on rank 0: rank 1 sends {num_bytes} bytes where 12 are expected"


def test_who_sends_too_much_is_stopped_by_the_system_and_fails_at_the_next_call(group: Group) -> None:
    stranger = group.data(1, 0)
    stranger.send(message("all_reduce", 4, struct.pack("=f", 2.0)))
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while sent < 256 << 20:
            sent += stranger.send(bytes(1 << 20))
    assert sent < 64 << 20
    assert group.members[0].all_reduce(torch.ones(1)).item() == 3.0
    assert group.fails(0, lambda member: member.all_reduce(torch.ones(1))).rank == 1


def test_a_reset_in_the_middle_of_a_large_message(group: Group) -> None:
    stranger = group.data(1, 0)
    content = message("all_to_all", 0, b"", 8 << 20) + bytes(1 << 20)
    with contextlib.suppress(BlockingIOError):
        while content:
            content = content[stranger.send(content) :]
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    stranger.close()
    rows = torch.ones(2, 8 << 20, dtype=torch.uint8)
    error = group.fails(0, lambda member: member.all_to_all(rows, [1, 1], [1, 1]))
    assert str(error).startswith("all_to_all on rank 0: the connection to rank 1 broke (")
    assert (error.rank, error.evidence) == (1, "closed")


@pytest.mark.parametrize("content", [b"x" * 8, bytes(1 << 20)])
def test_what_is_no_last_word_ends_the_group_between_calls(group: Group, content: bytes) -> None:
    noticed: list[CollectiveError] = []
    heard = threading.Event()
    group.members[0].on_broken = lambda error: (noticed.append(error), heard.set())
    with contextlib.suppress(OSError):
        group.sockets[1].control[0].send(content)
    assert heard.wait(SOON)
    assert [(str(each), each.rank) for each in noticed] == [("rank 1 sends what is no last word", 1)]
    assert group.fails(0, lambda member: member.all_gather_ints([1])).rank == 1


def test_a_broken_group_is_noticed_between_calls_once(group: Group) -> None:
    noticed: list[CollectiveError] = []
    heard = threading.Event()
    group.members[0].on_broken = lambda error: (noticed.append(error), heard.set())
    group.members[1].abort()
    assert heard.wait(SOON)
    group.members[1].close()
    group.members[0].close()
    assert [(str(each), each.rank, each.evidence) for each in noticed] == [
        ("rank 1 has aborted", None, "closed")
    ]


def test_who_has_closed_its_end_is_missed_only_when_needed(group: Group) -> None:
    first = threading.Thread(target=group.members[1].broadcast, args=(torch.arange(5), 1))
    first.start()
    first.join()
    group.members[1].close()
    time.sleep(0.05)  # what it has sent is there after its farewell, too
    assert torch.equal(group.members[0].broadcast(torch.zeros(5, dtype=torch.int64), 1), torch.arange(5))
    error = group.fails(0, lambda member: member.all_gather_ints([1]))
    assert str(error) == "all_gather_ints on rank 0: rank 1 has closed its end"
    assert (error.rank, error.evidence) == (1, "closed")


def test_an_abort_from_a_signal_handler_ends_the_call_that_it_interrupts(group: Group) -> None:
    def abort(_number: int, _frame: object) -> None:
        group.members[0].abort()

    before = signal.signal(signal.SIGUSR1, abort)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        error = group.fails(0, lambda member: member.all_gather_ints([1]))
        assert str(error) == "all_gather_ints on rank 0: it was aborted"
        assert error.evidence == "aborted"
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)


def test_members_in_one_process_and_their_links(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="parallel.communicators.network")
    group = Group(3, streams=2)
    told = [each.getMessage() for each in caplog.records]
    assert len(told) == 3
    assert re.fullmatch(
        r"links of rank \d to 2 others: native, not encrypted; \d+ us, [\d.]+ GB/s; two steps above \d+ KiB",
        told[0],
    )
    assert len({each.partition("encrypted; ")[2] for each in told}) == 1  # all take rank 0's figures
    assert group.members[0].processes == dict.fromkeys((1, 2), os.getpid())
    before = group.members[0].link_counts()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda member: member.all_gather_ints([1, 2]), group.members))
    after = group.members[0].link_counts()
    assert [now.bytes_sent - then.bytes_sent for now, then in zip(after, before, strict=True)] == [0, 32, 32]
    with pytest.raises(ValueError, match="rank 0 of 3 has no link to rank 0"):
        group.members[0].send(torch.ones(1), 0)
    with pytest.raises(ValueError, match="rank 0 of 3 has no link to rank 3"):
        group.members[0].receive(torch.ones(1), 3)
    group.close()
    assert group.members[0].link_counts() == after
    assert repr(group.members[0]) == "<NetworkCommunicator rank 0 of 3, it was closed>"


@pytest.mark.parametrize("native", WAYS)
@pytest.mark.parametrize("spare", [0, 1, 2])
def test_without_file_descriptors_a_group_does_not_form_and_nothing_stays(native: bool, spare: int) -> None:
    before = os.listdir("/proc/self/fd")
    sockets = connected(2)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(NetworkCommunicator, sockets[1], 1, 2, timeout=TIMEOUT, native=native)
        assert select.select([sockets[0].data[1][0]], [], [], SOON)[0]  # it waits for rank 0
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [each for each in range(highest + 10) if not os.path.exists(f"/proc/self/fd/{each}")]
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[spare], limits[1]))
        try:
            with pytest.raises(CollectiveError, match="Too many open files") as caught:
                NetworkCommunicator(sockets[0], 0, 2, timeout=TIMEOUT, native=native)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert str(caught.value).startswith("forming the group: rank 0 cannot use its connections: ")
        assert caught.value.rank == 0
        with pytest.raises(CollectiveError, match=r"rank 0 has aborted|to rank 0 broke|Too many open files"):
            other.result()
    assert os.listdir("/proc/self/fd") == before


CABLE = """
import sys, threading, time, torch
from parallel.groups import form
from parallel.links.meeting import MeetingClient, MeetingHost
rank, way = int(sys.argv[1]), sys.argv[2]
hosts = "10.203.0.1", "10.203.0.2"
meeting = MeetingHost(hosts[0], 4321) if rank == 0 else MeetingClient(hosts[0], 4321, None, 10.0, may_be_early=True)
group = form(meeting, 1, rank, 2, "tcp", 20.0, host=hosts[rank])
heard = threading.Event()
group.on_broken = lambda error: (print(error, error.rank, error.evidence, flush=True), heard.set())
group.all_gather_ints([rank])
print("ready", flush=True)
if way == "idle":
    assert heard.wait(15)
else:
    began = time.monotonic()
    try:
        while True:
            group.all_to_all(torch.ones(2, 1 << 20), [1, 1], [1, 1])
    except Exception as error:
        print(error, error.rank, error.evidence, flush=True)
    assert time.monotonic() - began < 25
group.close()
"""


@pytest.fixture
def two_hosts() -> Iterator[list[str]]:
    """Names of two network namespaces, joined by a cable."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2")
    names = [f"lockstep-{os.getpid()}-{number}" for number in range(2)]
    try:
        for name in names:
            if subprocess.run(["ip", "netns", "add", name], check=False).returncode:
                pytest.skip("may not make network namespaces")
        ends = ["name", "end0", "netns", names[0]], ["name", "end1", "netns", names[1]]
        subprocess.run(["ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1]], check=True)
        for number, name in enumerate(names):
            address = f"10.203.0.{number + 1}/24"
            for words in (
                ["address", "add", address, "dev", f"end{number}"],
                ["link", "set", f"end{number}", "up"],
            ):
                subprocess.run(["ip", "-n", name, *words], check=True)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["idle", "busy"])
def test_a_pulled_cable_is_noticed_and_the_member_behind_it_named(two_hosts: list[str], way: str) -> None:
    members = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", CABLE, str(rank), way],
            cwd=ROOT, stdout=subprocess.PIPE, text=True,
        )
        for rank, name in enumerate(two_hosts)
    ]  # fmt: skip
    try:
        for each in members:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        time.sleep(0.2)
        subprocess.run(["ip", "-n", two_hosts[0], "link", "set", "end0", "down"], check=True)
        for rank, each in enumerate(members):
            said, _ = each.communicate(timeout=40)
            assert re.search(
                rf"rank {1 - rank} (\(.* to .*\) )?(broke|did not come).* {1 - rank} (closed|deadline)$",
                said,
                re.M,
            )
            assert each.returncode == 0
    finally:
        for each in members:
            each.kill()
            each.communicate()


def test_two_steps_pay_where_bytes_take_longer_than_a_step() -> None:
    def limit(latency: float, gigabits: float, size: int) -> int:
        return two_step_limit(Speed(latency, gigabits * 1e9 / 8), size)

    assert limit(20e-6, 10, 2) == 4 << 20  # with two members a second step never pays
    assert limit(50e-6, 10, 3) == 128 << 10
    assert limit(200e-6, 10, 4) == 128 << 10
    assert limit(200e-6, 10, 3) == 512 << 10
    assert limit(200e-6, 1, 8) == 16 << 10
    assert limit(0.0, 0.0, 4) == 16 << 10
    assert limit(1.0, 100, 3) == 4 << 20
