"""Long prompts in native kernels: the ids of ``generate``, and bits that no piece changes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.attention.base import PackedRows
from engine.config import ModelConfig
from engine.kernels import library
from engine.kernels.cache import NativeCache
from engine.kernels.decoder import recognise
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.weights import LoadedModel, load_model
from tests.engine.greedy import greedy_outputs
from tests.engine.native_families import NATIVE, make_family
from tests.engine.tiny_models import VOCAB

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

BLOCK_SIZE = 16
OUTPUTS = 12
LIKE_GENERATE = sorted(NATIVE.keys() - {"llama_dynamic"})
"""Families without angles that depend on the longest sequence so far.

An instance fixes those once, for the longest that it serves.
"""


class OneSequence:
    """A sequence whose tokens come in pieces."""

    def __init__(self, model: LoadedModel, length: int) -> None:
        assert KERNELS is not None
        blocks = length // BLOCK_SIZE + 1
        self._program = Program(KERNELS, recognise(model.module, model.layers, model.dtype))
        self._program.use(
            NativeCache(model.layers, num_blocks=blocks, block_size=BLOCK_SIZE, dtype=model.dtype)
        )
        self._table = np.random.default_rng(1).permutation(blocks).astype(np.int32)[None]
        self._done = 0

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [ids, vocabulary] of the next tokens."""
        start, count = self._done, len(ids)
        positions = np.arange(start, start + count)
        packed = PackedRows(np.array([start]), np.array([count]), self._table, positions, int(count == 1))
        self._done += count
        return self._program.forward(packed, np.array(ids), np.arange(count)).clone()

    def in_pieces(self, ids: Sequence[int], piece: int) -> torch.Tensor:
        starts = range(0, len(ids), piece)
        return torch.cat([self.logits(ids[start : start + piece]) for start in starts])


def loaded(directory: Path, dtype: torch.dtype) -> LoadedModel:
    return load_model(read_model_info(directory), ModelConfig(), dtype=dtype, device=torch.device("cpu"))


def prompt_of(length: int) -> list[int]:
    numbers = Random(length)
    return [numbers.randrange(3, VOCAB) for _ in range(length)]


def check_ids(directory: Path, family: str, length: int, piece: int) -> None:
    """Greedy ids in float32 are those of ``generate``."""
    make_family(directory, family)
    prompt = prompt_of(length)
    own = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    (expected,) = greedy_outputs(own, [prompt], [OUTPUTS])
    sequence = OneSequence(loaded(directory, torch.float32), length + OUTPUTS)
    found = [int(sequence.in_pieces(prompt, piece)[-1].argmax())]
    while len(found) < OUTPUTS:
        found.append(int(sequence.logits(found[-1:])[0].argmax()))
    assert found == expected


@pytest.mark.parametrize("family", ["llama", "ministral"])
def test_ids_of_a_long_prompt_are_those_of_generate(tmp_path: Path, family: str) -> None:
    check_ids(tmp_path, family, 1100, 512)


@pytest.mark.nightly
@pytest.mark.parametrize("family", LIKE_GENERATE)
def test_ids_of_each_family_with_3000_tokens_are_those_of_generate(tmp_path: Path, family: str) -> None:
    check_ids(tmp_path, family, 3000, 2048)


def check_bits(directory: Path, family: str, length: int, pieces: Sequence[int]) -> None:
    """Logits at all positions are the same bits in pieces of any size."""
    model, prompt = loaded(make_family(directory, family), torch.bfloat16), prompt_of(length)
    whole = OneSequence(model, length).logits(prompt)
    for piece in pieces:
        assert torch.equal(OneSequence(model, length).in_pieces(prompt, piece), whole), piece


@pytest.mark.parametrize("family", ["ministral", "qwen3_moe"])
def test_bits_of_a_prompt_are_the_same_in_any_pieces(tmp_path: Path, family: str) -> None:
    check_bits(tmp_path, family, 700, (64, 512))


@pytest.mark.nightly
@pytest.mark.parametrize("family", sorted(NATIVE))
def test_bits_of_long_prompts_are_the_same_in_any_pieces(tmp_path: Path, family: str) -> None:
    check_bits(tmp_path, family, 3000, (1, 64, 512, 2048))
