from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from coordinator.membership.operations import ACCEPTED, FAILED
from coordinator.messages import Load, Member, Scale, State, View
from coordinator.process import process
from coordinator.settings import flags
from router.config import ServeConfig
from router.faults import FaultEvent
from router.launcher import restarts
from router.launcher.child_process import exit_status, spawn
from router.launcher.launch import Doors, ProcessSpec, process_table
from router.launcher.overseer import Overseer
from router.launcher.restarts import LONGEST_ABSENCE, MAX_INSTANCE_RESTARTS, QUICKLY_STEADY, STEADY, Restarts
from router.launcher.scaling import MachineCapacity
from router.launcher.serve import secret_file
from router.launcher.shutdown import Shutdown
from router.launcher.supervisor import Supervisor
from tests.waiting import PATIENCE, until_async

# ---- the rules


def test_pauses_grow_and_an_instance_is_given_up() -> None:
    restarts = Restarts(instances=True)
    delays = [restarts.after_end(1, "engine", 0.0) for _ in range(MAX_INSTANCE_RESTARTS + 1)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert restarts.after_end(2, "engine", 0.0) == 0.5, "others have their own row"


def test_steady_service_ends_a_row() -> None:
    restarts = Restarts(instances=True)
    assert [restarts.after_end(1, "engine", served) for served in (0.0, STEADY - 1, STEADY, 0.0)] == [
        0.5,
        1.0,
        0.5,
        1.0,
    ]


@pytest.mark.parametrize("role", ["router", "coordinator"])
def test_what_all_others_need_is_back_at_once_and_never_given_up(role: str) -> None:
    restarts = Restarts(instances=False)
    delays = [restarts.after_end(1, role, 1.0) for _ in range(2000)]
    assert delays[:4] == [0.0, 0.5, 1.0, 2.0]
    assert max(filter(None, delays)) == delays[-1] == LONGEST_ABSENCE
    assert restarts.after_end(1, role, QUICKLY_STEADY) == 0.0


@pytest.mark.parametrize(
    ("role", "status", "asked", "wanted"),
    [
        ("engine", -signal.SIGKILL, True, True),
        ("engine", process.EXIT_FAILED, True, True),
        ("engine", process.EXIT_HUNG, True, True),
        ("engine", -signal.SIGKILL, False, False),
        ("engine", 0, True, False),
        ("engine", process.EXIT_USAGE, True, False),
        ("engine", process.EXIT_REFUSED, True, False),
        ("router", 0, False, True),
        ("coordinator", process.EXIT_FAILED, False, True),
    ],
)
def test_who_is_started_again(role: str, status: int, asked: bool, wanted: bool) -> None:
    assert Restarts(instances=asked).wants(role, status) is wanted


def test_who_lost_its_rank_may_come_under_another() -> None:
    refused = process.EXIT_REFUSED
    assert Restarts(instances=True).wants("engine", refused, wanted_its_rank=True)
    assert not Restarts(instances=False).wants("engine", refused, wanted_its_rank=True)
    assert not Restarts(instances=True).wants("engine", process.EXIT_USAGE, wanted_its_rank=True)


# ---- with processes


SLEEP = "import time; time.sleep(60)"


class Script(ProcessSpec, frozen=True):
    """A process that runs a line of Python instead of a package."""

    code: str = SLEEP

    def command(self) -> list[str]:
        return [sys.executable, "-S", "-E", "-c", self.code]


def spec(name: str, role: str, rank: int | None = None, code: str = SLEEP, number: int = 0) -> Script:
    return Script(name=name, role=role, argv=(), address="", threads=1, rank=rank, code=code, number=number)


def pid_of(supervisor: Supervisor, name: str) -> int | None:
    return next(
        (child.process.pid for child in supervisor.children.running.values() if child.spec.name == name), None
    )


def member(rank: int, pid: int, host: str | None = None, state: State = State.READY) -> Member:
    return Member(
        instance=f"name-{pid}",
        rank=rank,
        state=state,
        phase="serving",
        address="tcp://a:1",
        host=host or socket.gethostname(),
        pid=pid,
        load=Load(),
    )


def view(*members: Member) -> View:
    return View(epoch=1, size=1, settings=None, members=list(members), waiting_for="")


def supervised(supervisor: Supervisor, act: Callable[[], Awaitable[None]]) -> int:
    """Run a supervisor, act once it is ready, end it; returns its exit status."""

    async def both() -> int:
        async def at_once() -> None:
            return

        running = asyncio.create_task(supervisor.run(at_once))
        await until_async(lambda: supervisor.ready)
        try:
            await act()
        finally:
            if not running.done():
                os.kill(os.getpid(), signal.SIGTERM)
        return await running

    return asyncio.run(both())


def test_a_killed_instance_comes_back_under_the_rank_that_it_was_given() -> None:
    supervisor = Supervisor(
        [spec("Engine", "engine", number=3), spec("Router", "router")],
        restart=True,
        engine_spec=lambda rank, number: spec(f"Engine_{rank}", "engine", rank, number=number),
    )
    losses: list[tuple[str, str]] = []
    supervisor.on_lost = lambda instance, how: losses.append((instance, how))

    async def act() -> None:
        pid = pid_of(supervisor, "Engine")
        assert pid is not None
        supervisor.learn(view(member(7, pid), member(8, pid, host="elsewhere")))
        assert supervisor.children.ranks == [7]
        assert supervisor.children.num_serving == 1
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: pid_of(supervisor, "Engine_7"))
        assert supervisor.children.ranks == [7]
        assert [child.spec.number for child in supervisor.children.of_role("engine")] == [3]
        assert losses == [(f"name-{pid}", "was killed by signal 9 (SIGKILL: out of memory?)")]
        counts = supervisor.faults.counts
        assert counts == {FaultEvent.DETECTION: {"process_exit": 1}, FaultEvent.RESTART: {"engine": 1}}

    assert supervised(supervisor, act) == 0


