"""How a launcher ends: its status, its log, and the time that its processes have."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from router.launcher.launch import ProcessSpec
from router.launcher.supervisor import STOP_TIMEOUT, Supervisor


@pytest.mark.parametrize(
    ("role", "is_head", "seconds"),
    [
        ("router", True, 40.0),
        ("engine", True, 0.0),  # its routers have ended, and with them all requests
        ("engine", False, 120.0),
        ("coordinator", True, 0.0),
    ],
)
def test_processes_get_the_time_that_flags_give_to_their_requests(
    role: str, is_head: bool, seconds: float
) -> None:
    supervisor = Supervisor([], drain_timeout=120.0, shutdown_timeout=40.0)
    assert supervisor._patience(role, is_head) == STOP_TIMEOUT + seconds


@pytest.mark.parametrize(
    ("number", "is_ready", "status"),
    [(signal.SIGINT, False, 130), (signal.SIGINT, True, 0), (signal.SIGTERM, False, 0)],
)
def test_ctrl_c_while_a_mesh_loads_is_an_interruption(
    number: signal.Signals, is_ready: bool, status: int
) -> None:
    async def ended() -> int:
        supervisor = Supervisor([])

        async def until_ready() -> None:
            loop = asyncio.get_running_loop()
            if is_ready:
                loop.call_later(0, lambda: loop.call_soon(os.kill, os.getpid(), number))
                return
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()

        return await supervisor.run(until_ready)

    assert asyncio.run(ended()) == status


def spec(role: str) -> ProcessSpec:
    return ProcessSpec(role=role, name=role, argv=(), address="", threads=1)


@pytest.mark.parametrize(
    ("roles", "is_ready", "line"),
    [
        (("engine", "router"), False, "ends before the mesh is ready"),
        (("engine", "router"), True, "ends: requests may run for 40 s more (--shutdown-timeout)"),
        (("engine",), True, "ends: instances drain for at most 120 s (--drain-timeout)"),
        ((), True, "ends"),
    ],
)
def test_the_time_that_requests_have_is_logged_where_it_is_known(
    roles: tuple[str, ...], is_ready: bool, line: str
) -> None:
    supervisor = Supervisor(list(map(spec, roles)), drain_timeout=120.0, shutdown_timeout=40.0)
    supervisor.ready = is_ready
    assert supervisor._end_line() == line
