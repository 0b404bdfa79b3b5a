"""Some of `make chaos` with a fixed seed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mesh.faults.chaos import KINDS
from tests.nightly import NIGHTLY

ROOT = Path(__file__).parents[3]
SEED = 11
SECONDS = 600 if NIGHTLY else 25
"""Seconds of chaos.

Starting, asking for the truth and coming to rest take about half as long again, on a busy machine longer than
that.
"""
PATIENCE = 1500 if NIGHTLY else 700
"""Seconds for all of it."""

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(PATIENCE + 90)]


def test_deaths_stops_joins_and_leaves_lose_nothing(tmp_path: Path) -> None:
    """Shorter than ``make chaos``, with shorter prompts, since test machines are slow."""
    output = tmp_path / "chaos.json"
    flags = ["--seed", str(SEED), "--seconds", str(SECONDS), "--longest", "300", "--output-json", str(output)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.mesh.faults.chaos", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as chaos:
        try:
            said, _ = chaos.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            chaos.send_signal(signal.SIGINT)  # it ends what it has started
            said, _ = chaos.communicate()
    assert chaos.returncode == 0, said
    page = json.loads(output.read_text())
    assert page["problems"] == []
    assert page["requests"]["right"] > 50
    assert page["events"]["kill"] > 1
    assert page["events"].keys() == KINDS
