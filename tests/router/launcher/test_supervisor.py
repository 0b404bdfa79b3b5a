"""How long processes may take to end before they are killed."""

from __future__ import annotations

import pytest

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
