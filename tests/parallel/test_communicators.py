"""Communicators between real processes, when all goes well and when it does not."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from parallel.communicators import CollectiveError, make_communicator
from parallel.groups import form
from parallel.links import native_links, ucx_links
from parallel.links.meeting import MeetingHost
from parallel.links.rendezvous import exchange
from parallel.rounds import memory_order, native_network_rounds, native_shared_memory_rounds
from parallel.rounds.segments import OwnSegment, ProcessWatch, SegmentAddress, open_segment, this_host
from parallel.rounds.waiting import SpinWait
from tests.nightly import NIGHTLY
from tests.parallel import members

pytestmark = pytest.mark.mesh

ROOT = Path(__file__).parents[2]
UCX = ("ucx",) if NIGHTLY and ucx_links.why_not() is None else ()
"""UCX, at night and where it is installed.

Links over it have tests for each push.
"""
BACKENDS = ("gloo", "shared_memory", "tcp", *UCX)
ALL_WAYS = (*BACKENDS, "python", "tcp_python", "nccl")
"""Shared memory and sockets with and without the native calls; nccl over gloo."""
MOST_WAYS = (
    *BACKENDS,
    *(pytest.param(way, marks=pytest.mark.nightly) for way in ("python", "tcp_python", "nccl")),
)
"""The same; for each push without those in Python."""
NUMBERS = itertools.count(100)
"""Tests share one meeting place, in which each has its own."""

SOON = 0.5
"""Seconds within which a death or an abort must be known.