def test_an_instance_that_is_ending_is_reported_before_the_system_has_let_go_of_it() -> None:
    """A thread outlasts the first one, as a GPU's driver keeps a killed process."""
    end_of_thread = 93 if os.uname().machine == "aarch64" else 60
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); "
        f"ctypes.CDLL(None).syscall({end_of_thread}, 3)"
    )
    supervisor = Supervisor([spec("Engine", "engine", code=code), spec("Router", "router")])
    losses: list[tuple[str, str]] = []
    supervisor.on_lost = lambda instance, how: losses.append((instance, how))

    async def act() -> None:
        pid = pid_of(supervisor, "Engine")
        assert pid is not None
        supervisor.learn(view(member(0, pid)))
        await until_async(lambda: losses)
        assert pid_of(supervisor, "Engine") == pid, "the system has not let go of it"
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: pid_of(supervisor, "Engine") is None)
        assert losses == [(f"name-{pid}", "ended with status 3")]

    supervised(supervisor, act)


def test_an_instance_whose_rank_was_taken_meanwhile_comes_back_under_any() -> None:
    refused = f"raise SystemExit({process.EXIT_REFUSED})"
    asked = list[int | None]()

    def again(rank: int | None, number: int) -> Script:
        asked.append(rank)
        return spec("Engine", "engine", rank, SLEEP if len(asked) == 2 else refused, number)

    supervisor = Supervisor(
        [spec("Engine_0", "engine", 0), spec("Engine_1", "engine", 1, number=1)],
        restart=True,
        engine_spec=again,
    )

    async def act() -> None:
        pid = pid_of(supervisor, "Engine_1")
        assert pid is not None
        supervisor.learn(view(member(1, pid)))
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: len(asked) == 2 and pid_of(supervisor, "Engine"))
        assert asked == [1, None]
        (child,) = [each for each in supervisor.children.running.values() if each.spec.name == "Engine"]
        assert (child.spec.number, child.returns) == (1, False)

    assert supervised(supervisor, act) == 0


