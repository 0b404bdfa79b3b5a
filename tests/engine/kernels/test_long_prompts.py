"""Prompts of 3,000 tokens through the native kernels, for each family that they compute.

For each push two of them are tried, at night all.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from engine.attention.base import PackedRows
from engine.kernels.core import library
from engine.kernels.program import Program
from tests.engine.greedy import greedy_outputs
from tests.engine.native_families import NATIVE, make_family
from tests.engine.native_positions import TABLE, Both, deviations, is_mixture, load_both
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

LENGTH = 3000
ANSWER = 12
EACH_PUSH = ("llama", "mistral")
"""Families with full attention and with a window."""
FAMILIES = [
    family if family in EACH_PUSH else pytest.param(family, marks=pytest.mark.nightly) for family in NATIVE
]
WAYS = {
    "whole": [LENGTH],
    "pieces of 64": [64] * 47,
    "pieces of 512": [512] * 6,
    "pieces of 2048": [2048] * 2,
}
WAYS |= {"after a prefix of 1040": [1040, LENGTH], "the last token alone": [LENGTH - 1, 1]}
"""Tokens of each step of a prompt; the last step has those that are left."""


def prompt_of(seed: int) -> list[int]:
    numbers = Random(seed)
    return [numbers.randrange(3, VOCAB) for _ in range(LENGTH)]


def step(program: Program, table: np.ndarray, tokens: Sequence[int], start: int) -> torch.Tensor:
    """Logits behind the last of these tokens of one text."""
    count = len(tokens)
    packed = PackedRows(
        np.array([start]), np.array([count]), table, np.arange(start, start + count), int(count == 1)
    )
    with torch.inference_mode():
        return program.forward(packed, np.array(tokens), np.array([count - 1]))[0].clone()


def prompt_logits(program: Program, prompt: Sequence[int], sizes: Sequence[int], seed: int) -> torch.Tensor:
    """Logits behind a prompt that is computed in steps of these sizes."""
    table = shuffled(seed)
    start = 0
    for size in sizes:
        logits = step(program, table, prompt[start : start + size], start)
        start += size
    assert start >= len(prompt)
    return logits


def shuffled(seed: int) -> np.ndarray:
    order = list(range(TABLE))
    Random(seed).shuffle(order)
    return np.array([order], dtype=np.int32)


def greedy(program: Program, prompt: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """The answer to a prompt that is computed in steps of these sizes."""
    tokens = [int(prompt_logits(program, prompt, sizes, seed=1).argmax())]
    while len(tokens) < ANSWER:
        logits = step(program, shuffled(1), tokens[-1:], len(prompt) + len(tokens) - 1)
        tokens.append(int(logits.argmax()))
    return tokens


@functools.cache
def loaded(family: str, dtype: torch.dtype) -> Both:
    with tempfile.TemporaryDirectory() as directory:
        return load_both(make_family(Path(directory), family), dtype)


@pytest.fixture(autouse=True, scope="module")
def freed() -> Iterator[None]:
    yield
    loaded.cache_clear()


@pytest.mark.parametrize("family", FAMILIES)
def test_token_ids_behind_a_long_prompt_are_those_of_generate(family: str) -> None:
    both = loaded(family, torch.float32)
    prompt = prompt_of(seed=5)
    (wanted,) = greedy_outputs(both.theirs, [prompt], [ANSWER])
    assert greedy(both.program, prompt, WAYS["pieces of 512"]) == wanted
    assert greedy(both.program, prompt, WAYS["whole"]) == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_in_bfloat16_is_as_close_to_float32_as_with_torch(family: str) -> None:
    found = deviations(loaded(family, torch.bfloat16), iter([[prompt_of(seed=6)]]), Random(6))
    assert len(found.positions) == LENGTH
    assert found.problem(torch.bfloat16, is_mixture=is_mixture(family)) is None


@pytest.mark.diagonal("family", "dtype", columns=2, each=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_behind_a_long_prompt_are_the_same_in_any_pieces(family: str, dtype: torch.dtype) -> None:
    program, prompt = loaded(family, dtype).program, prompt_of(seed=7)
    found = {
        way: prompt_logits(program, prompt, sizes, number) for number, (way, sizes) in enumerate(WAYS.items())
    }
    assert [way for way, logits in found.items() if not torch.equal(logits, found["whole"])] == []
