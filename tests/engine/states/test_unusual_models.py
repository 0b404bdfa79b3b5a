"""Hybrids with unusual sizes, and with files that lack weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore, ModelPlace
from engine.executor.uni import UniExecutor
from engine.messages import Submit
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.pieces.kinds import BoundarySlots
from engine.sampling import SamplingParams
from tests.engine.compute.test_runner import load
from tests.engine.shard_threads import ThreadedShards
from tests.engine.states.models import generated, make_state_model
from tests.engine.states.test_state_families import GRID, NUM_NEW
from tests.engine.tiny_models import VOCAB, save, widen
from tests.families.configs import make_config

PROMPTS = [[3 + (index * index) % (VOCAB - 3) for index in range(length)] for length in (5, GRID + 7)]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(directory: Path, family: str, **sizes: int) -> Path:
    model = AutoModelForCausalLM.from_config(make_config(family, **sizes), dtype=torch.float32)
    widen(model, 1)
    return save(model, directory)


def served(directory: Path, tp: int = 1, max_model_len: int = 256) -> EngineCore:
    """An instance of so many workers, which are threads."""
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="float32", max_model_len=max_model_len),
        scheduler=SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=2),
    )
    info = read_model_info(directory)
    executor = UniExecutor(config, info, 1) if tp == 1 else ThreadedShards(config, info, tp=tp)
    facts = executor.load(lambda _phase: None)
    executor.allocate(16, 8)
    boundaries = [BoundarySlots(kind, 8) for kind in facts.boundaries]
    place = ModelPlace(boundaries=boundaries)
    return EngineCore(config, info, executor, num_blocks=16, max_model_len=max_model_len, place=place)


def submit(core: EngineCore, number: int, prompt: list[int]) -> object:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    return core.submit(b"router", Submit(number, str(number), prompt, params, 0))


def answers(core: EngineCore) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        assert submit(core, number, prompt) is None
    while core.has_work:
        for delta in core.step().get(b"router", []):
            found[delta.request] += delta.token_ids
    return found


@pytest.mark.parametrize("native", [True, False])
def test_a_chunk_size_that_is_no_multiple_of_the_grid_changes_no_token(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, "granitemoehybrid", mamba_chunk_size=24)
    if not native:
        monkeypatch.setenv("LOCKSTEP_NATIVE_KERNELS", "0")
    assert answers(served(tmp_path)) == generated(tmp_path, PROMPTS, NUM_NEW)


@pytest.mark.parametrize("tp", [4, 8])
def test_more_workers_than_heads_with_a_state_have_the_tokens_of_one(tp: int, tmp_path: Path) -> None:
    """Some workers hold no output of a layer that all gather."""
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    make(tmp_path, "qwen3_5_text", **heads, linear_num_value_heads=2, linear_num_key_heads=2)
    assert answers(served(tmp_path, tp)) == generated(tmp_path, PROMPTS, NUM_NEW)


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2"])
def test_a_checkpoint_without_weights_of_a_convolution_is_refused(family: str, tmp_path: Path) -> None:
    make_state_model(tmp_path, family)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = [name for name in tensors if "conv" in name and name.endswith("weight")]
    kept = {name: tensor for name, tensor in tensors.items() if name not in lost}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"lacks {len(lost)} tensor\(s\) .* {lost[0]}"):
        load(tmp_path)


def test_a_prompt_beyond_the_keys_that_an_index_chooses_is_refused_if_the_context_ends_there(
    tmp_path: Path,
) -> None:
    make(tmp_path, "deepseek_v32", num_key_value_heads=4)
    core = served(tmp_path, max_model_len=16)
    assert submit(core, 0, PROMPTS[1][:15]) is None
    problem = str(submit(core, 1, PROMPTS[1][:17]))
    assert "the prompt has 17 tokens; the context length is 16" in problem
