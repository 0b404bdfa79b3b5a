"""What transformers generates greedily for each prompt alone, in few calls of the model.

A guess for all prompts at once is checked in one call for each. From the first wrong token on, ``generate``
makes the output. So the outputs are those of ``generate`` for each prompt alone, however good the guess was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PAD = 2


def greedy_outputs(model: Any, prompts: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """As many tokens for each prompt as ``lengths`` says."""
    guesses = _generated(model, prompts, max(lengths))
    return [
        _checked(model, prompt, guess[:length])
        for prompt, guess, length in zip(prompts, guesses, lengths, strict=True)
    ]


def _checked(model: Any, prompt: list[int], guess: list[int]) -> list[int]:
    """The output of one prompt, if need be another one of the guess's length."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + guess[:-1]]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1 :].argmax(dim=-1).tolist()
    if best == guess:
        return guess
    right = next(index for index, token in enumerate(best) if token != guess[index])
    output = best[: right + 1]
    missing = len(guess) - len(output)
    return output + (_generated(model, [prompt + output], missing)[0] if missing else [])


def _generated(model: Any, prompts: Sequence[list[int]], length: int) -> list[list[int]]:
    """Outputs of all prompts at once: exact for one, else nearly so."""
    longest = max(map(len, prompts))
    found = model.generate(
        torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]),
        attention_mask=torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        ),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=PAD,
    )
    outputs: list[list[int]] = found[:, longest:].tolist()
    return outputs
