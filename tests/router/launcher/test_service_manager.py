"""Messages to a service manager, over a real socket, and what counts as progress."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.messages import Load, Member, State
from router.launcher.service_manager import (
    STALL_LIMIT,
    LauncherStatus,
    ServiceManager,
    makes_progress,
    status_line,
)


def member(state: State = State.READY, stalled_for: float = 0.0, running: int = 0) -> Member:
    load = Load(running=running, stalled_for=stalled_for)
    return Member(instance="a", rank=0, state=state, phase="", address="", host="alpha", pid=7, load=load)


STUCK = member(stalled_for=STALL_LIMIT)


@pytest.mark.parametrize(
    ("members", "makes"),
    [
        ([], True),
        ([member()], True),
        ([STUCK], False),
        ([STUCK, STUCK], False),
        ([STUCK, member(stalled_for=STALL_LIMIT - 1)], True),
        ([STUCK, member(State.LOADING)], False),
        ([member(State.LOADING)], True),
        ([member(State.DRAINING, stalled_for=STALL_LIMIT)], False),
    ],
)
def test_progress_means_that_an_instance_with_work_steps(members: list[Member], makes: bool) -> None:
    assert makes_progress(LauncherStatus(ready=True, stopping=False, members=members)) is makes


def test_status_line_counts_instances_and_requests() -> None:
    members = [member(running=3), member(State.LOADING)]
    assert (
        status_line(LauncherStatus(True, False, members))
        == "1 of 2 local instances ready, 3 requests running, 0 waiting"
    )
    assert status_line(LauncherStatus(False, False, members)) == "starting: 1 of 2 local instances ready"
    assert status_line(LauncherStatus(True, True, members)) == "stopping: requests finish"


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind(str(tmp_path / "notify"))
        bound.setblocking(False)
        yield bound


def received(listener: socket.socket) -> list[str]:
    found: list[str] = []
    try:
        while True:
            found += listener.recv(4096).decode().split("\n")
    except BlockingIOError:
        return found


def test_ready_and_stopping_are_sent_once_and_pings_while_there_is_progress(listener: socket.socket) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": listener.getsockname(), "WATCHDOG_USEC": "3000000"})
    manager.tell(LauncherStatus(False, False))
    assert received(listener) == ["STATUS=starting: 0 of 0 local instances ready", "WATCHDOG=1"]
    manager.tell(LauncherStatus(True, False, [member()]))
    assert "READY=1" in received(listener)
    manager.tell(LauncherStatus(True, False, [member()]))
    assert received(listener) == ["WATCHDOG=1"]
    manager.tell(LauncherStatus(True, False, [STUCK]))
    assert received(listener) == []
    manager.tell(LauncherStatus(True, True, [STUCK]))
    assert received(listener) == ["STATUS=stopping: requests finish", "STOPPING=1"]


@pytest.mark.parametrize(
    "watchdog",
    [{}, {"WATCHDOG_USEC": "0"}, {"WATCHDOG_USEC": "x"}, {"WATCHDOG_USEC": "9", "WATCHDOG_PID": "1"}],
)
def test_without_a_watchdog_of_ours_nothing_is_pinged(
    watchdog: dict[str, str], listener: socket.socket
) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": listener.getsockname(), **watchdog})
    manager.tell(LauncherStatus(True, False, [member()]))
    assert "WATCHDOG=1" not in received(listener)


def test_a_name_of_the_abstract_namespace_begins_with_an_at_sign() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.bind("")  # Linux chooses an abstract name
        bound.setblocking(False)
        ServiceManager({"NOTIFY_SOCKET": "@" + bound.getsockname()[1:].decode()}).tell(
            LauncherStatus(True, False)
        )
        assert "READY=1" in received(bound)


def test_progress_file_is_there_while_the_mesh_serves_and_touched_while_it_makes_progress(
    tmp_path: Path,
) -> None:
    file = tmp_path / "progress"
    file.touch()  # of a process that was killed
    manager = ServiceManager({"LOCKSTEP_PROGRESS_FILE": str(file)})
    manager.tell(LauncherStatus(False, False))
    assert not file.exists()
    manager.tell(LauncherStatus(True, False, [member()]))
    os.utime(file, (0, 0))
    manager.tell(LauncherStatus(True, False, [STUCK]))
    assert file.stat().st_mtime == 0
    manager.tell(LauncherStatus(True, False, [member()]))
    assert file.stat().st_mtime > 0
    manager.tell(LauncherStatus(True, True, [member()]))
    assert not file.exists()


def test_without_a_service_manager_or_with_one_that_is_away_nothing_happens(tmp_path: Path) -> None:
    asyncio.run(ServiceManager({}).keep(lambda: pytest.fail("nobody asks")))
    ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "away")}).tell(LauncherStatus(True, False))
