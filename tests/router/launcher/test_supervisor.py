"""How a launcher ends: its status, its log, and the time that its processes have."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from router.launcher.shutdown import STOP_TIMEOUT, Shutdown
from router.launcher.supervisor import Supervisor


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
    shutdown = Shutdown(drain_timeout=120.0, shutdown_timeout=40.0)
    assert shutdown.patience(role, is_head=is_head) == STOP_TIMEOUT + seconds


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


@pytest.mark.parametrize(
    ("roles", "is_ready", "line"),
    [
        (("engine", "router"), False, "shutting down before the mesh is ready"),
        (("engine", "router"), True, "shutting down: requests may run for 40 s more (--shutdown-timeout)"),
        (("engine",), True, "shutting down: instances drain for at most 120 s (--drain-timeout)"),
        ((), True, "shutting down"),
    ],
)
def test_the_time_that_requests_have_is_logged_where_it_is_known(
    roles: tuple[str, ...], is_ready: bool, line: str
) -> None:
    shutdown = Shutdown(drain_timeout=120.0, shutdown_timeout=40.0)
    assert shutdown.log_line(roles, is_ready=is_ready) == line
