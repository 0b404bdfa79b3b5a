"""Images that the encoder cannot take: only their own requests are refused."""

from __future__ import annotations

import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from engine.core import EngineCore
from engine.messages import RequestRefused, Submit
from engine.model.checkpoint import CheckpointError
from engine.prompt_images import PLACES, PromptImage
from engine.vision import tower
from tests.engine.invariance.answers import ALONE, PEER, Answer, How, load
from tests.engine.vision.test_images import submit_of
from tests.engine.vision.tiny_vision_models import PLACEHOLDER, make_tiny_vision_model, seen_prompt


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(make_tiny_vision_model(tmp_path_factory.mktemp("llava"), "llava"), dtype="float32")


def submits() -> list[Submit]:
    return [submit_of(number, seen_prompt("llava", number)) for number in range(3)]


def run(core: EngineCore, wanted: list[Submit]) -> tuple[dict[int, Answer], list[RequestRefused]]:
    """Answers, and refusals, of requests that come at once."""
    found = {submit.request: Answer() for submit in wanted}
    refused: list[RequestRefused] = []
    for submit in wanted:
        assert core.submit(PEER, submit) is None
    while not core.is_empty:
        for _, refusal in core.take_ready():
            del found[refusal.request]
            refused.append(refusal)
        if not core.has_work:
            time.sleep(0.001)
            continue
        for delta in core.step().get(PEER, []):
            found[delta.request].take(delta)
    return found, refused


def shorter(submit: Submit) -> Submit:
    """The same request with one placeholder less than its image has rows."""
    (image,), ids = submit.images, submit.prompt_ids
    at = ids.index(PLACEHOLDER)
    return replace(submit, prompt_ids=ids[:at] + ids[at + 1 :], images=(replace(image, end=image.end - 1),))


def test_another_number_of_rows_costs_its_request_only(instance: Any) -> None:
    wanted = submits()
    alone, _ = instance.answers(wanted, ALONE)
    core = instance.core(How())
    found, (refusal,) = run(core, [wanted[0], shorter(wanted[1]), wanted[2]])
    assert found == {number: alone[number] for number in (0, 2)}
    assert (refusal.request, refusal.retry) == (1, False)
    assert "25 rows in this model's encoder and 24 placeholders" in refusal.reason
    again, nobody = run(core, [wanted[1]])
    assert again == {1: alone[1]}, "the image is taken where it fits"
    assert not nobody


def test_an_exception_of_the_tower_costs_its_request_only(
    instance: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = submits()
    alone, _ = instance.answers(wanted, ALONE)
    images = instance.executor.image_encoder
    encode, bad = images.tower.encode, wanted[1].images[0].digest
    images._kept.clear()

    def encode_some(image: PromptImage) -> Any:
        if image.digest == bad:
            raise IndexError("size 7 is out of range\nand more")
        return encode(image)

    core = instance.core(How())
    monkeypatch.setattr(images.tower, "encode", encode_some)
    found, (refusal,) = run(core, wanted)
    assert found == {number: alone[number] for number in (0, 2)}
    assert refusal.reason == "an image cannot be encoded by this model: size 7 is out of range"
    monkeypatch.undo()
    assert run(core, [wanted[1]])[0] == {1: alone[1]}, "nothing of the failure is kept"


def test_blocks_in_the_cache_need_no_encoder(instance: Any) -> None:
    """Also once its rows are kept no longer."""
    submit = submit_of(0, seen_prompt("llava", 0, num_text=20))
    images, core = instance.executor.image_encoder, instance.core(How())
    first, _ = run(core, [submit])
    images._kept.clear()
    num_encoded = images.num_encoded
    assert run(core, [submit])[0] == first
    assert images.num_encoded == num_encoded


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision_model(tmp_path_factory.mktemp("gemma4"), "gemma4")


@pytest.mark.parametrize(("column", "row"), [(64, 0), (7, 8), (4, 1), (1, 2)])
def test_places_that_no_processor_makes_are_refused(column: int, row: int, directory: Path) -> None:
    """On a GPU they would end the process."""
    image = seen_prompt("gemma4", 1).images[0]
    found = tower.load_tower(directory, torch.float32, torch.float32, torch.device("cpu"))
    assert found.encode(image).shape == (1, 12, 64)
    places = np.full((1, 64, 2), -1)
    places[0, :2] = [[0, 0], [column, row]]
    tensors = tuple(
        replace(each, data=places.tobytes()) if each.name == PLACES else each for each in image.tensors
    )
    with pytest.raises(ValueError, match=f"{column + 1} x {row + 1} places for 64 patches"):
        found.encode(replace(image, tensors=tensors))


@pytest.mark.parametrize("is_of_text", [False, True])
def test_an_encoder_without_weights_is_refused(is_of_text: bool, directory: Path, tmp_path: Path) -> None:
    """It would be made up at random."""
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    part = "language_model" if is_of_text else "vision_tower"
    name = next(each for each in tensors if part in each)
    save_file({each: tensors[each] for each in tensors if each != name}, path, metadata={"format": "pt"})
    load = partial(tower.load_tower, tmp_path, torch.float32, torch.float32, torch.device("cpu"))
    if is_of_text:
        load()
    else:
        with pytest.raises(CheckpointError, match=f"the encoder of images lacks 1 tensors: {name}"):
            load()


@pytest.mark.parametrize(("family", "part"), [("gemma3", ".head."), ("llava", ".post_layernorm.")])
def test_weights_that_no_row_needs_may_be_missing(family: str, part: str, tmp_path: Path) -> None:
    """Many checkpoints leave out what makes one vector of an image."""
    directory = make_tiny_vision_model(tmp_path, family)
    (image,) = seen_prompt(family, 1).images
    (path,) = directory.glob("*.safetensors")
    tensors = load_file(path)
    load = partial(tower.load_tower, directory, torch.float32, torch.float32, torch.device("cpu"))
    wanted = load().encode(image)
    kept = {name: each for name, each in tensors.items() if "vision" not in name or part not in name}
    assert len(kept) < len(tensors)
    save_file(kept, path, metadata={"format": "pt"})
    for _ in range(2):  # what is missing is made up at random
        assert torch.equal(load().encode(image), wanted)
