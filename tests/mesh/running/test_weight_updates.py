"""New weights of a running mesh: answers are those of a fresh one."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from tests.engine.weight_versions.made import trained
from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.test_loss import crowd
from tests.mesh.harness import Ports, serve, wait_until
from tests.mesh.running.test_pauses import PausedMesh

pytestmark = pytest.mark.mesh

DENSE = "--no-enable-expert-parallel"
COUNT, NUM_TOKENS = 6, 150


def answers(ports: Ports, ranks: dict[int, int] | None = None, during: Any = None) -> list[list[int]]:
    return asyncio.run(crowd(ports, during, COUNT, ranks, num_tokens=NUM_TOKENS))


SHARDED = ("-ep -tp 2", "-ep -pp 2")


@pytest.mark.parametrize(
    "how", ["-ep", *(pytest.param(layout, marks=pytest.mark.nightly) for layout in (DENSE, *SHARDED))]
)
def test_all_instances_go_over_and_a_joiner_reads_the_new_weights(tmp_path: Path, how: str) -> None:
    new = trained(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "new")
    newer = trained(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "newer", seed=2)
    expected = []
    for number, directory in enumerate((new, newer)):
        ports = Ports()
        alone = how if how in SHARDED else DENSE
        flags = [
            "--dtype", "float32", "--num-gpu-blocks-override", "600", "--served-model-name", SHIPPED_MODEL,
            *alone.split(),
        ]  # fmt: skip
        with serve(tmp_path / f"fresh{number}", str(directory), "-dp", "1", *ports.head(), *flags) as command:
            command.wait_for("1 instance ready")
            expected.append(answers(ports))
            assert command.stop() == 0

    with contextlib.ExitStack() as stack:
        mesh = PausedMesh(tmp_path, stack, how)
        old = answers(mesh)
        assert all(one != other for one, other in zip(old, expected[0], strict=True))
        assert mesh.call("/get_world_size", method="GET") == (200, {"world_size": 4 if how in SHARDED else 2})

        done: list[tuple[int, Any]] = []

        def update(path: Path, **fields: Any) -> tuple[int, Any]:
            return mesh.call("/update_weights_from_disk", {"model_path": str(path), **fields})

        def meanwhile() -> None:
            done.append(update(new, weight_version="step 1"))

        began = answers(mesh, during=meanwhile)
        ((status, answer),) = done
        assert (status, answer["success"]) == (200, True), answer
        assert all(len(ids) == NUM_TOKENS for ids in began), "no request was lost or cut short"
        for rank in (0, 1):
            assert answers(mesh, dict.fromkeys(range(COUNT), rank)) == expected[0]
        weights = mesh.view().orders.weights
        assert (weights.number, weights.label, weights.source) == (1, "step 1", str(new))

        mesh.engine(1).kill()
        wait_until(lambda: mesh.ready() == [0], 20, "the dead one is out")
        mesh.make_whole()
        assert answers(mesh, dict.fromkeys(range(COUNT), 1)) == expected[0], "a joiner reads the new ones"

        cut = Path(shutil.copytree(newer, tmp_path / "cut"))
        file = next(cut.glob("*.safetensors"))
        file.write_bytes(file.read_bytes()[:-1000])
        status, answer = update(cut)
        assert status == 400
        assert update(tmp_path / "nowhere")[0] == 400
        assert update(Path("relative"))[0] == 400
        assert answers(mesh) == expected[0], "the version before goes on"

        found: list[tuple[int, Any]] = []
        both = [threading.Thread(target=lambda: found.append(update(newer))) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        statuses = sorted(status for status, _ in found)
        assert statuses in ([200, 409], [200, 200]), found  # the second may come after the first
        assert answers(mesh) == expected[1]

        mesh.command.child("Coordinator").kill()
        wait_until(lambda: mesh.log.count("registering again") >= 2, 30, "instances are back")
        wait_until(lambda: mesh.ready() == [0, 1], 30, "the coordinator knows all")
        assert mesh.view().orders.weights.source == str(newer)
        assert answers(mesh) == expected[1]

        done.clear()
        mesh.call("/pause?mode=keep")
        killer = threading.Timer(0.05, mesh.engine(1).kill)
        killer.start()
        status, answer = update(new, in_flight="recompute")
        killer.join()
        assert status == 200, answer
        assert mesh.call("/resume")[0] == 200
        mesh.make_whole()
        assert answers(mesh) == expected[0], "though an instance died meanwhile"
        assert_idle(mesh)
        assert mesh.command.stop() == 0
        assert not mesh.tracebacks()
