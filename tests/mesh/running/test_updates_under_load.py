"""Many updates of the weights of a mesh under load, with instances killed."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from pathlib import Path

import pytest

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from tests.engine.weight_versions.made import trained
from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.skewed import COPIES, balance, flags_of, moving
from tests.mesh.faults.test_loss import crowd
from tests.mesh.faults.test_rebalancing import LAYERS
from tests.mesh.harness import Ports, serve, wait_until
from tests.mesh.running.test_pauses import PausedMesh
from tests.nightly import NIGHTLY

EXPERTS = 8
"""Experts of a layer of the shipped model."""

pytestmark = [pytest.mark.mesh, pytest.mark.timeout(600 if NIGHTLY else 300)]

DENSE = "--no-enable-expert-parallel"
UPDATES, KILL_EVERY = (25, 12) if NIGHTLY else (8, 4)
PIECES = [0, *(pytest.param(piece, marks=pytest.mark.nightly) for piece in (1, 2, 3))]
"""Parts of the hundred updates of a night, each in a mesh of its own."""
COUNT, NUM_TOKENS = 4, 60


def answers(ports: Ports, rank: int | None = None) -> list[list[int]]:
    """Answers to prompts that all share, at any instance or at one."""
    ranks = {} if rank is None else dict.fromkeys(range(COUNT), rank)
    return asyncio.run(crowd(ports, None, COUNT, ranks, salt="none", num_tokens=NUM_TOKENS))


class Load:
    """Requests without a break, of which none may fail or be cut short."""

    def __init__(self, mesh: Ports) -> None:
        self._mesh = mesh
        self._ends = threading.Event()
        self.rounds = 0
        self.problem: Exception | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                assert all(len(ids) == NUM_TOKENS for ids in answers(self._mesh))
                self.rounds += 1
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            self.problem = error


def fresh_answers(directory: Path, log: Path) -> list[list[int]]:
    """Answers of a mesh that was started with these weights."""
    ports = Ports()
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "600", "--served-model-name", SHIPPED_MODEL]
    with serve(log, str(directory), "-dp", "1", *ports.head(), *flags, DENSE) as command:
        command.wait_for("1 instance ready")
        found = answers(ports)
        assert command.stop() == 0
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("how", [DENSE, pytest.param("-ep", marks=pytest.mark.nightly)])
def test_no_request_fails_and_answers_are_those_of_a_fresh_mesh(tmp_path: Path, how: str, piece: int) -> None:
    shipped = MODELS_DIRECTORY / SHIPPED_MODEL
    directories = [trained(shipped, tmp_path / f"v{seed}", seed=seed) for seed in (1, 2)]
    expected = [fresh_answers(path, tmp_path / f"fresh {path.name}") for path in directories]
    assert all(one != other for one, other in zip(*expected, strict=True))
    draw = random.Random(1 + piece)
    with contextlib.ExitStack() as stack:
        mesh = PausedMesh(tmp_path, stack, how, ["--kv-cache-dir", str(tmp_path / "kv")])
        with Load(mesh) as load:
            for number in range(UPDATES):
                which, victim = number % 2, number % KILL_EVERY == KILL_EVERY // 2
                if victim:
                    killer = threading.Timer(draw.uniform(0.0, 0.4), mesh.engine(1).kill)
                    killer.start()
                body = {
                    "model_path": str(directories[which]),
                    "in_flight": draw.choice(("keep", "recompute")),
                }
                status, answer = mesh.call("/update_weights_from_disk", body)
                assert (status, answer["success"]) == (200, True), answer
                if victim:
                    killer.join()
                    wait_until(lambda: mesh.ready() == [0], 30, "the dead one is out")
                    mesh.make_whole()
                if victim or number % 5 == 0:
                    for rank in (0, 1):
                        assert answers(mesh, rank) == expected[which], f"update {number}, instance {rank}"
                assert load.problem is None, load.problem
        assert load.rounds > UPDATES // 10
        assert mesh.view().orders.weights.number == UPDATES
        assert answers(mesh) == expected[(UPDATES - 1) % 2]
        assert_idle(mesh)
        assert mesh.command.stop() == 0
        assert not mesh.tracebacks()


@pytest.mark.nightly
def test_copies_of_experts_have_the_new_weights_while_they_move(tmp_path: Path) -> None:
    shipped = MODELS_DIRECTORY / SHIPPED_MODEL
    directories = [trained(shipped, tmp_path / f"v{seed}", seed=seed) for seed in (1, 2)]
    expected = [fresh_answers(path, tmp_path / f"fresh {path.name}") for path in directories]
    with contextlib.ExitStack() as stack:
        mesh = PausedMesh(tmp_path, stack, "-ep", flags_of(0)[2:])
        before = balance(mesh.admin)
        assert sum(before["held"].values()) == COPIES * LAYERS
        with moving(mesh.url, mesh.admin):
            for number in range(6):
                body = {"model_path": str(directories[number % 2]), "in_flight": "recompute"}
                status, answer = mesh.call("/update_weights_from_disk", body)
                assert (status, answer["success"]) == (200, True), answer
                for rank in (0, 1):
                    assert answers(mesh, rank) == expected[number % 2], f"update {number}, instance {rank}"
        after = balance(mesh.admin)
        print(before, after)
        assert after["changes"] > before["changes"] + 6, "experts moved between updates"
        assert after["failures"] == 0
        # An instance that prepares weights has room for fewer copies, and reports that with its next group.
        assert EXPERTS * LAYERS <= sum(after["held"].values()) <= COPIES * LAYERS
        assert mesh.command.stop() == 0
        assert not mesh.tracebacks()
