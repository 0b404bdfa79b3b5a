"""Experts spread over instances with several workers: tokens, a lost worker, a lost instance."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from coordinator.process.process import EXIT_WORKER_LOST
from engine.config import SHIPPED_MODEL
from tests.mesh.clients.test_clients import assert_idle, metrics
from tests.mesh.faults.test_loss import crowd, crowd_of
from tests.mesh.harness import Ports, serve, wait_until
from tests.mesh.running.test_sharding import gone, workers
from tests.mesh.spread_mesh import FLAGS, SpreadMesh

pytestmark = pytest.mark.mesh

NUM_STREAMS = 4
UNDISTURBED = 100
"""Tokens of a stream that need not last until an instance is killed."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """Token ids that one instance with all experts gives."""
    ports = Ports()
    with serve(tmp_path_factory.mktemp("alone") / "log", *ports.head(), *FLAGS) as command:
        command.wait_for("1 instance ready")
        return crowd_of(ports, NUM_STREAMS)


def says_the_same(mesh: SpreadMesh, alone: list[list[int]]) -> bool:
    """Whether undisturbed streams begin as those of one instance."""
    return crowd_of(mesh, len(alone), UNDISTURBED) == [ids[:UNDISTURBED] for ids in alone]


def disturbed(mesh: SpreadMesh, act: Callable[[], None]) -> list[list[int]]:
    """Token ids of streams if ``act`` is called while instance 1 works."""

    def once_busy() -> None:
        wait_until(lambda: mesh.running(1) > 0, 60, "instance 1 works")
        act()

    return asyncio.run(asyncio.wait_for(crowd(mesh, once_busy, NUM_STREAMS), 120))


def test_a_lost_worker_costs_no_token(alone: list[list[int]], tmp_path: Path) -> None:
    """Two instances of two ranks: of eight experts each worker holds two, of all layers."""
    with contextlib.ExitStack() as stack:
        mesh = SpreadMesh(tmp_path, stack, 2, how=["-ep", "-tp", "2"])
        assert "2 instances in lockstep over shared_memory" in mesh.log
        assert says_the_same(mesh, alone)
        assert_idle(mesh)
        assert sorted(held_by(mesh)) == [0, 1, 2, 3, 4, 5, 6, 7]
        victim = workers(mesh.command, 1)[1]
        assert disturbed(mesh, victim.kill) == alone
        wait_until(lambda: mesh.ready() == [0], 20)
        mesh.command.wait_for(f"ended with status {EXIT_WORKER_LOST}", 20)
        assert "lost a worker: Worker_1_PP0_TP1" in mesh.log
        assert "recovered in epoch" in mesh.log  # the second one, or the third if that is its worker's
        assert says_the_same(mesh, alone[:2])
        wait_until(lambda: holds_nothing(mesh), 20, "no request and no block is left")
        wait_until(lambda: sorted(held_by(mesh, 0)) == [0, 1, 2, 3, 4, 5, 6, 7], 10, "they took over")
        assert mesh.command.stop() == 0
        assert "Traceback" not in mesh.log


def holds_nothing(mesh: SpreadMesh) -> bool:
    loads = [member.load for member in mesh.view().members]
    return all(load.running == load.waiting == load.blocks_used == 0 for load in loads)


def held_by(mesh: SpreadMesh, rank: int | None = None) -> list[int]:
    """The experts that have computed tokens, of all instances or of one."""
    prefix = "lockstep:expert_tokens_total{"
    wanted = "" if rank is None else f'engine="{rank}"'
    found = [name for name in metrics(mesh) if name.startswith(prefix) and wanted in name]
    assert all(f'model_name="{SHIPPED_MODEL}"' in name for name in found)
    return [int(name.partition('expert="')[2].partition('"')[0]) for name in found]


@pytest.mark.nightly
def test_a_lost_instance_costs_no_token_and_another_takes_its_place(
    alone: list[list[int]], tmp_path: Path
) -> None:
    """Two instances of two stages, over sockets: expert groups of two, one for each stage."""
    with contextlib.ExitStack() as stack:
        flags = ["-pp", "2", "--expert-placement-strategy", "round_robin"]
        mesh = SpreadMesh(tmp_path, stack, 2, backend="allgather_reducescatter", how=["-ep", *flags])
        assert "2 instances in lockstep over gloo" in mesh.log
        assert says_the_same(mesh, alone)
        victim, its_workers = mesh.engine(1), workers(mesh.command, 1)
        assert len(its_workers) == 2
        assert disturbed(mesh, victim.kill) == alone
        assert gone(its_workers)
        assert mesh.ready() == [0]
        mesh.join_one("-dpr", "1")  # it learns -pp and all else from the mesh
        wait_until(lambda: mesh.ready() == [0, 1], 90, "another one serves")
        assert says_the_same(mesh, alone[:2])
        assert_idle(mesh)
        last = [*workers(mesh.command, 0), psutil.Process(mesh.engine(0).pid)]
        assert mesh.command.stop() == 0
        assert gone(last)
        assert "Traceback" not in mesh.log