def test_a_start_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever killed a process may leave no memory for its successor, for a while."""
    supervisor = Supervisor([spec("Coordinator", "coordinator"), spec("Engine_0", "engine", 0)])
    failed = 0

    async def spawn_late(*args: Any) -> Any:
        nonlocal failed
        if failed < 2:
            failed += 1
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return await spawn(*args)

    async def act() -> None:
        pid = pid_of(supervisor, "Coordinator")
        assert pid is not None
        monkeypatch.setattr("router.launcher.starter.spawn", spawn_late)
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: pid_of(supervisor, "Coordinator") not in (None, pid))
        assert failed == 2

    assert supervised(supervisor, act) == 0


def test_workers_of_an_instance_elsewhere_that_served_for_long_begin_a_new_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No view has the time since which they serve."""
    monkeypatch.setattr(restarts, "STEADY", 0.2)
    monkeypatch.setattr(restarts, "FIRST_DELAY", 0.01)
    ends = f"import time; time.sleep(0.3); raise SystemExit({process.EXIT_WORKER_LOST})"
    node = msgspec.structs.replace(spec("Node_1", "engine", code=ends), module="engine.executor.nodes")
    supervisor = Supervisor([node], restart=True)

    async def act() -> None:
        await until_async(
            lambda: (
                supervisor.faults.counts.get(FaultEvent.RESTART, {}).get("engine", 0) > MAX_INSTANCE_RESTARTS
            )
        )

    supervised(supervisor, act)


def test_a_head_without_an_endpoint_stays_while_instances_elsewhere_serve() -> None:
    """Head of an ``LLM``, whose requests continue on instances elsewhere."""
    supervisor = Supervisor([spec("Coordinator", "coordinator"), spec("Engine_0", "engine", 0)])

    async def act() -> None:
        pid = pid_of(supervisor, "Engine_0")
        assert pid is not None
        supervisor.learn(view(member(0, pid), member(1, 1, host="elsewhere")))
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: not supervisor.children.of_role("engine"))
        assert pid_of(supervisor, "Coordinator") is not None
        assert not supervisor.problem

    assert supervised(supervisor, act) == 0


