"""The fork server, with real processes of a module that loads in no time."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from coordinator.process import process
from engine.host.forked import ForkServer, Unforked, is_possible
from tests.scarce import out_of_files
from tests.waiting import until

pytestmark = pytest.mark.skipif(not is_possible("cpu", 0), reason="only Linux forks")

PART = """
import json, os, sys, time
from engine.host import forked

def report():
    word = os.read(int(sys.argv[2]), 100).decode() if len(sys.argv) > 2 else ""
    said = {"argv": sys.argv[1:], "parent": os.getppid(), "word": word, "flavour": os.environ.get("FLAVOUR")}
    said["alone"] = os.getsid(0) == os.getpid()
    said["open"] = sorted(int(name) for name in os.listdir("/proc/self/fd"))
    print(json.dumps(said), flush=True)
    return 7

def fail():
    sys.exit("what is wrong")

def linger():
    time.sleep(600)

def parent():
    server = forked.inherited
    mine = dict(os.environ, LOCKSTEP_PARENT_PID=str(os.getpid()))
    child = server.fork("part:linger", [], mine)
    status = server.fork("part:report", [], mine, streams=(0, 2, 2)).wait(60)
    print(json.dumps([server.pid, child.pid, status, "part" in server.modules]), flush=True)
    time.sleep(600)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    (tmp_path / "part.py").write_text(PART)
    places = [str(tmp_path), str(Path(__file__).parents[3])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(places))
    for name, value in {"OMP_WAIT_POLICY": "PASSIVE", "PYTHONUNBUFFERED": "1"}.items():
        monkeypatch.setenv(name, value)
    made = ForkServer.start(["part", "no_such_module"])
    yield made
    made.close()


def ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, process.PARENT_VARIABLE: str(os.getpid()), **more}


def read(out: int) -> str:
    os.set_blocking(out, True)
    return os.read(out, 10_000).decode()


def test_a_forked_process_is_a_child_like_any_other(server: ForkServer) -> None:
    out, write = os.pipe()
    ours, theirs = socket.socketpair()
    ours.send(b"hello")
    child = server.fork(
        "part:report",
        ["one", str(theirs.fileno())],
        environment(FLAVOUR="sweet"),
        [theirs.fileno()],
        streams=(0, write, 2),
    )
    assert asyncio.run(child.ended()) == 7
    said = json.loads(read(out))
    assert said["argv"] == ["one", str(theirs.fileno())]
    assert said["word"] == "hello"
    assert said["flavour"] == "sweet"
    assert said["parent"] == os.getpid()
    assert len(said["open"]) == 5, "streams, what it inherits, and the directory that it looks at"
    assert said["alone"], "Ctrl-C in a terminal is not for it"
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, 0)
    for each in (out, write):
        os.close(each)
    ours.close()
    theirs.close()


def test_who_asks_knows_what_is_loaded(server: ForkServer) -> None:
    assert server.modules == {"part", "no_such_module"}, "what it was asked to load"


def test_a_fork_server_outlives_a_shortage_of_files(server: ForkServer) -> None:
    with out_of_files(), pytest.raises(Unforked, match="/dev/null cannot be opened: Too many open files"):
        server.fork("part:report", [], environment())
    assert not server.problem
    assert server.fork("part:report", [], environment()).wait(60) == 7


def test_what_no_message_can_hold_is_for_the_plain_way(server: ForkServer) -> None:
    """Bytes of an environment need not be UTF-8; others are forked all the same."""
    with pytest.raises(Unforked, match="UTF-8"):
        server.fork("part:report", [], environment(FLAVOUR=os.fsdecode(b"\xff")))
    assert not server.problem
    child = server.fork("part:fail", [], environment(), streams=(0, 1, 1))
    assert asyncio.run(child.ended()) != 0


