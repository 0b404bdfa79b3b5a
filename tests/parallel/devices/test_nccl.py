"""The communicator of devices over a stand-in for NCCL, where no host waits."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from coordinator.process import process
from parallel.communicators import nccl
from parallel.communicators.base import CollectiveError, carries
from parallel.communicators.nccl import NcclCommunicator, NcclWire
from parallel.communicators.renewable import RenewableCommunicator
from tests.parallel.thread_group import ThreadCommunicator, thread_group
from tests.waiting import until

CUDA = torch.device("cuda", 0)


class Work:
    def __init__(self) -> None:
        self.done = threading.Event()

    def wait(self) -> None:
        """The stream waits, not the host."""

    def is_completed(self) -> bool:
        return self.done.is_set()


class Group:
    """What is called of torch's group, and in which order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.works: list[Work] = []

    def _start_coalescing(self, device: torch.device) -> None:
        self.calls.append("start")

    def _end_coalescing(self, device: torch.device) -> Work:
        self.calls.append("end")
        self.works.append(Work())
        return self.works[-1]

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(f"send {tensors[0].numel()} to {peer}")

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.calls.append(f"receive {tensors[0].numel()} from {peer}")


class Made:
    """A member of rank 0 over a stand-in, and what was called to end it."""

    def __init__(self, size: int = 2, timeout: float = 0.2, end: Callable[[], None] = lambda: None) -> None:
        self.group = Group()
        self.ended: list[str] = []
        self.stuck: list[str] = []

        def abort() -> None:
            self.ended.append("abort")
            end()

        self.wire = NcclWire(
            self.group,
            processes={},
            end=abort,
            shut_down=lambda: self.ended.append("shutdown"),
            device=CUDA,
            on_stuck=self.stuck.append,
        )
        cpu = torch.device("cpu")
        self.communicator = NcclCommunicator(
            0, size, timeout=timeout, wire=self.wire, device=cpu, processes={}
        )


@pytest.fixture(autouse=True)
def _no_capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(nccl, "END_SECONDS", 0.2)
    return


def test_a_call_is_launched_as_one_and_not_waited_for() -> None:
    made = Made(size=3, timeout=20.0)
    made.communicator.all_gather(torch.ones(2), [2, 0, 1])
    assert made.group.calls == ["start", "receive 1 from 2", "send 2 to 1", "send 2 to 2", "end"]
    made.communicator.all_gather(torch.ones(0), [0, 0, 0])
    assert len(made.group.works) == 1, "of nothing there is no call"
    for work in made.group.works:
        work.done.set()
    made.communicator.close()
    assert made.ended == ["shutdown"]


def test_what_does_not_end_in_time_is_aborted_and_later_calls_fail() -> None:
    made = Made()
    broken: list[CollectiveError] = []
    made.communicator.on_broken = broken.append
    began = time.monotonic()
    made.communicator.all_reduce(torch.ones(2))
    until(lambda: made.ended == ["abort"])
    assert 0.2 <= time.monotonic() - began < 2.0
    with pytest.raises(
        CollectiveError, match=r"all_reduce on rank 0: rank 1 did not come within 0\.2 s"
    ) as error:
        made.communicator.all_reduce(torch.ones(2))
    assert (error.value.rank, error.value.evidence) == (1, "deadline")
    until(lambda: [each.rank for each in broken] == [1])
    made.communicator.close()
    assert made.ended == ["abort"]


def test_a_step_that_broke_is_worth_nothing() -> None:
    """Replays of captured calls are watched as a step.

    It comes out when the group is aborted."""
    released = threading.Event()
    made = Made(size=3, end=released.set)
    with (
        pytest.raises(CollectiveError, match=r"a step on rank 0: a member did not come within 0\.2 s"),
        made.communicator.watched(),
    ):
        assert released.wait(5.0), "the device would wait for ever"
    made.communicator.close()
    alone = NcclCommunicator(0, 1, timeout=1.0, wire=None, device=CUDA, processes={})
    with alone.watched():
        pass


