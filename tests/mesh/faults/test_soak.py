"""A short soak with all its checks: hundreds of sleeps and wakes, not thousands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mesh.conftest import Mesh

SOAK = Path(__file__).parents[3] / "examples" / "benchmarks" / "soak.py"

MINUTES = 0.3

pytestmark = pytest.mark.mesh


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SOAK), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)


@pytest.mark.nightly
def test_bursts_and_gaps_lose_nothing(tmp_path: Path) -> None:
    """The bound of a step is wide, since a busy machine delays processes."""
    file = tmp_path / "soak.json"
    flags = ["--minutes", str(MINUTES), "--seed", "7", "--max-step-seconds", "5", "--rest-seconds", "4"]
    done = soak(*flags, "--output-json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    page = json.loads(file.read_text())
    assert page["failed"] == 0
    assert all(page["requests"][kind] > 30 * MINUTES for kind in ("stream", "whole", "left"))
    assert page["steps"]["0"] == page["steps"]["1"] > 1000 * MINUTES, "every step happens on both, or on none"
    assert page["sleeps"]["0"] == page["sleeps"]["1"] > 150 * MINUTES
    assert max(page["idle_cpu_share"].values()) < 0.01
    assert sum(page["steps_up_to_seconds"].values()) > 0


def test_a_step_over_the_bound_fails(mesh: Mesh) -> None:
    done = soak(
        "--base-url", mesh.url, "--minutes", "0.01", "--rest-seconds", "0.1", "--max-step-seconds", "0.0001"
    )
    assert done.returncode == 1
    assert "PROBLEM: a step took" in done.stdout


def test_a_mesh_that_is_not_there_is_said() -> None:
    done = soak("--base-url", "http://127.0.0.1:9", "--minutes", "0.01")
    assert done.returncode == 1
    assert "cannot be asked" in done.stderr
