"""Priority of an encoder's layers: low, unless others leave too little of a core."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.host.background import LEAST_PRIORITY
from engine.vision import encoded_images
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


@pytest.mark.parametrize(("low", "cpu"), [(0.05, 0.1), (0.01, 0.1), (0.001, 0.01)])
@pytest.mark.parametrize("usual", [0.5, 0.15, 0.1])
def test_an_image_has_its_share_on_any_host_that_gives_steps_more(
    low: float, cpu: float, usual: float
) -> None:
    share = EncodingShare()
    seconds, late = encode(share, 200, low, usual, cpu)
    assert seconds <= cpu / low + 200 * cpu / EncodingShare.LEAST
    assert 0 < late < 200


def test_it_takes_no_more_than_is_owed() -> None:
    """Steps have what is beyond the share, also after hours without any."""
    share = EncodingShare()
    share.took(0.0, 1e6)
    assert encode(share, 400, 1.0, 0.5)[1] <= 1 + EncodingShare.MOST / (0.1 - 0.2 * EncodingShare.LEAST)
    share.took(100.0, 100.0)  # what was had long ago is forgotten as well
    assert encode(share, 4, 0.01, 0.5)[1] == 3


def test_a_starved_image_takes_about_a_second_at_once() -> None:
    share = EncodingShare()
    for _ in range(10):
        share.took(0.0, 60.0)
    assert encode(share, 400, 1.0, 0.5)[0] <= 40 + 2.5
    assert not share.is_late


def test_late_layers_have_the_same_bits_in_a_thread_of_the_priority_of_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_vision_model(tmp_path, "idefics3")
    submits = [submit_of(number, seen_prompt("idefics3", 1 + number, num_images=1)) for number in range(3)]
    monkeypatch.setattr(EncodingShare, "is_late", False)  # also on a busy host
    instance = load(directory, dtype="float32")
    expected = instance.answers(submits, ALONE)[0]
    assert instance.executor.image_encoder.num_late == 0
    monkeypatch.setattr(EncodingShare, "is_late", property(lambda share: share.num % 2))
    monkeypatch.setattr(EncodingShare, "num", 0, raising=False)

    def took(share: EncodingShare, cpu: float, seconds: float) -> None:
        share.num += 1  # type: ignore[attr-defined]

    monkeypatch.setattr(EncodingShare, "took", took)
    ran_at = []

    def note(layer: Callable[[], Any]) -> tuple[Any, float]:
        ran_at.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return timed(layer)

    timed = encoded_images._timed
    monkeypatch.setattr(encoded_images, "_timed", note)
    other = load(directory, dtype="float32")
    assert other.answers(submits, ALONE)[0] == expected
    images = other.executor.image_encoder
    assert images.num_late == images._share.num // 2 >= 3
    steps = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    low = min(LEAST_PRIORITY, steps + encoded_images.NICENESS)
    assert ran_at[:4] == [low, steps, low, steps]
    assert ran_at.count(steps) == images.num_late


def test_a_step_that_waits_for_an_image_lends_it_its_priority(tmp_path: Path) -> None:
    directory = make_tiny_vision_model(tmp_path, "llava")
    instance = load(directory, dtype="float32")
    images = instance.executor.image_encoder
    images._most_bytes = 0  # one is kept, so that a step lacks the other
    prompt = seen_prompt("llava", 1, num_images=2)
    instance.answers([submit_of(1, prompt)], ALONE)
    assert images.num_late > 0
    assert not images._is_awaited
