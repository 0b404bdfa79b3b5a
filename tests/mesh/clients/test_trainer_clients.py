"""Clients of trainers (trl, skyrl, verl) against a mesh, where they are installed.

``python examples/clients/run.py trl skyrl verl`` installs them. What they send without them is in
``tests/router/app/test_weight_transfers.py`` and ``tests/router/api``.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from examples.clients import run

pytestmark = pytest.mark.mesh

PYTHON = "LOCKSTEP_TRAINERS_PYTHON"
"""Environment variable: a Python that has them all."""


def python_of(name: str) -> str | None:
    place = run.ROOT / "build" / "clients" / name
    own = str(place / "bin" / "python") if (place / ".installed").exists() else None
    return os.environ.get(PYTHON) or own


def test_trainers_clients_work_unchanged() -> None:
    names = [name for name, client in run.CLIENTS.items() if client.trains]
    found = {name: python for name in names if (python := python_of(name)) is not None}
    if not found:
        pytest.skip(f"none of {', '.join(names)} is installed")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with run.own_mesh(trains=True) as variables:
        variables |= {"LOCKSTEP_MODEL_DIR": str(run.SHIPPED), "OMP_NUM_THREADS": "1"}
        for name, python in found.items():
            script = Path(run.FOLDER, run.CLIENTS[name].script)
            done = subprocess.run(
                [python, str(script)],
                env=kept | variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=200,
            )
            assert done.returncode == 0, done.stdout + done.stderr
