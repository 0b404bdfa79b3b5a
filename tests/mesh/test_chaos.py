"""A minute of `make chaos` with a fixed seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(290)]


def test_a_minute_of_deaths_stops_joins_and_leaves_loses_nothing() -> None:
    """Shorter than `make chaos` runs by hand, and with shorter prompts: machines that run tests are slow."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.mesh.chaos",
            "--seed",
            "11",
            "--seconds",
            "60",
            "--longest",
            "300",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'kill'" in done.stdout
    assert "'right'" in done.stdout