def test_instances_that_cannot_be_started_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Supervisor([spec("Coordinator", "coordinator"), spec("Engine_0", "engine", 0)])

    async def fail(table: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(supervisor, "_start_forked", fail)

    async def never() -> None:
        await asyncio.Event().wait()

    assert asyncio.run(supervisor.run(never)) == process.EXIT_FAILED
    assert "temporarily unavailable" in supervisor.problem


def test_an_instance_that_drains_is_no_longer_ours_though_its_process_lives() -> None:
    supervisor = Supervisor([spec("Engine_0", "engine", 0), spec("Router", "router")], restart=True)

    async def act() -> None:
        pid = pid_of(supervisor, "Engine_0")
        assert pid is not None
        supervisor.learn(view(member(0, pid)))
        assert supervisor.children.ranks == [0]
        supervisor.learn(view())
        assert supervisor.children.ranks == [], "it left in a hurry"
        supervisor.learn(view(member(0, pid)))
        assert supervisor.children.ranks == [0], "or the coordinator was away"
        supervisor.learn(view(member(0, pid, state=State.DRAINING)))
        assert supervisor.children.ranks == []
        supervisor.learn(view())
        assert supervisor.children.ranks == []
        os.kill(pid, signal.SIGKILL)
        await until_async(lambda: not supervisor.children.of_role("engine"))
        assert FaultEvent.RESTART not in supervisor.faults.counts, "it was on its way out"

    supervised(supervisor, act)


def test_asked_twice_for_fewer_as_many_go_as_once() -> None:
    """The world shows them as ready until their next step has ended."""
    supervisor = Supervisor(
        [*(spec(f"Engine_{rank}", "engine", rank) for rank in range(3)), spec("Router", "router")],
        engine_spec=lambda rank, number: spec(f"Engine_{rank}", "engine", rank, number=number),
    )

    async def act() -> None:
        pids = [pid_of(supervisor, f"Engine_{rank}") for rank in range(3)]
        world = view(*(member(rank, pid) for rank, pid in enumerate(pids) if pid is not None))
        world = msgspec.structs.replace(world, mesh="m")
        overseer = Overseer("tcp://127.0.0.1:1", "m", supervisor, MachineCapacity(devices=None, cores=4))
        supervisor.learn(world)
        overseer._watcher.take(world)
        texts = [(await overseer._on_scale(Scale(command=name, size=2))).text for name in ("a", "b")]
        assert texts == ["draining instance 2", "there is nothing to do"]
        assert (supervisor.children.ranks, supervisor.children.leaving) == ([0, 1], [f"name-{pids[2]}"])
        overseer._watcher._connection.close(linger_ms=0)

    assert supervised(supervisor, act) == 0


def test_a_wish_to_scale_fails_when_an_instance_that_it_counts_on_is_lost() -> None:
    """Its reason has the exit status, and the last error of the process."""
    refused = (
        "import logging; from coordinator.process.last_error import LastErrorHandler; "
        f"logging.getLogger().addHandler(LastErrorHandler()); logging.error('it differs from the mesh'); raise SystemExit({process.EXIT_REFUSED})"
    )
    supervisor = Supervisor(
        [spec("Engine_0", "engine", 0), spec("Engine_1", "engine", 1), spec("Router", "router")],
        engine_spec=lambda rank, number: spec(f"Engine_{rank}", "engine", rank, refused, number=number),
    )

    async def act() -> None:
        pids = [pid_of(supervisor, f"Engine_{rank}") for rank in range(2)]
        world = view(*(member(rank, pid) for rank, pid in enumerate(pids) if pid is not None))
        world = msgspec.structs.replace(world, mesh="m")
        overseer = Overseer("tcp://127.0.0.1:1", "m", supervisor, MachineCapacity(devices=None, cores=4))
        supervisor.learn(world)
        overseer._watcher.take(world)
        grows = Scale(command="grows", size=3)
        begun = await overseer._on_scale(grows)
        assert (begun.status, begun.text) == (ACCEPTED, "starting instance 2")
        started = pid_of(supervisor, "Engine_2")
        await until_async(lambda: pid_of(supervisor, "Engine_2") is None)
        lost = await overseer._on_scale(grows)
        text = f"Engine_2 (pid {started}) ended with status 3: it differs from the mesh"
        assert (lost.command, lost.status, lost.text) == ("grows", FAILED, text)
        stays = Scale(command="stays", size=2)
        assert [(await overseer._on_scale(stays)).status for _ in range(2)] == [ACCEPTED] * 2, "an older loss"
        supervisor.retire([1])
        await until_async(lambda: pid_of(supervisor, "Engine_1") is None)
        assert (await overseer._on_scale(stays)).status == ACCEPTED, "it was ordered to go"
        overseer._watcher._connection.close(linger_ms=0)

    assert supervised(supervisor, act) == 0


def test_refused_and_drained_instances_stay_away_and_the_head_stays_for_others() -> None:
    refused = f"import time; time.sleep(0.3); raise SystemExit({process.EXIT_REFUSED})"
    supervisor = Supervisor(
        [spec("Engine_0", "engine", 0), spec("Engine_1", "engine", 1, refused), spec("Router", "router")],
        restart=True,
        engine_spec=lambda rank, number: spec(f"Engine_{rank}", "engine", rank, number=number),
    )

    async def act() -> None:
        await until_async(lambda: pid_of(supervisor, "Engine_1") is None)
        assert supervisor.children.ranks == [0]
        await supervisor.grow([1, 2])
        assert supervisor.children.ranks == [0, 1, 2]
        assert sorted(child.spec.number for child in supervisor.children.of_role("engine")) == [0, 1, 2]
        supervisor.learn(view(member(5, 1, host="elsewhere")))
        supervisor.retire([0, 1, 2])
        assert supervisor.children.ranks == []
        await until_async(lambda: not supervisor.children.of_role("engine"))
        assert pid_of(supervisor, "Router") is not None
        assert FaultEvent.RESTART not in supervisor.faults.counts

    assert supervised(supervisor, act) == 0


def test_the_end_of_the_last_instance_is_the_end_of_a_serve_that_nobody_else_joined() -> None:
    supervisor = Supervisor([spec("Engine_0", "engine", 0), spec("Router", "router")])

    async def act() -> None:
        pid = pid_of(supervisor, "Engine_0")
        assert pid is not None
        supervisor.learn(view(member(0, pid)))
        os.kill(pid, signal.SIGKILL)
        await until_async(supervisor._ended.is_set)

    assert supervised(supervisor, act) == exit_status(-signal.SIGKILL) == 137


def test_told_twice_to_end_the_coordinator_goes_last_all_the_same(tmp_path: Path) -> None:
    """Processes that leave still need the coordinator."""
    coordinator = (
        "import pathlib, signal, sys, time\n"
        f"file = pathlib.Path({str(tmp_path / 'coordinator')!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (file.write_text(str(time.monotonic())), sys.exit(0)))\n"
        "file.write_text('')\n"
        "time.sleep(60)"
    )
    engine = (
        "import pathlib, signal, sys, time\n"
        f"file = pathlib.Path({str(tmp_path / 'engine')!r})\n"
        "def end(*_):\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    time.sleep(0.5)\n"
        "    file.write_text(str(time.monotonic()))\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        "file.write_text('')\n"
        "time.sleep(60)"
    )
    supervisor = Supervisor(
        [spec("Coordinator", "coordinator", code=coordinator), spec("Engine_0", "engine", 0, engine)]
    )

    async def act() -> None:
        await until_async(lambda: (tmp_path / "coordinator").exists() and (tmp_path / "engine").exists())
        os.kill(os.getpid(), signal.SIGTERM)
        await until_async(lambda: supervisor.stopping)
        os.kill(os.getpid(), signal.SIGTERM)
        await until_async(lambda: pid_of(supervisor, "Engine_0") is None)

    assert supervised(supervisor, act) == 0
    ended = {name: float((tmp_path / name).read_text()) for name in ("engine", "coordinator")}
    assert ended["engine"] < ended["coordinator"]


def test_a_router_that_is_started_again_finds_the_connections_that_waited() -> None:
    """The listening socket outlives its process, and so does what is queued there."""
    serve_one = (
        "import socket, sys, time\n"
        "door = socket.socket(fileno=int(sys.argv[1])); door.listen(8)\n"
        "caller, _ = door.accept(); caller.sendall(b'hello'); time.sleep(60)"
    )

    class Door(Script, frozen=True):
        def command(self) -> list[str]:
            return [*super().command(), str(self.descriptors[0])]

    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.set_inheritable(True)
        router = Door(
            name="Router", role="router", argv=(), address="", threads=1, code=serve_one,
            descriptors=(door.fileno(),),
        )  # fmt: skip
        supervisor = Supervisor([router, spec("Engine_0", "engine", 0)], shutdown=Shutdown(sockets=[door]))

        def connect() -> socket.socket:
            return socket.create_connection(door.getsockname(), timeout=10)

        def first() -> socket.socket | None:
            try:
                return connect()
            except ConnectionRefusedError:
                return None

        async def act() -> None:
            callers: list[socket.socket] = []
            await until_async(lambda: (caller := first()) is not None and (callers.append(caller) or True))
            assert await asyncio.to_thread(callers[0].recv, 10) == b"hello"
            pid = pid_of(supervisor, "Router")
            assert pid is not None
            with connect() as waiting, callers[0]:
                os.kill(pid, signal.SIGKILL)
                assert await asyncio.to_thread(waiting.recv, 10) == b"hello", "the successor took it"

        assert supervised(supervisor, act) == 0


def test_a_router_that_is_started_again_has_its_keys() -> None:
    config = flags.parse(ServeConfig, ["--api-key", "secret"], prog="serve", description="")
    descriptor = secret_file(config)
    assert descriptor is not None
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        door.set_inheritable(True)
        doors = Doors(http=door.fileno(), secrets=descriptor)
        (router,) = [each for each in process_table(config, None, 1, "", doors) if each.role == "router"]
        supervisor = Supervisor([router, spec("Engine_0", "engine", 0)], shutdown=Shutdown(sockets=[door]))
        url = f"http://127.0.0.1:{door.getsockname()[1]}/v1/models"

        def statuses() -> list[int]:
            """Statuses with the key and with another, once a server answers."""
            headers = ({"authorization": "Bearer secret"}, {"authorization": "Bearer other"})
            deadline = time.monotonic() + PATIENCE
            while time.monotonic() < deadline:
                with contextlib.suppress(httpx2.TransportError):
                    return [httpx2.get(url, headers=each, trust_env=False).status_code for each in headers]
                time.sleep(0.05)
            return []

        async def act() -> None:
            for _ in range(2):
                assert await asyncio.to_thread(statuses) == [503, 401], "nobody serves"
                pid = pid_of(supervisor, router.name)
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                await until_async(lambda killed=pid: pid_of(supervisor, router.name) not in (None, killed))

        assert supervised(supervisor, act) == 0
    os.close(descriptor)
