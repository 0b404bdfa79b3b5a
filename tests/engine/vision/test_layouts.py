"""Every family over workers and instances, and the same image again: counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.model.checkpoint import read_model_info
from tests.engine.invariance.answers import ALONE, How, Instance, load, settings
from tests.engine.invariance.spread import Members
from tests.engine.shard_threads import ThreadedShards
from tests.engine.states.models import at_night
from tests.engine.vision.test_images import prompts_of, submit_of
from tests.engine.vision.tiny_vision_models import VISION_FAMILIES, make_tiny_vision_model, seen_prompt

MIXTURES = ("qwen3_vl_moe", "qwen3_5_moe", "glm4v_moe", "gemma4_moe")
DEEP = ("qwen3_vl", "qwen3_vl_moe")
"""Families whose images add to the first two layers, which one stage must have."""
NOT_CUT = ("qwen3_vl_moe", "lfm2_vl", "llama4")
"""Families that ``-tp`` refuses by name."""
NOT_STAGED = ("gemma4_small",)
"""Families that ``-pp`` refuses by name: all layers have inputs from a second embedding."""


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny model."""
    return cache(lambda family: make_tiny_vision_model(tmp_path_factory.mktemp(family), family))


@pytest.mark.nightly
@pytest.mark.parametrize("axis", ["tp", "pp"])
@pytest.mark.parametrize("family", [*VISION_FAMILIES])
def test_workers_give_the_tokens_of_one(family: str, axis: str, directories: Callable[[str], Path]) -> None:
    if family in (NOT_CUT if axis == "tp" else NOT_STAGED):
        pytest.skip("refused by name")
    directory = directories(family)
    submits = [submit_of(number, prompt) for number, prompt in enumerate(prompts_of(family))]
    alone, _ = load(directory, dtype="float32").answers(submits, ALONE)
    layout: dict[str, Any] = {axis: 2} | ({"split": (2, 1)} if axis == "pp" and family in DEEP else {})
    executor = ThreadedShards(settings(directory, dtype="float32"), read_model_info(directory), **layout)
    try:
        facts = executor.load(lambda _phase: None)
        found, _ = Instance(directory, executor, facts=facts).answers(submits, How(budget=24))
    finally:
        executor.close()
    assert {key: each.token_ids for key, each in found.items()} == {
        key: each.token_ids for key, each in alone.items()
    }


@pytest.mark.parametrize("family", at_night([*MIXTURES], ()))
def test_instances_that_share_experts_give_the_answers_of_one(
    family: str, directories: Callable[[str], Path]
) -> None:
    directory = directories(family)
    submits = [submit_of(number, prompt) for number, prompt in enumerate(prompts_of(family))]
    alone, _ = load(directory, dtype="float32").answers(submits, ALONE)
    members = Members(directory, 2, dtype="float32")
    try:
        assert members.answers(submits) == alone
    finally:
        members.close()


@pytest.mark.parametrize("family", at_night([*VISION_FAMILIES], ("llava",)))
def test_the_same_image_again_is_neither_encoded_nor_prefilled(
    family: str, directories: Callable[[str], Path]
) -> None:
    prompt = seen_prompt(family, 1, num_images=2, num_text=20)
    instance = load(directories(family), dtype="float32")
    submits = [submit_of(number, prompt) for number in range(3)]
    found, counters = instance.answers(submits, How(together=False))
    assert len({tuple(each.token_ids) for each in found.values()}) == 1
    assert instance.executor.image_encoder.num_encoded == 2, "for three requests with the same two images"
    hits = (len(prompt.ids) - 1) // instance.block_size * instance.block_size
    assert 0 < counters.prefix_cache_hits <= 2 * hits
    if not instance.facts.boundaries:  # states are kept at some positions only
        assert counters.prefix_cache_hits == 2 * hits
