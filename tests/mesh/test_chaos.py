"""A minute of `make chaos` with a fixed seed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.timeout(290),
    pytest.mark.skipif(
        "LOCKSTEP_CHAOS" not in os.environ,
        reason="set LOCKSTEP_CHAOS=1 to run it: behind other tests it fails now and then, for a reason not found yet",
    ),
]


def test_a_minute_of_deaths_stops_joins_and_leaves_loses_nothing() -> None:
    """Shorter than `make chaos` runs by hand, and with shorter prompts: machines that run tests are slow."""
    flags = ["--seed", "11", "--seconds", "60", "--longest", "300"]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.mesh.chaos", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as chaos:
        try:
            said, _ = chaos.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            chaos.send_signal(signal.SIGINT)  # it ends what it has started
            said, _ = chaos.communicate()
    assert chaos.returncode == 0, said
    assert "'kill'" in said
    assert "'right'" in said
