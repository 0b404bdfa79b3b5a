"""New weights of models that take images: answers and rows of a fresh instance."""

from __future__ import annotations

import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from coordinator.messages import InFlight, WeightUpdate, WeightVersion
from engine.host.memory import MARGIN
from engine.messages import Submit
from engine.model.weight_digest import whole_digest
from engine.model.weight_files import MAPPED
from engine.prompt_images import PromptImage
from engine.vision import other_tower
from engine.vision.encoded_images import EncodedImages
from engine.vision.tower import load_tower
from engine.weight_versions.contract import WeightsRefused, WeightsSuperseded
from engine.weight_versions.instance_weights import InstanceWeights
from tests.engine.invariance.answers import ALONE, PEER, Answer, How, Instance, load, run, step
from tests.engine.vision.test_images import submit_of
from tests.engine.vision.tiny_vision_models import PLACEHOLDER, make_tiny_vision_model, seen_prompt
from tests.engine.weight_versions.made import trained
from tests.waiting import until

FAMILIES = [
    "llava",
    *(pytest.param(each, marks=pytest.mark.nightly) for each in ("qwen3_vl", "gemma3", "gemma4_small")),
]


def of_tower(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Other numbers of the encoder alone."""
    is_part = "vision" in name or "visual" in name
    return tensor * 1.5 + 0.1 if is_part and tensor.is_floating_point() else tensor


def submits(family: str) -> list[Submit]:
    return [submit_of(number, seen_prompt(family, 1 + number, num_images=number)) for number in range(3)]


def shards(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


@pytest.mark.parametrize("numerics", ["auto", pytest.param("torch", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_after_an_update_are_those_of_a_fresh_instance(
    family: str, numerics: str, tmp_path: Path
) -> None:
    def answers(instance: Instance) -> Any:
        return instance.answers(wanted, ALONE)[0]

    directory, wanted = make_tiny_vision_model(tmp_path / "old", family), submits(family)
    whole = trained(directory, tmp_path / "whole")
    tower = trained(directory, tmp_path / "tower", change=of_tower)
    instance: Instance = load(directory, dtype="float32", numerics=numerics)
    weights, before = instance.executor.new_weights, answers(instance)
    for version in (whole, tower):
        after = answers(load(version, dtype="float32", numerics=numerics))
        assert after != before
        digest = whole_digest(shards(version))
        assert weights.prepare(str(version)) == digest
        shutil.rmtree(version)  # nothing of it depends on its files once it is prepared
        weights.switch()
        assert answers(instance) == after, "an image has the rows of other weights"
        assert {each.weights for each in instance.executor.arithmetic()} == {digest}
    weights.prepare(str(directory))
    weights.switch()
    assert answers(instance) == before


@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.nightly)])
def test_torch_computes_alike_wherever_tensors_begin_in_a_file(family: str, tmp_path: Path) -> None:
    directory, wanted = make_tiny_vision_model(tmp_path, family), submits(family)
    (path,) = shards(directory)
    tensors, found = load_file(path), []
    for start in (0, 8, 56):
        begin_at(start, path, tensors)
        instance = load(directory, dtype="float32", numerics="torch")
        modules = [instance.executor._model.module, instance.executor.image_encoder.tower._model]
        found.append(instance.answers(wanted, ALONE)[0])
        assert not any(each.data_ptr() % 64 for module in modules for each in module.parameters())
    assert found[1:] == found[:1] * 2


def begin_at(start: int, path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors such that they begin there, modulo 64."""
    for length in range(0, 64, 8):
        save_file(tensors, path, metadata={"format": "pt", "room": "x" * length})
        if (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 64 == start:
            return
    raise AssertionError("no header has this length")


def test_an_image_that_was_being_encoded_is_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_vision_model(tmp_path / "old", "llava")
    tower = trained(directory, tmp_path / "tower", change=of_tower)
    wanted = submits("llava")[1:2]
    after = load(tower, dtype="float32").answers(wanted, ALONE)[0]
    instance = load(directory, dtype="float32")
    images, began, goes_on = instance.executor.image_encoder, threading.Event(), threading.Event()
    encode = images.tower.encode

    def encode_slowly(image: PromptImage) -> Any:
        began.set()
        assert goes_on.wait(30)
        return encode(image)

    monkeypatch.setattr(images.tower, "encode", encode_slowly)
    (image,) = wanted[0].images
    done = threading.Event()
    images.begin(image, 25, lambda *_: done.set())
    assert began.wait(30)
    instance.executor.new_weights.prepare(str(tower))
    instance.executor.new_weights.switch()
    goes_on.set()
    assert done.wait(30)
    assert run(instance.core(How()), wanted) == after


def test_a_tower_of_another_shape_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_vision_model(tmp_path / "old", "llava")

    def wider(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor]) if "patch_embedding" in name else tensor

    other, wanted = trained(directory, tmp_path / "other", change=wider), submits("llava")
    instance = load(directory, dtype="float32")
    before = instance.answers(wanted, ALONE)[0]
    with pytest.raises(WeightsRefused, match="patch_embedding"):
        instance.executor.new_weights.prepare(str(other))
    assert instance.answers(wanted, ALONE)[0] == before


@pytest.mark.parametrize(("stops", "reason"), [(False, "ends before"), (True, None)])
def test_a_tower_depends_on_no_mapped_file(
    stops: bool, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer cuts the file while the tower is read, or another version comes."""
    directory = make_tiny_vision_model(tmp_path / "old", "llava")
    (path,) = shards(trained(directory, tmp_path / "new"))
    is_reading = False

    def load_and_note(*arguments: Any, **named: Any) -> Any:
        nonlocal is_reading
        is_reading = True
        try:
            return load_tower(*arguments, **named)
        finally:
            is_reading = False

    def should_stop() -> bool:
        if is_reading and not stops:
            os.truncate(path, 1 << 14)
        return is_reading and stops

    monkeypatch.setattr(other_tower, "load_tower", load_and_note)
    instance = load(directory, dtype="float32")
    wanted = submits("llava")[:2]
    before = instance.answers(wanted, ALONE)[0]
    with pytest.raises(WeightsSuperseded if stops else WeightsRefused, match=reason):
        instance.executor.new_weights.prepare(str(path.parent), should_stop)
    assert instance.answers(wanted, ALONE)[0] == before


def test_room_for_a_second_tower_is_needed_too(tmp_path: Path) -> None:
    executor = load(make_tiny_vision_model(tmp_path, "llava"), dtype="float32").executor
    weights, stored = executor.new_weights, sum(path.stat().st_size for path in shards(tmp_path))
    tower = executor.image_encoder.tower.num_bytes
    assert tower > 50_000
    room = (stored + executor._program.weight_bytes + tower // 2) / (1 - MARGIN)
    weights._free_memory = lambda: int(room)
    with pytest.raises(WeightsRefused, match="no memory for both versions"):
        weights.prepare("")
    weights.tower = None
    weights.prepare("")


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_a_tower_that_computes_in_bfloat16_is_that_of_a_fresh_instance(family: str, tmp_path: Path) -> None:
    directory, cpu, kind = (
        make_tiny_vision_model(tmp_path / "old", family),
        torch.device("cpu"),
        torch.bfloat16,
    )
    new = trained(directory, tmp_path / "new")
    (image,) = seen_prompt(family, 1).images
    images = EncodedImages(load_tower(directory, kind, kind, cpu), PLACEHOLDER)
    old = images.tower.encode(image)
    other_tower.TowerReader(images, directory).prepare(new, MAPPED).switch()
    rows = images.tower.encode(image)
    assert rows.dtype == images.tower.computes == kind
    assert torch.equal(rows, load_tower(new, kind, kind, cpu).encode(image))
    assert not torch.equal(rows, old)


def test_images_are_encoded_beside_steps_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that ran, waited for a slot, or waited for rows before."""
    directory = make_tiny_vision_model(tmp_path / "old", "llava")
    new = trained(directory, tmp_path / "new")
    instance = load(directory, dtype="float32")
    core = instance.core(How(seqs=1))
    weights = InstanceWeights(instance.executor.new_weights, core, lambda: None)
    update = WeightUpdate(WeightVersion(1, "", str(new), "", "u1"), InFlight.RECOMPUTE)
    weights.prepare(update, lambda: False)
    wanted = [submit_of(number, seen_prompt("llava", 1 + number, num_images=2)) for number in range(3)]
    found = {submit.request: Answer() for submit in wanted}
    for submit in wanted[:2]:
        assert core.submit(PEER, submit) is None
    until(lambda: core.take_ready() == [] and not core.admission.images)
    while len(found[0].token_ids) < 3:
        step(core, found, lambda: None)
    assert core.submit(PEER, wanted[2]) is None
    inside = list[PromptImage]()
    rows_of = EncodedImages._rows_of

    def note(self: EncodedImages, image: PromptImage, token_ids: Any) -> Any:
        wanted = int((token_ids[image.first : image.end] == PLACEHOLDER).sum())
        inside.extend([image] * (self._find(image.digest, wanted) is None))
        return rows_of(self, image, token_ids)

    monkeypatch.setattr(EncodedImages, "_rows_of", note)
    weights.switch(update, InFlight.RECOMPUTE)
    assert len(core.admission.images) == 3
    begun = list(found[0].token_ids)
    while not core.is_empty:
        step(core, found, lambda: time.sleep(0.001))
    assert not inside, "a step waited for the encoder"
    fresh = load(new, dtype="float32")
    resumed = replace(wanted[0], output_ids=begun)
    alone = fresh.answers([resumed, *wanted[1:]], ALONE)[0]
    assert found[0].token_ids == alone[0].token_ids
    assert {number: found[number] for number in (1, 2)} == {number: alone[number] for number in (1, 2)}
