from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine import greedy
from tests.engine.tiny_models import VOCAB, make_tiny_model

LENGTHS = (1, 7, 12, 9)


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_outputs_are_those_of_generate_whatever_was_guessed(
    wrong: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "qwen2")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    numbers = random.Random(1)
    prompts = [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in (23, 1, 9, 40)]
    expected = []
    for prompt, length in zip(prompts, LENGTHS, strict=True):
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        found = model.generate(
            ids, attention_mask=mask, max_new_tokens=length, do_sample=False, eos_token_id=None
        )
        expected.append(found[0, len(prompt) :].tolist())
    generated = greedy._generated

    def guessed(model: Any, texts: list[list[int]], length: int) -> list[list[int]]:
        outputs = generated(model, texts, length)
        if len(texts) == 1:
            return outputs
        return [[abs(each - (numbers.random() < wrong)) for each in output] for output in outputs]

    monkeypatch.setattr(greedy, "_generated", guessed)
    assert greedy.greedy_outputs(model, prompts, LENGTHS) == expected
