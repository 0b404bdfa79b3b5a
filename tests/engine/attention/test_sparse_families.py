"""Models whose queries see a part of their context, against transformers' eager attention."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from engine.attention import make_attention
from engine.compute.runner import ModelRunner
from tests.engine.compute.test_runner import BLOCK_SIZE, GREEDY, load, make_driver
from tests.engine.driver import Driver
from tests.engine.states.models import make_state_model
from tests.engine.tiny_models import VOCAB, save, widen
from tests.families.configs import make_config
from tests.nightly import NIGHTLY

FAMILIES = [
    "llama4_text",
    "deepseek_v32",
    pytest.param("glm_moe_dsa", marks=pytest.mark.nightly),
    "GLM-5.2, shared choices",
    pytest.param("axk2", marks=pytest.mark.nightly),
    pytest.param("hy_v4", marks=pytest.mark.nightly),
    "minimax_m3_vl_text",
]
LENGTHS = (5, 37, 3, 11, 12, 13, 150)
"""Tokens of prompts, around the borders of chunks, and far beyond them."""
NUM_NEW = 14
LONG = 4096 if NIGHTLY else 1024
"""Tokens of a long context, of which each query sees 16."""
CHUNKS = (1, 7, 50, 1 << 20) if NIGHTLY else (7, 50)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate_without_a_cache(family: str, tmp_path: Path) -> None:
    make_state_model(tmp_path, family)
    numbers = random.Random(3)
    prompts = [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    own = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    options = {"max_new_tokens": NUM_NEW, "do_sample": False, "use_cache": False, "eos_token_id": None}
    with torch.no_grad():
        expected = [
            own.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist() for prompt in prompts
        ]
    model = load(tmp_path)
    for chunk in CHUNKS:
        driver = make_driver(model, chunk)
        requests = [driver.add(prompt, GREEDY) for prompt in prompts]
        driver.generate(requests, NUM_NEW, chunk=chunk, together=chunk != 50)
        assert [request.output_ids for request in requests] == expected, f"in chunks of {chunk}"


class _StableTopK(TorchFunctionMode):  # type: ignore[misc]
    """Context in which the first of equal numbers are chosen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.topk:
            return func(*args, **(kwargs or {}))
        values, indices = args[0].sort(dim=-1, descending=True, stable=True)
        return torch.return_types.topk((values[..., : args[1]], indices[..., : args[1]]))


LONG_CASES = [
    "deepseek_v32",
    pytest.param("glm_moe_dsa", marks=pytest.mark.nightly),
    "minimax_m3_vl_text",
]


@pytest.mark.parametrize("family", LONG_CASES)
def test_a_long_context_is_seen_by_few_keys(family: str, tmp_path: Path) -> None:
    """Ids equal those of one eager run over the prompt and them.

    Of equal scores transformers chooses any: some of the queries have such at the border of what is chosen.
    """
    config = make_config(family)
    config.max_position_embeddings = LONG + NUM_NEW
    config.index_n_heads = config.num_key_value_heads if family == "minimax_m3_vl_text" else 8
    own = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    widen(own, 1)
    save(own, tmp_path)
    numbers = random.Random(7)
    prompt = [numbers.randrange(3, VOCAB) for _ in range(LONG)]
    model = load(tmp_path)
    num_blocks = LONG // BLOCK_SIZE + 20
    cache = make_attention(
        model.layers, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device=model.device
    )
    driver = Driver(ModelRunner(model, cache, BLOCK_SIZE), BLOCK_SIZE, num_blocks, 0)
    requests = [driver.add(prompt, GREEDY), driver.add(prompt[:40], GREEDY)]
    driver.generate(requests, NUM_NEW, chunk=512, together=True)
    found = requests[0].output_ids
    with torch.no_grad(), _StableTopK():
        logits = own(torch.tensor([prompt + found[:-1]]), use_cache=False).logits[0, LONG - 1 :]
    assert logits.argmax(dim=1).tolist() == found
    assert len(set(found)) > 3
