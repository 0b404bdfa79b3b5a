"""Weights that torch computes with lie once on a host after updates and sleeps, too."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.messages import MemoryPart
from engine.executor.uni import UniExecutor
from engine.host import memory
from engine.host.shared_tensors import FILE_NAME
from engine.model.checkpoint import read_model_info
from engine.model.weight_digest import whole_digest
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded
from tests.engine.invariance.answers import Instance, load, settings
from tests.engine.shard_threads import ThreadedShards
from tests.engine.vision.test_images import make_tiny_vision_model
from tests.engine.weight_versions.made import trained
from tests.engine.weight_versions.test_shard_weights import answers, make, submits

TORCH: dict[str, Any] = {"numerics": "torch", "batch_invariant": True}


def place_of(tensor: torch.Tensor) -> tuple[str, int] | None:
    """File in memory and place there; None for private memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, begin, _, inode, *path = line.split(maxsplit=5)
        first, end = (int(each, 16) for each in addresses.split("-"))
        if first <= tensor.data_ptr() < end:
            is_file = bool(path) and FILE_NAME in path[0]
            return (inode, int(begin, 16) + tensor.data_ptr() - first) if is_file else None
    return None


def places(instance: Instance) -> list[tuple[str, int] | None]:
    return [place_of(each) for each in instance.executor._model.module.parameters()]


def wake(executor: UniExecutor) -> None:
    executor.new_weights.prepare("")
    executor.new_weights.switch()


def check_together(one: Instance, other: Instance) -> None:
    found = places(one)
    assert None not in found
    assert found == places(other)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_updates_and_sleeps_leave_one_copy(family: str, tmp_path: Path) -> None:
    """The answers are a fresh instance's; one family has tied embeddings."""
    directory = make(family, tmp_path / "old")
    new = trained(directory, tmp_path / "new")
    wanted, one, other = submits(directory), load(directory, **TORCH), load(directory, **TORCH)
    before, after = answers(one, wanted), answers(load(new, **TORCH), wanted)
    for each in (one, other):
        assert each.executor.give_back(MemoryPart.WEIGHTS)
    for each in (one, other):
        wake(each.executor)
        assert answers(each, wanted) == before
    check_together(one, other)
    first = places(one)
    for each in (one, other):
        assert each.executor.new_weights.prepare(str(new)) == whole_digest([new / "model.safetensors"])
        each.executor.new_weights.switch()
        assert answers(each, wanted) == after
    check_together(one, other)
    assert not set(first) & set(places(one)), "nothing of the other version's file is kept"


def test_what_others_of_the_host_have_needs_no_memory(tmp_path: Path) -> None:
    directory = make("llama", tmp_path)
    one, other = load(directory, **TORCH), load(directory, **TORCH)
    weights = other.executor.new_weights
    size = (directory / "model.safetensors").stat().st_size
    for each in (one, other):
        assert each.executor.give_back(MemoryPart.WEIGHTS)
    weights._free_memory = lambda: size // 2
    with pytest.raises(WeightsRefused, match="no memory for both versions"):
        weights.prepare("")
    wake(one.executor)
    wake(other.executor)
    check_together(one, other)
    wanted = submits(directory)
    assert answers(one, wanted) == answers(other, wanted) == answers(load(directory, **TORCH), wanted)


def test_parts_that_others_of_the_host_have_need_no_memory(tmp_path: Path) -> None:
    """The workers of a second instance find the parts of the first one's."""
    directory = make("llama", tmp_path)
    config, info, wanted = settings(directory, **TORCH), read_model_info(directory), submits(directory)
    both = [ThreadedShards(config, info, tp=2) for _ in range(2)]
    for each in both:
        each.load(lambda _phase: None)
    before = [answers(Instance(directory, each), wanted) for each in both]
    one, other = ([worker.executor for worker in each.workers] for each in both)
    for executor in (*one, *other):
        assert executor.give_back(MemoryPart.WEIGHTS)
    size = (directory / "model.safetensors").stat().st_size
    for executor in other:
        executor.new_weights._free_memory = lambda: size // 3
        with pytest.raises(WeightsRefused, match="no memory for both versions"):
            executor.new_weights.prepare("")
    for executor in (*one, *other):
        wake(executor)
    for mine, others in zip(one, other, strict=True):
        assert [*map(place_of, mine._model.module.parameters())] == [
            *map(place_of, others._model.module.parameters())
        ]
    assert [answers(Instance(directory, each), wanted) for each in both] == before
    for each in both:
        each.close()


def test_workers_that_look_one_by_one_need_memory_once(tmp_path: Path) -> None:
    """Those before them have taken theirs already."""
    directory = make("llama", tmp_path / "old")
    new = trained(directory, tmp_path / "new")
    weights = load(directory, **TORCH).executor.new_weights
    size = (directory / "model.safetensors").stat().st_size
    stage = weights._model.stage
    stage = replace(stage, shard=replace(stage.shard, neighbours=4))
    weights._model = replace(weights._model, stage=stage)
    weights._free_memory = lambda: 2 * size
    weights.prepare(str(new))
    weights.switch()


def test_weights_are_read_by_one_process_a_time(tmp_path: Path) -> None:
    weights = load(make("llama", tmp_path), **TORCH).executor.new_weights
    looks = iter(range(3))
    with memory.turn(), pytest.raises(WeightsSuperseded):
        weights.prepare("", lambda: next(looks, None) is None)  # asked before each tensor, too
    assert next(looks, None) is None
    with memory.turn():
        reading = threading.Thread(target=weights.prepare, args=("",))
        reading.start()
        reading.join(1.0)
        assert reading.is_alive()
    reading.join(60.0)
    assert not reading.is_alive()
    weights.switch()


def test_encoders_of_images_lie_once_after_an_update(tmp_path: Path) -> None:
    directory = make_tiny_vision_model(tmp_path / "old", "llava")
    new = trained(directory, tmp_path / "new")
    found = []
    for instance in (load(directory, dtype="float32"), load(directory, dtype="float32")):
        instance.executor.new_weights.prepare(str(new))
        instance.executor.new_weights.switch()
        tower = instance.executor.image_encoder.tower
        found.append([place_of(each) for each in tower._model.parameters()])
        found.append(tower)  # it lives on
    assert None not in found[0]
    assert found[0] == found[2]
