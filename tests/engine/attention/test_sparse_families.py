"""Models whose queries see a part of their context, against transformers' generate without a cache."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.engine.compute.test_runner import GREEDY, load, make_driver
from tests.engine.states.models import make_state_model
from tests.engine.tiny_models import VOCAB

FAMILIES = ["llama4_text"]
LENGTHS = (5, 37, 3, 11, 12, 13, 150)
"""Tokens of prompts, around the borders of chunks, and far beyond them."""
NUM_NEW = 14


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
    for chunk in (1, 7, 50, 1 << 20):
        driver = make_driver(model, chunk)
        requests = [driver.add(prompt, GREEDY) for prompt in prompts]
        driver.generate(requests, NUM_NEW, chunk=chunk, together=chunk != 50)
        assert [request.output_ids for request in requests] == expected, f"in chunks of {chunk}"
