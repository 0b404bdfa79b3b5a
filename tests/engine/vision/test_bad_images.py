"""Images that the encoder cannot take: only their own requests are refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from engine.core import EngineCore
from engine.messages import RequestRefused, Submit
from engine.prompt_images import PromptImage
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
