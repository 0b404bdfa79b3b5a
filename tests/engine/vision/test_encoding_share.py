"""Priority of an encoder's layers: low, unless others leave too little of a core."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.vision.encoding_share import EncodingShare
from tests.engine.invariance.answers import ALONE, load
from tests.engine.vision.test_images import submit_of
from tests.engine.vision.tiny_vision_models import make_tiny_vision_model, seen_prompt


def encode(
    share: EncodingShare, layers: int, low: float, usual: float, cpu: float = 0.1
) -> tuple[float, int]:
    """Seconds of so many layers, and how many ran at the priority of steps.

    ``low``, ``usual``: shares of a core at either priority.
    """
    seconds, late = 0.0, 0
    for _ in range(layers):
        late += share.is_late
        took = cpu / (usual if share.is_late else low)
        share.took(cpu, took)
        seconds += took
    return seconds, late


@pytest.mark.parametrize("low", [1.0, 0.14])
def test_beside_one_busy_instance_all_layers_run_at_low_priority(low: float) -> None:
    assert encode(EncodingShare(), 1000, low, 0.5)[1] == 0


@pytest.mark.parametrize("low", [0.05, 0.01, 0.001])
@pytest.mark.parametrize("usual", [0.5, 0.15, 0.1])
def test_an_image_has_its_share_on_any_host_that_gives_steps_more(low: float, usual: float) -> None:
    share = EncodingShare()
    first = 0.1 / low
    seconds, late = encode(share, 200, low, usual)
    assert seconds <= first + 200 * 0.1 / EncodingShare.LEAST
    assert 0 < late < 200


def test_it_takes_no_more_than_is_owed() -> None:
    """Steps have what is beyond the share, also after hours without any."""
    share = EncodingShare()
    share.took(0.0, 1e6)
    assert encode(share, 400, 1.0, 0.5)[1] <= 1 + EncodingShare.MOST / (0.1 - 0.2 * EncodingShare.LEAST)
    share.took(100.0, 100.0)  # what was had long ago is forgotten as well
    assert encode(share, 4, 0.01, 0.5)[1] == 3


def test_late_layers_have_the_same_bits_in_a_thread_of_the_priority_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_vision_model(tmp_path, "idefics3")
    submits = [submit_of(number, seen_prompt("idefics3", 1 + number, num_images=1)) for number in range(3)]
    instance = load(directory, dtype="float32")
    expected = instance.answers(submits, ALONE)[0]
    assert instance.executor.image_encoder.num_late == 0
    monkeypatch.setattr(EncodingShare, "is_late", property(lambda share: share.num % 2))
    monkeypatch.setattr(EncodingShare, "num", 0, raising=False)

    def took(share: EncodingShare, cpu: float, seconds: float) -> None:
        share.num += 1  # type: ignore[attr-defined]

    monkeypatch.setattr(EncodingShare, "took", took)
    other = load(directory, dtype="float32")
    assert other.answers(submits, ALONE)[0] == expected
    images = other.executor.image_encoder
    assert images.num_late == images._share.num // 2 >= 3


def test_a_step_that_waits_for_an_image_lends_it_its_priority(tmp_path: Path) -> None:
    directory = make_tiny_vision_model(tmp_path, "llava")
    instance = load(directory, dtype="float32")
    images = instance.executor.image_encoder
    images._most_bytes = 0  # one is kept, so that a step lacks the other
    prompt = seen_prompt("llava", 1, num_images=2)
    instance.answers([submit_of(1, prompt)], ALONE)
    assert images.num_late > 0
    assert not images._is_awaited
