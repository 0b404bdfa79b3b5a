"""Images in prompts: transformers' tokens, bits in any batch, blocks named by pixels."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from msgspec.structs import replace

from engine.kernels.core import library
from engine.messages import Submit
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.sampling import SamplingParams
from engine.vision import tower
from tests.engine.invariance.answers import ALONE, How, Instance, load, settings
from tests.engine.shard_threads import ThreadedShards
from tests.engine.states.models import at_night
from tests.engine.vision.tiny_vision_models import (
    BY_TORCH,
    PLACEHOLDER,
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
    given = dict(prompt.tensors)
    if "image_grid_thw" in given or "image_position_ids" in given:
        given["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
    if model.config.model_type == "gemma3":
        given["token_type_ids"] = (ids == PLACEHOLDER).int()
    if hasattr(model, "model"):
        model.model.rope_deltas = None  # which some families keep from the prompt before
    with torch.inference_mode():
        found = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, do_sample=False,
            eos_token_id=None, pad_token_id=2, **given,
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


EACH_PUSH = ("llava", "qwen3_vl", "gemma3", "gemma4", "gemma4_small")


@pytest.mark.parametrize("family", at_night([*VISION_FAMILIES], EACH_PUSH))
def test_answers_are_transformers_own(family: str, directories: Callable[[str], Path]) -> None:
    directory, prompts = directories(family), prompts_of(family)
    model = hf.AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    expected = [generated(model, prompt) for prompt in prompts]
    instance = load(directory, dtype="float32")
    assert (instance.executor._program is None) == (family in BY_TORCH)
    submits = [submit_of(number, prompt) for number, prompt in enumerate(prompts)]
    alone, _ = instance.answers(submits, ALONE)
    assert [alone[number].token_ids for number in range(len(prompts))] == expected
    smallest = 24 if instance.info.images_are_whole else 7  # such an image is not cut
    for how in (How(), How(budget=smallest), How(budget=40, cache=160)):
        found, _ = instance.answers(submits, how)
        if family in BY_TORCH:
            assert [found[number].token_ids for number in range(len(prompts))] == expected
        else:
            assert found == alone, how


@pytest.mark.parametrize("family", at_night([*VISION_FAMILIES], ("qwen3_vl", "gemma3", "gemma4_small")))
def test_torch_computes_the_same(family: str, directories: Callable[[str], Path]) -> None:
    directory, prompts = directories(family), prompts_of(family)[:2]
    model = hf.AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    instance = load(directory, dtype="float32", numerics="torch")
    assert instance.executor._program is None
    submits = [submit_of(number, prompt) for number, prompt in enumerate(prompts)]
    found, _ = instance.answers(submits, How(budget=24))
    expected = [generated(model, prompt) for prompt in prompts]
    assert [found[number].token_ids for number in range(len(prompts))] == expected


@pytest.mark.parametrize("is_invariant", [False, True])
def test_whole_images_are_seen_in_windows_longer_than_the_context(
    is_invariant: bool, directories: Callable[[str], Path], tmp_path: Path
) -> None:
    """And in no other layer."""
    directory = tmp_path / "model"
    prompts = [seen_prompt("gemma4", 1), seen_prompt("gemma4", 5, num_images=2)]
    shutil.copytree(directories("gemma4"), directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["sliding_window"] = 64
    (directory / "config.json").write_text(json.dumps(config))
    model = hf.AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    instance = load(directory, dtype="float32", numerics="torch", batch_invariant=is_invariant)
    submits = [submit_of(number, prompt) for number, prompt in enumerate(prompts)]
    found, _ = instance.answers(submits, How(budget=24))
    expected = [generated(model, prompt) for prompt in prompts]
    assert not any(PLACEHOLDER in ids for ids in expected), "which transformers would read as padding"
    assert [found[number].token_ids for number in range(2)] == expected


def test_stages_of_torch_have_no_inputs_of_each_layer(directories: Callable[[str], Path]) -> None:
    directory = directories("gemma4_small")
    wanted = settings(directory, dtype="float32", numerics="torch")
    executor = ThreadedShards(wanted, read_model_info(directory), pp=2)
    try:
        with pytest.raises(CheckpointError, match="embed_tokens_per_layer"):
            executor.load(lambda _phase: None)
    finally:
        executor.close()


FIXED = ["gemma3", "gemma4", "gemma4_small"]


@pytest.mark.parametrize("family", at_night(FIXED, ("gemma4", "gemma4_small")))
def test_fixed_blocks_see_whole_images(family: str, directories: Callable[[str], Path]) -> None:
    directory, prompts = directories(family), prompts_of(family)[:2]
    model = hf.AutoModelForImageTextToText.from_pretrained(directory, attn_implementation="eager").eval()
    instance = load(directory, dtype="float32", numerics="torch", batch_invariant=True)
    submits = [submit_of(number, prompt) for number, prompt in enumerate(prompts)]
    alone, _ = instance.answers(submits, ALONE)
    assert [alone[number].token_ids for number in range(2)] == [generated(model, each) for each in prompts]
    found, _ = instance.answers(submits, How(budget=24))
    assert found == alone


@pytest.mark.nightly
def test_older_checkpoints_describe_the_language_part_at_the_top(tmp_path: Path) -> None:
    directory, prompt = (
        make_tiny_vision_model(tmp_path, "qwen2_5_vl"),
        seen_prompt("qwen2_5_vl", 2, num_images=2),
    )
    new, _ = load(directory, dtype="float32").answers([submit_of(0, prompt)], ALONE)
    config = json.loads((directory / "config.json").read_text())
    text = config.pop("text_config")
    (directory / "config.json").write_text(json.dumps(text | config))
    found, _ = load(directory, dtype="float32").answers([submit_of(0, prompt)], ALONE)
    assert found == new


WORKERS = [
    pytest.param("qwen3_vl", {"pp": 2, "split": (2, 1)}),
    pytest.param("llava", {"tp": 2}, marks=pytest.mark.nightly),
    pytest.param("qwen2_5_vl", {"tp": 2, "pp": 2}, marks=pytest.mark.nightly),
    pytest.param("qwen3_vl", {"tp": 2}),
    pytest.param("qwen3_5", {"tp": 2}, marks=pytest.mark.nightly),
    pytest.param("gemma3", {"tp": 2}, marks=pytest.mark.nightly),
    pytest.param("gemma3", {"pp": 2}, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("family", "layout"), WORKERS)
def test_workers_give_the_answers_of_one(
    family: str, layout: dict[str, Any], directories: Callable[[str], Path]
) -> None:
    directory = directories(family)
    submits = [submit_of(number, prompt) for number, prompt in enumerate(prompts_of(family))]
    alone, _ = load(directory, dtype="float32").answers(submits, ALONE)
    executor = ThreadedShards(settings(directory, dtype="float32"), read_model_info(directory), **layout)
    try:
        facts = executor.load(lambda _phase: None)
        found, _ = Instance(directory, executor, facts=facts).answers(submits, How(budget=24))
    finally:
        executor.close()
    if "tp" in layout:  # sums of floats in another order
        assert {key: each.token_ids for key, each in found.items()} == {
            key: each.token_ids for key, each in alone.items()
        }
    else:
        assert found == alone


def test_images_behind_layers_need_these_on_one_stage(directories: Callable[[str], Path]) -> None:
    directory = directories("qwen3_vl")
    layout: dict[str, Any] = {"pp": 2, "split": (1, 2)}
    executor = ThreadedShards(settings(directory, dtype="float32"), read_model_info(directory), **layout)
    try:
        with pytest.raises(CheckpointError, match="first stage has 1 layers, and images add to the first 2"):
            executor.load(lambda _phase: None)
    finally:
        executor.close()


@pytest.mark.parametrize("family", at_night(["llava", "gemma4_small"], ("llava",)))
def test_images_of_one_size_share_no_block(family: str, directories: Callable[[str], Path]) -> None:
    """The same image again is found; another one in its place is not."""
    one, other = seen_prompt(family, 1), seen_prompt(family, 2)
    swapped = SeenPrompt(
        one.ids, (replace(one.images[0], digest=other.images[0].digest, tensors=other.images[0].tensors),), {}
    )
    instance = load(directories(family), dtype="float32")
    submits = [submit_of(number, prompt) for number, prompt in enumerate([one, one, swapped])]
    alone, _ = instance.answers(submits, ALONE)
    assert alone[0] == alone[1] != alone[2]
    found, counters = instance.answers(submits, How(together=False))
    assert found == alone
    assert counters.prefix_cache_hits == len(one.ids) // instance.block_size * instance.block_size
    assert instance.executor.image_encoder.num_encoded <= 4, "an image was encoded for each request"


@pytest.mark.parametrize(
    ("family", "seed", "num_text"), [("qwen3_vl", 3, 9), ("gemma3", 1, 1), ("gemma4", 1, 9)]
)
def test_hits_that_end_in_an_image_go_on_there(
    family: str, seed: int, num_text: int, directories: Callable[[str], Path]
) -> None:
    prompt = seen_prompt(family, seed, num_text=num_text)
    instance = load(directories(family), dtype="float32")
    submits = [submit_of(number, prompt) for number in range(2)]
    alone, _ = instance.answers(submits, ALONE)
    found, counters = instance.answers(submits, How(together=False))
    assert found == alone
    assert prompt.images[0].first < counters.prefix_cache_hits < prompt.images[0].end


def test_rows_in_bfloat16_are_those_of_float32_rounded(directories: Callable[[str], Path]) -> None:
    """Where the kernels in use have no products in bfloat16."""
    image = seen_prompt("llava", 1).images[0]
    rows, wide = (
        tower.load_tower(directories("llava"), dtype, torch.float32, torch.device("cpu")).encode(image)
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert rows.dtype == torch.bfloat16
    assert torch.equal(rows, wide.to(torch.bfloat16))


@pytest.mark.parametrize("numerics", ["avx2", "torch"])
def test_the_type_of_an_encoder_follows_the_class(
    numerics: str, directories: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts of one class compute alike, whatever else their CPUs have."""
    if library.why_not("avx2") is not None:
        pytest.skip("no AVX2 here")
    monkeypatch.setattr(tower, "cpu_flags", lambda: {"avx512_bf16", "amx_bf16"})
    executor = load(directories("llava"), numerics=numerics).executor
    assert executor.image_encoder.tower.computes == torch.float32
    (found,) = executor.arithmetic()
    capability = torch.backends.cpu.get_cpu_capability()
    assert found.version.endswith(f", images in float32 on {capability}")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    assert executor.arithmetic() != [found]


def test_products_in_bfloat16_are_those_of_the_kernels() -> None:
    wide = SimpleNamespace(multiplies_bfloat16=True)
    cpu, on = torch.device("cpu"), tower.computing_type
    assert on(torch.bfloat16, cpu, wide) == torch.bfloat16  # type: ignore[arg-type]
    assert on(torch.bfloat16, cpu, SimpleNamespace(multiplies_bfloat16=False)) == torch.float32  # type: ignore[arg-type]
    assert on(torch.bfloat16, cpu, None) == on(torch.float32, cpu, wide) == torch.float32  # type: ignore[arg-type]
    assert on(torch.bfloat16, torch.device("cuda"), None) == torch.bfloat16
