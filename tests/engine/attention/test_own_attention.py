"""Attention that older families compute themselves, against transformers' generate without a cache."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention.base import LayersInTurn
from engine.attention.own_attention import KINDS
from engine.config import CacheConfig
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.decoder import recognise
from engine.model.checkpoint import CheckpointError
from engine.model.choice import choose_backend
from engine.model.model_sources import OWN_ATTENTION
from tests.engine.compute.test_runner import GREEDY, load, make_driver
from tests.engine.invariance.answers import ALONE
from tests.engine.invariance.answers import load as load_instance
from tests.engine.invariance.mixed import requests
from tests.engine.states.models import make_state_model
from tests.engine.tiny_models import VOCAB

BIASED = ["Falcon, ALiBi", "bloom", "mpt"]
FAMILIES = [
    *BIASED,
    "Falcon, new decoder",
    "bert",
    "codegen",
    "diffllama",
    "gpt_neo",
    "gpt_neox_japanese",
    "gptj",
    "megatron-bert",
    "openai-gpt",
    "stablelm",
    "xglm",
]
LENGTHS = (5, 37, 3, 150)
"""Tokens of prompts, around the borders of GPT-Neo's windows, and far beyond them."""
NUM_NEW = 8


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate_without_a_cache(family: str, tmp_path: Path) -> None:
    make_state_model(tmp_path, family)
    numbers = random.Random(3)
    prompts = [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "use_cache": False, "eos_token_id": None}
    with torch.no_grad():
        expected = [
            own.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts
        ]
    model = load(tmp_path)
    for chunk in (7, 1 << 20):
        driver = make_driver(model, chunk)
        added = [driver.add(prompt, GREEDY) for prompt in prompts]
        driver.generate(added, NUM_NEW, chunk=chunk, together=True)
        assert [request.output_ids for request in added] == expected, f"in chunks of {chunk}"


@pytest.mark.parametrize("family", ["mpt", "gpt_neo", "diffllama"])
def test_bits_in_company_are_those_alone(family: str, tmp_path: Path) -> None:
    directory = make_state_model(tmp_path, family, torch.bfloat16)
    instance = load_instance(directory, dtype="bfloat16", batch_invariant=True)
    submits = [
        msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, grammar=None))
        for each in requests(5, vocab_size=VOCAB, greedy=False, count=6, longest=120, most=8)
    ]
    instance.check_in_company(submits, instance.answers(submits, ALONE)[0])


@pytest.mark.parametrize("family", BIASED)
def test_codes_of_keys_with_linear_biases_are_refused(family: str, tmp_path: Path) -> None:
    model = load(make_state_model(tmp_path, family))
    assert choose_backend("auto", model, CacheConfig()) == "TORCH_SDPA"
    with pytest.raises(CheckpointError, match=r"--kv-cache-dtype int8: .*linear biases \(ALiBi\)"):
        choose_backend("auto", model, CacheConfig(kv_cache_dtype="int8"))


def test_a_module_that_attends_several_times_is_no_layer_of_the_kernels(tmp_path: Path) -> None:
    model = load(make_state_model(tmp_path, "diffllama"))
    with pytest.raises(NotRecognised, match="DiffLlamaAttention attends several times per token"):
        recognise(model.module, model.layers, model.dtype)


def test_calls_of_a_module_take_its_layers_in_turn_and_begin_anew_with_each_step() -> None:
    layers = LayersInTurn(3)
    layers.layers += [4, 7]
    first, second = object(), object()
    assert [layers.next(first) for _ in range(6)] == [3, 4, 7, 3, 4, 7]
    assert [layers.next(first), layers.next(first)] == [3, 4]  # a step that was cut short
    assert [layers.next(second) for _ in range(3)] == [3, 4, 7]


def test_the_kinds_that_config_json_lets_pass_are_those_that_are_built() -> None:
    assert {kind.split(".")[0] for kind in KINDS} == OWN_ATTENTION
