"""Weights in parts, by vLLM's calls, to a mesh that serves."""

from __future__ import annotations

import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import SHIPPED_MODEL
from engine.model.finding import MODELS_DIRECTORY
from engine.model.weight_digest import whole_digest
from tests.engine.trainer_group import trainer
from tests.engine.weight_versions.made import trained
from tests.mesh.clients.test_clients import assert_idle
from tests.mesh.faults.test_loss import crowd
from tests.mesh.harness import Ports, serve, wait_until
from tests.mesh.running.test_pauses import PausedMesh

pytestmark = pytest.mark.mesh

DENSE = "--no-enable-expert-parallel"
COUNT, NUM_TOKENS = 6, 60
SEGMENT = f"lockstep-transfer-{os.getpid()}"


def answers(ports: Ports, rank: int | None = None) -> list[list[int]]:
    ranks = None if rank is None else dict.fromkeys(range(COUNT), rank)
    return asyncio.run(crowd(ports, None, COUNT, ranks, num_tokens=NUM_TOKENS))


def by_group(mesh: PausedMesh, tensors: dict[str, torch.Tensor]) -> None:
    """An update by a group of this process and the mesh."""
    size = mesh.call("/get_world_size", method="GET")[1]["world_size"] + 1
    store = trainer.store(size)
    info = {
        "master_address": "127.0.0.1", "master_port": store.port, "rank_offset": 1, "world_size": size,
        "group_name": "mesh",
    }  # fmt: skip
    names = [*tensors]
    update = {
        "names": names,
        "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(tensors[name].shape) for name in names],
    }
    with ThreadPoolExecutor(1) as other:
        joined = other.submit(mesh.call, "/init_weight_transfer_engine", {"init_info": info})
        group = trainer.group(store, "mesh", size)
        assert joined.result()[0] == 200, joined.result()
        assert mesh.call("/start_weight_update", {})[0] == 200
        updated = other.submit(mesh.call, "/update_weights", {"update_info": update})
        trainer.broadcast(group, [tensors[name] for name in names])
        assert updated.result()[0] == 200, updated.result()
    assert mesh.call("/finish_weight_update", {})[0] == 200
    assert mesh.call("/shutdown_weight_transfer_engine")[0] == 200


def half(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A change of the odd layers' attention alone."""
    is_odd = ".layers.1." in name or ".layers.3." in name
    return tensor * 1.5 if is_odd and "self_attn" in name and tensor.ndim == 2 else tensor


def test_some_tensors_by_shared_memory_and_a_joiner(tmp_path: Path) -> None:
    new = trained(MODELS_DIRECTORY / SHIPPED_MODEL, tmp_path / "new", change=half)
    files = sorted(new.glob("*.safetensors"))
    ports = Ports()
    flags = ["--dtype", "float32", "--num-gpu-blocks-override", "600", "--served-model-name", SHIPPED_MODEL]
    with serve(tmp_path / "fresh", str(new), "-dp", "1", *ports.head(), *flags, DENSE) as command:
        command.wait_for("1 instance ready")
        expected = answers(ports)
        assert command.stop() == 0

    changed = {
        name: each for path in files for name, each in load_file(path).items() if half(name, each) is not each
    }
    segment = Path("/dev/shm") / SEGMENT
    with contextlib.ExitStack() as stack:
        stack.callback(segment.unlink, missing_ok=True)
        mesh = PausedMesh(tmp_path, stack, DENSE)
        old = answers(mesh)
        assert old != expected
        status, info = mesh.call("/weight_info", method="GET")
        assert (status, info["number"], info["weight_version"]) == (200, 0, "default")
        save_file(changed, segment)
        assert mesh.call("/init_weight_transfer_engine", {"init_info": {}})[0] == 200
        assert mesh.call("/start_weight_update", {})[0] == 200
        assert mesh.call("/start_weight_update", {})[0] == 409
        part = {"update_info": {"shared_memory": SEGMENT}}
        assert mesh.call("/update_weights", part) == (200, {"message": "Weights updated"})
        finished = mesh.call("/finish_weight_update", {"weight_version": "step 1"})
        assert finished == (200, {"message": "Weight update finished"})
        for rank in (0, 1):
            assert answers(mesh, rank) == expected
        wanted = {"weight_version": "step 1", "number": 1, "digest": whole_digest(files)}
        assert mesh.call("/weight_info", method="GET") == (200, wanted)

        mesh.engine(1).kill()
        wait_until(lambda: mesh.ready() == [0], 20, "the dead one is out")
        mesh.make_whole()
        assert answers(mesh, 1) == expected, "a joiner reads the version that was put together"

        assert mesh.call("/start_weight_update", {})[0] == 200
        bad = {name: each[:-1].clone() for name, each in [*changed.items()][:1]}
        save_file(bad, tmp_path / "bad.safetensors")
        assert (
            mesh.call("/update_weights", {"update_info": {"path": str(tmp_path / "bad.safetensors")}})[0]
            == 200
        )
        status, answer = mesh.call("/finish_weight_update", {})
        assert status == 400
        assert "shape" in answer
        assert answers(mesh) == expected, "the version before goes on"

        original = {
            name: each
            for path in sorted((MODELS_DIRECTORY / SHIPPED_MODEL).glob("*.safetensors"))
            for name, each in load_file(path).items()
            if name in changed
        }
        by_group(mesh, original)
        assert answers(mesh) == old, "a trainer's process group brings the first weights again"
        assert_idle(mesh)
        assert mesh.command.stop() == 0
        assert not mesh.tracebacks()