def test_captured_calls_have_no_deadline_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(timeout=0.05)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    made.communicator.all_reduce(torch.ones(2))
    time.sleep(0.2)
    assert made.ended == []
    made.communicator.close()


def test_an_abort_that_hangs_holds_nobody() -> None:
    hangs = threading.Event()
    made = Made(timeout=20.0, end=lambda: hangs.wait(20.0) and None)
    began = time.monotonic()
    made.communicator.abort()
    assert time.monotonic() - began < 2.0
    assert made.stuck == ["it was aborted"]
    with pytest.raises(CollectiveError, match="it was aborted"):
        made.communicator.all_reduce(torch.ones(1))
    hangs.set()
    made.communicator.close()


STUCK = """
import logging, threading, torch
from parallel.communicators import nccl
logging.basicConfig()
nccl.END_SECONDS = 0.2
end = {end}
wire = nccl.NcclWire(None, processes={{}}, end=end, shut_down=end, device={device})
wire.cut("a peer is lost")
print("goes on")
"""


@pytest.mark.parametrize(
    ("end", "device", "status"),
    [
        ("threading.Event().wait", 'torch.device("cuda", 0)', process.EXIT_HUNG),
        ("threading.Event().wait", "None", 0),
        ("lambda: None", 'torch.device("cuda", 0)', 0),
    ],
    ids=["hangs", "on a CPU", "in order"],
)
def test_a_process_whose_abort_hangs_ends(end: str, device: str, status: int) -> None:
    """A group formed anew would wait for a stream that the old one holds."""
    script = STUCK.format(end=end, device=device)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "goes on" in done.stdout) == (status, status == 0), done.stderr
    assert ("the abort of an NCCL group hangs (a peer is lost)" in done.stderr) == (status != 0)


def test_the_end_waits_for_what_was_launched() -> None:
    made = Made(timeout=20.0)
    made.communicator.all_reduce(torch.ones(2))
    threading.Timer(0.1, made.group.works[0].done.set).start()
    made.communicator.close()
    assert made.group.works[0].done.is_set()
    assert made.ended == ["shutdown"]


def test_what_is_on_the_cpu_goes_through_the_host_whose_end_is_the_end() -> None:
    hosts = thread_group(2)
    ended = threading.Event()
    wire = NcclWire(Group(), processes={}, end=ended.set, shut_down=ended.set, device=CUDA)
    member = NcclCommunicator(
        0, 2, timeout=20.0, wire=wire, device=torch.device("meta"), processes={}, host=hosts[0]
    )
    results: list[torch.Tensor] = []

    def other(host: ThreadCommunicator) -> None:
        host.all_gather_ints([2])
        results.append(host.all_reduce(torch.ones(3)))

    thread = threading.Thread(target=other, args=(hosts[1],))
    thread.start()
    assert member.all_gather_ints([1]) == [[1], [2]]
    assert torch.equal(member.all_reduce(torch.ones(3)), torch.full((3,), 2.0))
    thread.join()
    renewable = RenewableCommunicator(member)
    for group in (member, renewable):
        assert carries(group, torch.ones(1))
        assert carries(group, torch.ones(1, device="meta"))
    assert not carries(hosts[1], torch.ones(1, device="meta"))
    broken: list[CollectiveError] = []
    member.on_broken = broken.append
    assert hosts[0].on_broken is not None
    hosts[0].on_broken(CollectiveError("rank 1 has died", 1, "exited"))
    assert ended.is_set()
    assert [each.rank for each in broken] == [1]
    with pytest.raises(CollectiveError, match="rank 1 has died"):
        member.all_reduce(torch.ones(1, device="meta"))
    member.close()


def test_the_thread_that_watches_uses_the_device_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it would make a context on the first device.

    Another rank has counted on that memory.
    """
    used: list[tuple[str, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: used.append((threading.current_thread().name, device))
    )
    device = torch.device("cuda", 1)
    wire = NcclWire(object(), processes={}, end=lambda: None, shut_down=lambda: None, device=device)
    wire.leave()
    assert used == [("nccl-watch", device)]
