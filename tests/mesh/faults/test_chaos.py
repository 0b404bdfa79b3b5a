"""Some of `make chaos` with a fixed seed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.config import QUANTIZED_MODELS
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
    page = chaos(tmp_path, "--seconds", str(SECONDS))
    assert page["events"].keys() == KINDS


@pytest.mark.nightly
@pytest.mark.parametrize("model", QUANTIZED_MODELS)
def test_experts_in_8_and_4_bits_are_read_again_as_codes(model: str, tmp_path: Path) -> None:
    """Where inputs are rounded (int8), experts read as widened weights would give other tokens."""
    page = chaos(tmp_path, "--seconds", "60", "--instances", "2", "--model", model)
    assert page["model"] == model


def chaos(directory: Path, *more: str) -> dict[str, Any]:
    """The report of a run in which nothing was lost."""
    output = directory / "chaos.json"
    flags = ["--seed", str(SEED), *more, "--longest", "300", "--output-json", str(output)]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.mesh.faults.chaos", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        try:
            said, _ = running.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # it ends what it has started
            said, _ = running.communicate()
    assert running.returncode == 0, said
    page: dict[str, Any] = json.loads(output.read_text())
    assert page["problems"] == []
    assert page["requests"]["right"] > 50
    assert page["events"]["kill"] > 1
    return page
