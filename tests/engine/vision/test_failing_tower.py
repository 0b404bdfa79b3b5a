"""An encoder that fails inside a step: requests with that image end, also in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from engine.messages import Delta, FinishReason, Submit
from engine.model.checkpoint import read_model_info
from engine.prompt_images import PromptImage
from engine.scheduling.output_processor import NOT_ENCODED
from tests.engine.invariance.answers import ALONE, Answer, Answers, How, Instance, load, run, settings
from tests.engine.invariance.spread import Members
from tests.engine.shard_threads import ThreadedShards
from tests.engine.vision.test_images import submit_of
from tests.engine.vision.tiny_vision_models import make_tiny_vision_model, seen_prompt


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny model."""
    return cache(lambda family: make_tiny_vision_model(tmp_path_factory.mktemp(family), family))


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """Numbers of requests that end with the error of an image."""
    found: set[int] = set()
    take = Answer.take

    def take_or_note(self: Answer, delta: Delta) -> None:
        if not delta.error:
            return take(self, delta)
        assert (delta.error, delta.finish_reason) == (NOT_ENCODED, FinishReason.ERROR)
        self.ended = delta.finish_reason, None
        found.add(delta.request)
        return None

    monkeypatch.setattr(Answer, "take", take_or_note)
    yield found
    monkeypatch.undo()


def submits(family: str) -> list[Submit]:
    """Requests with two images each; two have the same ones, and so blocks in common."""
    seeds = (1, 2, 2, 3, 4)
    return [
        submit_of(number, seen_prompt(family, seed, num_images=2, num_text=20))
        for number, seed in enumerate(seeds)
    ]


class Planted:
    """Fails for one image, and keeps nothing, so that every step encodes what it reaches."""

    def __init__(self, executor: Any, bad: bytes) -> None:
        self.is_on = True
        self.num_failed = 0
        images = executor.image_encoder
        images._most_bytes = 0
        images._kept.clear()
        encode = images.tower.encode

        def encode_or_fail(image: PromptImage) -> Any:
            if self.is_on and image.digest == bad:
                self.num_failed += 1
                raise IndexError("planted")
            return encode(image)

        images.tower.encode = encode_or_fail


def check(
    answers: Callable[[], Answers], expected: Answers, failed: set[int], planted: Planted, bad: set[int]
) -> None:
    """The bad requests fail, the others have their answers, and nothing wrong is found later."""
    found = answers()
    assert failed == bad
    assert planted.num_failed
    assert {key: found[key] for key in found.keys() - bad} == {
        key: expected[key] for key in found.keys() - bad
    }
    failed.clear()
    planted.is_on = False
    again = answers()
    assert not failed
    assert again == expected, "blocks without an image's rows were found"


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("family", ["llava", pytest.param("qwen3_5", marks=pytest.mark.nightly)])
def test_a_failure_inside_a_step_costs_requests_with_that_image(
    family: str, which: int, directories: Callable[[str], Path], failed: set[int]
) -> None:
    wanted = submits(family)
    instance = load(directories(family), dtype="float32")
    alone, _ = instance.answers(wanted, ALONE)
    planted = Planted(instance.executor, wanted[1].images[which].digest)
    for how in (How(), How(budget=24)):
        core = instance.core(how)
        core._admission.images.encoder = None  # no request waits for rows: steps encode
        planted.is_on = True
        check(partial(run, core, wanted), alone, failed, planted, {1, 2})


LAYOUTS = [
    pytest.param({"tp": 2}, 1, id="tp"),
    pytest.param({"pp": 2}, 0, id="pp", marks=pytest.mark.nightly),
    pytest.param({"tp": 2, "pp": 2}, 1, id="tp pp", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("layout", "worker"), LAYOUTS)
def test_workers_agree_on_what_one_could_not_encode(
    layout: dict[str, Any], worker: int, directories: Callable[[str], Path], failed: set[int]
) -> None:
    directory, wanted = directories("llava"), submits("llava")
    executor = ThreadedShards(settings(directory, dtype="float32"), read_model_info(directory), **layout)
    try:
        facts = executor.load(lambda _phase: None)
        instance = Instance(directory, executor, facts=facts)
        expected, _ = instance.answers(wanted, How(budget=24))
        core = instance.core(How(budget=24))
        planted = Planted(executor.workers[worker].executor, wanted[1].images[1].digest)
        check(partial(run, core, wanted), expected, failed, planted, {1, 2})
    finally:
        executor.close()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_members_in_lockstep_go_on(ranks: int, directories: Callable[[str], Path], failed: set[int]) -> None:
    directory, wanted = directories("qwen3_vl_moe"), submits("qwen3_vl_moe")
    members = Members(directory, 2, ranks=ranks, dtype="float32")
    try:
        expected = members.answers(wanted)
        planted = Planted(members.workers[ranks - 1], wanted[2].images[1].digest)  # 1 is of the other member
        for core in members.cores:
            core._admission.images.encoder = None
            core.scheduler._pool.unname()
        check(partial(members.answers, wanted), expected, failed, planted, {2})
    finally:
        members.close()
