"""Images in prompts: transformers' tokens, bits in any batch, blocks named by pixels."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from msgspec.structs import replace

from engine.messages import Submit
from engine.sampling import SamplingParams
from tests.engine.invariance.answers import ALONE, How, load
from tests.engine.vision.tiny_vision_models import (
    VISION_FAMILIES,
    SeenPrompt,
    make_tiny_vision_model,
    seen_prompt,
)

NUM_NEW = 12


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A family's tiny model."""
    return cache(lambda family: make_tiny_vision_model(tmp_path_factory.mktemp(family), family))


def submit_of(number: int, prompt: SeenPrompt, *, num_new: int = NUM_NEW) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True, logprobs=2)
    return Submit(
        request=number,
        request_id=str(number),
        prompt_ids=prompt.ids,
        params=params,
        seed=number,
        images=prompt.images,
    )


def generated(model: Any, prompt: SeenPrompt) -> list[int]:
    ids = torch.tensor([prompt.ids])
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False,
            eos_token_id=None, pad_token_id=2, **prompt.tensors,
        )  # fmt: skip
    output: list[int] = found[0, len(prompt.ids) :].tolist()
    return output


def prompts_of(family: str) -> list[SeenPrompt]:
    return [
        seen_prompt(family, 1),
        seen_prompt(family, 2, num_images=2),
        seen_prompt(family, 3, num_images=0),
        seen_prompt(family, 4, num_text=1),
    ]


@pytest.mark.parametrize("family", VISION_FAMILIES)
def test_answers_are_transformers_own(family: str, directories: Callable[[str], Path]) -> None:
    directory, prompts = directories(family), prompts_of(family)
    model = hf.AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    expected = [generated(model, prompt) for prompt in prompts]
    instance = load(directory, dtype="float32")
    submits = [submit_of(number, prompt) for number, prompt in enumerate(prompts)]
    alone, _ = instance.answers(submits, ALONE)
    assert [alone[number].token_ids for number in range(len(prompts))] == expected
    for how in (How(), How(budget=7), How(budget=40, cache=160)):
        found, _ = instance.answers(submits, how)
        assert found == alone, how


def test_images_of_one_size_share_no_block(directories: Callable[[str], Path]) -> None:
    """The same image again is found; another one in its place is not."""
    one, other = seen_prompt("llava", 1), seen_prompt("llava", 2)
    swapped = SeenPrompt(
        one.ids, (replace(one.images[0], digest=other.images[0].digest, tensors=other.images[0].tensors),), {}
    )
    instance = load(directories("llava"), dtype="float32")
    submits = [submit_of(number, prompt) for number, prompt in enumerate([one, one, swapped])]
    alone, _ = instance.answers(submits, ALONE)
    assert alone[0] == alone[1] != alone[2]
    found, counters = instance.answers(submits, How(together=False))
    assert found == alone
    assert counters.prefix_cache_hits == len(one.ids) // instance.block_size * instance.block_size
    assert instance.executor.image_encoder.num_encoded <= 4, "an image was encoded for each request"
