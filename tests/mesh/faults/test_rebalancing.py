"""Experts move between instances while they serve, and no answer changes by a bit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.model.finding import MODELS_DIRECTORY
from tests.engine.invariance.answers import How, load
from tests.mesh.faults.skewed import COPIES, balance, flags_of, moving
from tests.mesh.faults.test_invariance import FLAGS, bits_of, crowd, lasting
from tests.mesh.harness import Ports, free_port, serve

pytestmark = [
    pytest.mark.mesh,
    pytest.mark.nightly,
    pytest.mark.timeout(900),
    pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here"),
]

MOST_SECONDS = 700.0
"""How long all answers are asked for again and again, at most."""
LAYERS = 6
"""Layers with experts of the shipped model."""
MESHES = {
    "two": (100, ["-dp", "2"]),
    "three": (10, ["-dp", "3"]),
    "four": (10, ["-dp", "4"]),
    "tcp": (10, ["-dp", "2", "--all2all-backend", "tcp"]),
    "gather": (10, ["-dp", "2", "--all2all-backend", "allgather_reducescatter"]),
    "all-to-all": (10, ["-dp", "2", "--all2all-backend", "all_to_all"]),
    "sharded": (10, ["-dp", "2", "-tp", "2"]),
}
"""Rebalancings that answers pass through, and the mesh."""


@pytest.mark.parametrize("name", MESHES)
def test_bits_stay_while_experts_move(tmp_path: Path, name: str) -> None:
    expected_changes, mesh = MESHES[name]
    submits = lasting()
    answers = load(MODELS_DIRECTORY / SHIPPED_MODEL).answers(submits, How())[0]
    expected = {key: bits_of(answer) for key, answer in answers.items()}
    ports, admin = Ports(), free_port()
    with serve(tmp_path / "log", *mesh, "-ep", *ports.head(), *FLAGS, *flags_of(admin)) as command:
        command.wait_for(f"{mesh[1]} instances ready")
        held = balance(admin)["held"]
        assert sum(held.values()) == COPIES * LAYERS, "copies are there before anything is asked"
        changes = 0
        with moving(ports.url, admin):
            until = time.monotonic() + MOST_SECONDS
            while changes < expected_changes and time.monotonic() < until:
                before = balance(admin)["changes"]
                assert asyncio.run(crowd(ports, submits, lambda: None)) == expected
                changes += balance(admin)["changes"] - before
        last = balance(admin)
        print(f"{name}: {changes} changes while answers came, {last}")
        assert changes >= expected_changes, last
        assert last["failures"] == 0, last
        assert last["moves"] > changes, last
        assert "Traceback" not in command.log
        assert command.stop() == 0