The limits on an idle machine are 0.2 and 0.3.
"""


@pytest.fixture(scope="module")
def meeting() -> MeetingHost:
    for part in (native_shared_memory_rounds, native_links, native_network_rounds):
        part.load()  # compiled before anybody's time counts
    return MeetingHost("127.0.0.1")


@pytest.fixture(scope="module", autouse=True)
def _nothing_stays_in_dev_shm() -> Iterator[None]:
    before = set(os.listdir("/dev/shm"))
    yield
    left = {name for name in set(os.listdir("/dev/shm")) - before if not name.startswith("sem.mp")}
    assert not left


class Crowd:
    """Starts member processes, reads their reports, and ends them."""

    def __init__(self, port: int, directory: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch.distributed", "tests.parallel.members"])
        self._test, self._port, self._directory = next(NUMBERS), port, directory
        self.processes: list[BaseProcess] = []

    def start(self, function: Callable[..., None], backend: str, size: int) -> None:
        for rank in range(size):
            arguments = (function, backend, rank, size, self._test, self._port, str(self._directory))
            process = self._context.Process(target=members.run, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)

    def report(self, rank: int, key: str) -> dict[str, Any]:
        """The report of a member, when it has this key."""
        path = self._directory / f"{rank}.json"
        deadline = time.monotonic() + 2 * members.PATIENCE
        while time.monotonic() < deadline:
            if path.exists():
                found: dict[str, Any] = json.loads(path.read_text())
                if key in found:
                    return found
            time.sleep(0.01)
        raise AssertionError(f"no report of rank {rank} with {key}")

    def kill(self, rank: int) -> float:
        """When all have reported and wait, kill one; returns when."""
        for each in range(len(self.processes)):
            self.report(each, "ready")
        time.sleep(0.3)
        now = time.monotonic()
        self.processes[rank].kill()
        return now

    def join(self) -> None:
        """All must end well."""
        for process in self.processes:
            process.join(3 * members.PATIENCE)
        assert [process.exitcode for process in self.processes] == [0] * len(self.processes)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()


@pytest.fixture
def crowd(meeting: MeetingHost, tmp_path: Path) -> Iterator[Crowd]:
    crowd = Crowd(meeting.port, tmp_path)
    yield crowd
    crowd.end()


# ---- when all goes well


@pytest.mark.diagonal("backend", "size", columns=3, each=1)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    "backend", [*ALL_WAYS, "small_slots", "mixed", "tcp_mixed", *(f"{way}_shared_memory" for way in UCX)]
)
def test_every_method_gives_what_follows_from_the_data(crowd: Crowd, backend: str, size: int) -> None:
    crowd.start(members.every_method, backend, size)
    crowd.join()


def test_all_transports_give_the_same_bits(crowd: Crowd) -> None:
    crowd.start(members.same_data_everywhere, "all of them", 3)
    crowd.join()


@pytest.mark.parametrize("backend", [*BACKENDS, pytest.param("nccl", marks=pytest.mark.nightly)])
def test_members_may_be_late_and_leave_early_over_many_epochs(crowd: Crowd, backend: str) -> None:
    crowd.start(members.uneven_paces, backend, 3)
    crowd.join()


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        ("shared_memory", 2),
        ("mixed", 3),
        ("gloo", 2),
        ("tcp", 2),
        ("tcp_mixed", 3),
        pytest.param("nccl", 2, marks=pytest.mark.nightly),
    ],
)
def test_views_last_for_slow_readers(crowd: Crowd, backend: str, size: int) -> None:
    crowd.start(members.slow_readers, backend, size)
    crowd.join()
    for rank in range(size):
        shown = crowd.report(rank, "shown")["shown"]
        assert shown == ([0, 1, 2, 3] if backend in ("gloo", "nccl") else [3, 1, 2, 3])


@pytest.mark.parametrize(
    "backend", ["shared_memory", "python", "tcp", pytest.param("tcp_python", marks=pytest.mark.nightly), *UCX]
)
def test_more_members_than_cores_wait_without_burning_them(crowd: Crowd, backend: str) -> None:
    crowd.start(members.crowd_of_members, backend, 6)
    for rank in range(1, 6):
        assert crowd.report(rank, "used")["used"] < 0.3  # of the second that rank 0 lets them wait
    crowd.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_of_one_is_its_own_world(meeting: MeetingHost, backend: str) -> None:
    group = form(meeting, 7, 0, 1, backend, 5.0, group=f"alone {backend}")
    rows = torch.arange(6.0).reshape(3, 2)
    assert group.all_gather_ints([3, 4]) == [[3, 4]]
    assert torch.equal(group.all_gather_view(rows, [3]), rows)
    assert torch.equal(group.all_to_all_views(rows, [3], [3])[0], rows)
    for result in (
        group.all_gather(rows, [3]),
        group.reduce_scatter(rows, [3]),
        group.all_to_all(rows, [3], [3]),
        group.all_reduce(rows),
        group.broadcast(rows, 0),
    ):
        assert torch.equal(result, rows)
        assert result.data_ptr() != rows.data_ptr()
    assert repr(group).endswith("rank 0 of 1, open>")
    group.abort()
    with pytest.raises(CollectiveError, match="all_reduce on rank 0: it was aborted"):
        group.all_reduce(rows)
    group.close()


# ---- when something fails


@pytest.mark.parametrize("backend", ALL_WAYS)
def test_a_killed_member_is_noticed_at_once_and_the_others_go_on(crowd: Crowd, backend: str) -> None:
    crowd.start(members.one_is_killed, backend, 3)
    killed_at = crowd.kill(1)
    for rank in (0, 2):
        report = crowd.report(rank, "again")
        assert report["at"] - killed_at < SOON
        assert re.match(f"all_to_all(_views)? on rank {rank}: ", report["message"])
        assert report["later"]["seconds"] < 0.1
        assert report["again"] < 2.0
    assert {crowd.report(rank, "again")["blamed"] for rank in (0, 2)} == {1}
    assert "exited" in {crowd.report(rank, "again")["evidence"] for rank in (0, 2)}


@pytest.mark.parametrize("backend", MOST_WAYS)
def test_a_death_is_noticed_by_who_waits_for_somebody_else(crowd: Crowd, backend: str) -> None:
    crowd.start(members.an_onlooker_is_told, backend, 3)
    killed_at = crowd.kill(0)
    report = crowd.report(2, "at")
    assert report["at"] - killed_at < SOON
    assert report["message"].startswith("receive on rank 2: ")


@pytest.mark.parametrize("backend", ALL_WAYS)
def test_an_abort_ends_a_waiting_call_and_all_later_ones(crowd: Crowd, backend: str) -> None:
    crowd.start(members.one_aborts, backend, 2)
    aborter, late = crowd.report(0, "later"), crowd.report(1, "later")
    assert aborter["message"] == "all_gather on rank 0: it was aborted"
    assert aborter["after"] < SOON
    assert aborter["evidence"] == "aborted"
    assert late["message"].startswith("all_gather on rank 1: ")
    assert late["evidence"] in ("closed", "exited")  # the aborter's process may have ended by then
    assert late["seconds"] < SOON
    assert max(aborter["later"]["seconds"], late["later"]["seconds"]) < 0.1
    crowd.join()


@pytest.mark.parametrize("backend", MOST_WAYS)
def test_nothing_stays_of_many_epochs(crowd: Crowd, backend: str) -> None:
    crowd.start(members.many_epochs, backend, 3)
    crowd.join()


@pytest.mark.parametrize("backend", MOST_WAYS)
def test_who_does_not_come_is_named(crowd: Crowd, backend: str) -> None:
    crowd.start(members.one_does_not_come, backend, 2)
    waited = crowd.report(0, "at")
    assert waited["message"] == "all_to_all on rank 0: rank 1 did not come within 0.5 s"
    assert (waited["blamed"], waited["evidence"]) == (1, "deadline")
    assert 0.4 < waited["seconds"] < 0.5 + SOON
    assert crowd.report(1, "at")["seconds"] < SOON
    crowd.join()


@pytest.mark.parametrize("backend", ["tcp", "tcp_mixed", *UCX])
def test_who_is_stopped_is_named(crowd: Crowd, backend: str) -> None:
    crowd.start(members.one_is_stopped, backend, 3)
    for rank in range(3):
        crowd.report(rank, "ready")
    stopped = crowd.processes[1].pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    try:
        reports = [crowd.report(rank, "at") for rank in (0, 2)]
    finally:
        os.kill(stopped, signal.SIGCONT)
    assert [report["blamed"] for report in reports] == [1, 1]
    assert "deadline" in {report["evidence"] for report in reports}
    assert crowd.report(1, "at")["blamed"] == 1
    crowd.join()


@pytest.mark.parametrize("backend", ["shared_memory", "tcp", "tcp_mixed", *UCX])
def test_calls_that_do_not_belong_together_fail(crowd: Crowd, backend: str) -> None:
    crowd.start(members.different_calls, backend, 2)
    reports = [crowd.report(rank, "views") for rank in (0, 1)]
    messages = {report["message"] for report in reports}
    assert messages & {
        "all_reduce on rank 0: rank 1 calls all_gather_ints of 24 bytes",
        "all_gather_ints on rank 1: rank 0 calls all_reduce of 20 bytes",
    }
    for call, key in (("all_to_all", "sizes"), ("all_to_all_views", "views")):
        assert reports[1][key] == f"{call} on rank 1: rank 0 sends 4 bytes where 8 are expected"
    crowd.join()


@pytest.mark.parametrize("backend", BACKENDS)
def test_forming_ends_when_somebody_does_not_come(meeting: MeetingHost, backend: str) -> None:
    began = time.monotonic()
    with pytest.raises(CollectiveError, match=r"rank 1, 2 did not come within 0\.3 s") as caught:
        form(meeting, 8, 0, 3, backend, 0.3, group=f"nobody {backend}")
    assert caught.value.rank == 1
    assert time.monotonic() - began < 0.3 + SOON


@pytest.mark.parametrize("backend", BACKENDS)
def test_forming_can_be_stopped(meeting: MeetingHost, backend: str) -> None:
    stop = threading.Event()
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    with pytest.raises(CollectiveError, match="stopped from outside"):
        form(meeting, 9, 0, 2, backend, 20.0, group=f"stopped {backend}", should_stop=stop.is_set)
    assert time.monotonic() - began < 0.1 + SOON


ENDING = """
import sys, threading
from parallel.groups import form
from parallel.links.meeting import MeetingClient, MeetingHost
host = MeetingHost("127.0.0.1")
ways = [host, MeetingClient("127.0.0.1", host.port)]
groups = {}
def join(rank): groups[rank] = form(ways[rank], 1, rank, 2, sys.argv[1], 10.0)
threads = [threading.Thread(target=join, args=(rank,)) for rank in (0, 1)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(groups) == 2
threading.Thread(target=groups[0].all_gather_ints, args=([1],), daemon=True).start()
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_process_ends_well_without_closing_anything(backend: str) -> None:
    """Even while a thread of it still waits."""
    done = subprocess.run(
        [sys.executable, "-c", ENDING, backend],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "terminate" not in done.stderr


# ---- members on several hosts


SEVERAL_HOSTS = (("mixed_hosts", 3), ("mixed_hosts", 4), ("mixed_apart", 3), ("mixed_apart", 4))
"""Members of neighbouring ranks on one host, or on different ones."""


@pytest.mark.parametrize(
    ("backend", "size"),
    [
        pytest.param(backend, size, marks=[pytest.mark.nightly] * ((backend, size) in SEVERAL_HOSTS[::3]))
        for backend, size in SEVERAL_HOSTS
    ],
)
def test_every_method_gives_the_same_on_several_hosts(crowd: Crowd, backend: str, size: int) -> None:
    crowd.start(members.every_method, backend, size)
    crowd.join()


@pytest.mark.parametrize("backend", ["mixed_hosts", "mixed_apart"])
def test_sums_over_hosts_have_the_same_bits_whichever_way_they_take(crowd: Crowd, backend: str) -> None:
    crowd.start(members.sums_by_every_way, backend, 4)
    crowd.join()


@pytest.mark.nightly
@pytest.mark.parametrize("backend", ["mixed_hosts", "mixed_apart"])
def test_views_last_and_members_leave_early_on_several_hosts(crowd: Crowd, backend: str) -> None:
    crowd.start(members.slow_readers, backend, 4)
    crowd.join()
    crowd.start(members.uneven_paces, backend, 4)
    crowd.join()


@pytest.mark.parametrize("backend", ["mixed_hosts", "mixed_apart"])
def test_a_death_is_known_on_all_hosts(crowd: Crowd, backend: str) -> None:
    crowd.start(members.one_is_killed, backend, 3)
    killed_at = crowd.kill(1)
    for rank in (0, 2):
        report = crowd.report(rank, "again")
        assert report["at"] - killed_at < SOON
        assert report["blamed"] == 1
        assert report["evidence"] in ("exited", "closed")
        assert report["later"]["seconds"] < 0.1


def test_who_does_not_come_is_blamed_on_all_hosts(crowd: Crowd) -> None:
    crowd.start(members.one_of_several_does_not_come, "mixed_hosts", 4)
    crowd.join()


def test_all_hosts_know_soon_of_a_member_that_cannot_share_memory(crowd: Crowd) -> None:
    crowd.start(members.one_cannot_form, "mixed_hosts", 3)
    reports = [crowd.report(rank, "message") for rank in (0, 2)]
    assert re.fullmatch(r"forming the group: rank \d has aborted", reports[0]["message"])
    assert max(report["seconds"] for report in reports) < 2.0, "not only when the time for forming is over"
    crowd.join()


def test_another_call_is_known_on_all_hosts(crowd: Crowd) -> None:
    crowd.start(members.one_calls_something_else, "mixed_hosts", 4)
    reports = [crowd.report(rank, "message") for rank in range(4)]
    assert any("calls all_" in report["message"] for report in reports)
    assert {report["evidence"] for report in reports} == {"closed"}
    crowd.join()


@pytest.mark.nightly
def test_nothing_stays_of_many_epochs_on_several_hosts(crowd: Crowd) -> None:
    crowd.start(members.many_epochs, "mixed_hosts", 3)
    crowd.join()


# ---- the parts


@pytest.mark.parametrize("way", ["no compiler", "off"])
def test_without_native_collectives_python_does_the_same(
    meeting: MeetingHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    if way == "off":
        monkeypatch.setenv(native_links.OFF, "0")
        caplog.set_level("INFO")
    else:
        monkeypatch.setattr(shutil, "which", lambda _name: None)
    native_shared_memory_rounds.load.cache_clear()
    try:
        group = form(meeting, 11, 0, 1, "shared_memory", 5.0, group=way)
        assert torch.equal(group.all_reduce(torch.ones(3)), torch.ones(3))
        assert not group.is_native  # type: ignore[attr-defined]
        assert "native collectives: off, " in caplog.text.replace("off (", "off, (")
        group.close()
    finally:
        native_shared_memory_rounds.load.cache_clear()


def test_what_a_communicator_cannot_be_is_said(meeting: MeetingHost, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="rank 2 is not in a group of 2"):
        make_communicator("gloo", meeting, 2, 2, name="x", timeout=1.0)
    with pytest.raises(ValueError, match="choose gloo, shared_memory, tcp, ucx or mixed"):
        make_communicator("carrier pigeon", meeting, 0, 2, name="x", timeout=1.0)  # type: ignore[arg-type]
    monkeypatch.setattr(memory_order, "fence_here", lambda: None)
    with pytest.raises(ValueError, match="needs a compiled fence, and there is none"):
        make_communicator("shared_memory", meeting, 0, 2, name="x", timeout=1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_tensors_that_do_not_fit_the_sizes_are_refused_before_anything_is_sent(
    meeting: MeetingHost, backend: str
) -> None:
    group = form(meeting, 10, 0, 1, backend, 1.0, group=f"refusing {backend}")
    for call in (
        lambda: group.all_gather(torch.ones(3), [2]),
        lambda: group.reduce_scatter(torch.ones(3), [2]),
        lambda: group.all_to_all(torch.ones(3), [2], [3]),
        lambda: group.all_gather_view(torch.ones(3), [2]),
        lambda: group.all_to_all_views(torch.ones(3), [2], [3]),
    ):
        with pytest.raises(ValueError, match=re.escape("the sizes say 2 rows, the tensor is [3]")):
            call()
    with pytest.raises(ValueError, match=r"a group of 1 needs that many sizes, none negative, not \[-1\]"):
        group.all_gather(torch.ones(3), [-1])
    with pytest.raises(ValueError, match="3 rows for this member itself, 2 from it"):
        group.all_to_all(torch.ones(3), [3], [2])
    with pytest.raises(ValueError, match="CPU tensors only, not meta"):
        group.all_reduce(torch.ones(3, device="meta"))
    group.close()


def test_what_members_say_is_exchanged_by_rank(meeting: MeetingHost) -> None:
    meeting.set("member/1", b"the other")
    assert exchange(meeting, 0, 2, b"this one", timeout=1.0) == [b"this one", b"the other"]


def test_segments_of_elsewhere_and_of_the_dead_are_refused() -> None:
    own, watch = OwnSegment(8192), ProcessWatch()
    with pytest.raises(ValueError, match="rank 3 is elsewhere: use tcp"):
        open_segment(3, msgspec.structs.replace(own.address, host="another host"), 8192, watch)
    own.words[0] = 42
    assert open_segment(0, own.address, 8192, watch).words[0] == 42
    own.conceal()
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
        with pytest.raises(CollectiveError, match="rank 1 has died") as caught:
            open_segment(1, SegmentAddress(this_host(), ended.pid, 3, "lockstep"), 8192, watch)
    assert (caught.value.rank, caught.value.evidence) == (1, "exited")
    assert watch.dead() == []
    watch.close()


def test_a_number_that_is_another_files_by_now_is_no_segment() -> None:
    """Its owner lives, and has formed the group with others or given it up."""
    watch = ProcessWatch()

    def assert_given_up(rank: int, address: SegmentAddress, num_bytes: int) -> None:
        with pytest.raises(CollectiveError, match=f"rank {rank} has given it up") as caught:
            open_segment(rank, address, num_bytes, watch)
        assert (caught.value.rank, caught.value.evidence) == (rank, "closed")

    first = OwnSegment(8192)
    first.conceal()
    second = OwnSegment(8192)
    assert second.address.descriptor == first.address.descriptor
    assert_given_up(0, first.address, 8192)
    assert_given_up(1, second.address, 16384)
    second.conceal()
    assert_given_up(2, second.address, 8192)
    watch.close()


def test_a_watch_tells_who_has_ended_even_before_its_parent_knows() -> None:
    watch = ProcessWatch()
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as other:
        watch.add(4, one.pid)
        watch.add(2, other.pid)
        assert watch.dead() == []
        one.kill()
        deadline = time.monotonic() + 5
        while not watch.dead() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert watch.dead() == [4]
        other.kill()
    watch.close()


def test_a_watch_tells_who_is_ending_before_the_system_has_let_go_of_it() -> None:
    """A thread outlasts the first one, as a GPU's driver keeps a killed process."""
    end_of_thread = 93 if os.uname().machine == "aarch64" else 60
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
        f"ctypes.CDLL(None).syscall({end_of_thread}, 0)"
    )
    watch = ProcessWatch()
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        watch.add(4, process.pid)
        deadline = time.monotonic() + 20
        while not watch.dead() and time.monotonic() < deadline:
            time.sleep(0.001)
        assert watch.dead() == [4]
        descriptor = os.pidfd_open(process.pid)
        assert select.select([descriptor], [], [], 0)[0] == []
        os.close(descriptor)
        process.kill()
    watch.close()


@pytest.mark.parametrize("crowded", [True, False])
def test_patience_looks_until_the_word_is_there_or_the_check_objects(crowded: bool) -> None:
    word, patience = memoryview(bytearray(8)).cast("q"), SpinWait(crowded)
    checks: list[float] = []

    def check() -> None:
        checks.append(time.monotonic())
        if len(checks) == 3:
            word[0] = 5

    patience.wait(word, 5, check)
    assert len(checks) == 3

    def object_to_it() -> None:
        raise CollectiveError("no")

    with pytest.raises(CollectiveError):
        patience.wait(word, 6, object_to_it)