def test_a_working_directory_that_is_gone_is_for_the_plain_way(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    with monkeypatch.context() as there:
        there.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        with pytest.raises(Unforked, match="the working directory is gone"):
            server.fork("part:report", [], environment())
    assert server.fork("part:report", [], environment()).wait(60) == 7


def test_what_it_says_last_and_its_status_are_those_of_a_python_program(server: ForkServer) -> None:
    out, write = os.pipe()
    assert server.fork("part:fail", [], environment(), streams=(0, 1, write)).wait(60) == 1
    assert read(out) == "what is wrong\n"
    assert server.fork("part:nothing", [], environment(), streams=(0, 1, write)).wait(60) == 1
    assert "AttributeError" in read(out)
    for each in (out, write):
        os.close(each)


def test_a_killed_one_says_so_and_can_be_waited_for(server: ForkServer) -> None:
    child = server.fork("part:linger", [], environment())
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.kill()
    assert child.wait(60) == child.poll() == -signal.SIGKILL
    child.terminate()  # harmless


def test_processes_outlive_the_server_that_made_them(server: ForkServer) -> None:
    child = server.fork("part:linger", [], environment())
    os.kill(server.pid, signal.SIGKILL)
    until(lambda: ended(server.pid))
    with pytest.raises(Unforked, match="lost"):
        server.fork("part:linger", [], environment())
    assert child.poll() is None
    child.terminate()
    assert child.wait(60) == -signal.SIGTERM


def test_libraries_see_the_environment_that_they_were_loaded_with(server: ForkServer) -> None:
    with pytest.raises(Unforked, match="OMP_WAIT_POLICY is not what"):
        server.fork("part:linger", [], environment(OMP_WAIT_POLICY="ACTIVE"))
    with pytest.raises(Unforked, match="HF_HOME is not what"):
        server.fork("part:linger", [], environment(HF_HOME="/elsewhere"))
    assert server.fork("part:report", [], environment(OMP_NUM_THREADS="7")).wait(60) == 7


def test_one_that_is_no_child_of_the_asker_never_runs(server: ForkServer) -> None:
    """A process of another parent is not run.

    It comes about when the asker has died, and the kernel gave its child a new parent.
    """
    other = environment(**{process.PARENT_VARIABLE: "1"})
    with pytest.raises(Unforked, match="did not become the asker's child"):
        server.fork("part:linger", [], other)
    assert server.fork("part:report", [], environment()).wait(60) == 7


def test_all_end_with_their_asker(server: ForkServer) -> None:
    """And one that was forked may fork in turn, from a server of its own."""
    out, write = os.pipe()
    middle = server.fork("part:parent", [], environment(), streams=(0, write, 2), branches=True)
    assert select.select([out], [], [], 60)[0]
    its_server, its_child, status, is_known = json.loads(read(out))
    assert status == 7
    assert is_known, "its server has what it was forked with"
    assert psutil.Process(its_server).ppid() == psutil.Process(its_child).ppid() == middle.pid
    middle.kill()
    assert middle.wait(60) == -signal.SIGKILL
    until(lambda: ended(its_child) and ended(its_server))
    for each in (out, write):
        os.close(each)


def test_a_fork_server_ends_with_its_asker(tmp_path: Path) -> None:
    code = (
        "import time; from engine.host.forked import ForkServer; "
        "print(ForkServer.start(['json']).pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as asker:
        assert asker.stdout is not None
        pid = int(asker.stdout.readline())
        asker.kill()
        until(lambda: ended(pid))


@pytest.mark.parametrize(
    ("device", "num_cuda_devices", "possible"),
    [("cpu", 0, True), ("cpu", 1, True), ("auto", 0, True), ("auto", 1, False), ("cuda", 1, False)],
)
def test_cuda_is_never_forked(device: str, num_cuda_devices: int, possible: bool) -> None:
    assert is_possible(device, num_cuda_devices) is possible


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_FORK_SERVER", "0")
    assert not is_possible("cpu", 0)
