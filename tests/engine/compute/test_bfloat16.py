"""Deviations of bfloat16 on the shipped model: no larger than in transformers itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers

from engine.attention.base import PLAN_KEYWORD, PackedRows
from engine.attention.torch_paged import TorchPagedAttention
from engine.config import SHIPPED_MODEL, ModelConfig
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.decoder import recognise
from engine.kernels.program import Program
from engine.model.checkpoint import read_model_info
from engine.model.finding import MODELS_DIRECTORY
from engine.model.weights import load_model

DIRECTORY = MODELS_DIRECTORY / SHIPPED_MODEL
TEXT = (
    "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of "
    "a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, "
    "this truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful "
    "property of some one or other of their daughters. Elizabeth, having rather expected to affront him, was amazed "
    "at his gallantry; but there was a mixture of sweetness and archness in her manner which made it difficult for "
    "her to affront anybody; and Darcy had never been so bewitched by any woman as he was by her."
)
SLACK = 1.15
"""Tolerance between two ways of rounding that are equally good."""


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DIRECTORY)
    found = np.array(tokenizer(TEXT)["input_ids"])
    assert len(found) > 100
    return found


@pytest.fixture(scope="module")
def exact(ids: np.ndarray) -> torch.Tensor:
    return of_transformers(ids, torch.float32)


@torch.inference_mode()
def of_transformers(ids: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(DIRECTORY, dtype=dtype)
    logits: torch.Tensor = model(torch.from_numpy(ids)[None]).logits[0].float()
    return logits


def deviation(found: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Deviation of a token's logits, relative to their spread.

    Median and root of mean square over the tokens.
    """
    size = (exact - exact.mean(dim=-1, keepdim=True)).norm(dim=-1)
    relative = (found - exact).norm(dim=-1) / size
    return float(relative.median()), float(relative.square().mean().sqrt())


@torch.inference_mode()
def of_lockstep(ids: np.ndarray, dtype: torch.dtype, *, native: bool) -> torch.Tensor:
    """All logits of one prompt, computed in pieces as an instance does.

    The pieces are a chunk, a chunk, and tokens one by one.
    """
    info = read_model_info(DIRECTORY)
    model = load_model(info, ModelConfig(), dtype=dtype, device=torch.device("cpu"))
    cuts = [0, 64, len(ids) - 5, *range(len(ids) - 4, len(ids) + 1)]
    blocks = np.arange(16, dtype=np.int32)[None]
    shape = {"num_blocks": 16, "block_size": 16, "dtype": dtype}
    program, own = None, None
    if native:
        kernels = library.load()
        assert kernels is not None
        program = Program(kernels, recognise(model.module, model.layers, dtype))
        program.use(NativeCache(model.layers, **shape))
    else:
        own = TorchPagedAttention(model.layers, device=model.device, **shape)
    parts = []
    for start, stop in pairwise(cuts):
        positions = np.arange(start, stop)
        packed = PackedRows(
            np.array([start]), np.array([stop - start]), blocks, positions, int(stop - start == 1)
        )
        if program is not None:
            parts.append(program.forward(packed, ids[start:stop], positions - start).clone())
        else:
            assert own is not None
            output = model.module(
                input_ids=torch.from_numpy(ids[start:stop])[None],
                position_ids=torch.from_numpy(positions)[None],
                use_cache=False,
                **{PLAN_KEYWORD: own.plan(packed)},
            )
            parts.append(output.logits[0].float())
    return torch.cat(parts)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_bfloat16_differs_from_float32_no_more_than_in_transformers(
    ids: np.ndarray, exact: torch.Tensor, native: bool
) -> None:
    if native and library.load() is None:
        pytest.skip("no AVX2, or no C++ compiler, here")
    median, mean = deviation(of_lockstep(ids, torch.bfloat16, native=native), exact)
    their_median, their_mean = deviation(of_transformers(ids, torch.bfloat16), exact)
    assert their_median > 1e-3, "there is something to compare with"
    assert median <= SLACK * their_median
    assert mean <= SLACK * their_mean


@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
def test_float32_is_exact_on_the_native_path(ids: np.ndarray, exact: torch.Tensor) -> None:
    median, mean = deviation(of_lockstep(ids, torch.float32, native=True), exact)
    assert median < 1e-5
    assert mean < 1e-3, "near-ties between experts may fall the other way"


@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
def test_bits_do_not_depend_on_neighbours_chunks_or_threads(ids: np.ndarray) -> None:
    """A prompt alone on one thread, and in pieces beside others on two.

    AMX is used where there is some.
    """
    kernels = library.load()
    assert kernels is not None
    model = load_model(
        read_model_info(DIRECTORY), ModelConfig(), dtype=torch.bfloat16, device=torch.device("cpu")
    )
    decoder = recognise(model.module, model.layers, model.dtype)
    blocks = np.arange(48, dtype=np.int32).reshape(3, 16)

    def run(program: Program, rows: list[tuple[int, int, int]]) -> torch.Tensor:
        requests, starts, counts = (np.array(column) for column in zip(*rows, strict=True))
        positions = np.concatenate([np.arange(start, start + count) for _, start, count in rows])
        packed = PackedRows(starts, counts, blocks[requests], positions, int((counts == 1).sum()))
        tokens = (ids[positions] + 17 * np.repeat(requests, counts)) % model.vocab_size
        return program.forward(packed, tokens, np.arange(len(positions))).clone()

    def fresh() -> Program:
        program = Program(kernels, decoder)
        program.use(NativeCache(model.layers, num_blocks=48, block_size=16, dtype=model.dtype))
        return program

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = run(fresh(), [(0, 0, 101)])
        torch.set_num_threads(2)
        mixed = fresh()
        first = run(mixed, [(0, 0, 37), (1, 0, 50)])[:37]
        second = run(mixed, [(2, 0, 1), (1, 50, 5), (0, 37, 63)])[6:]
        third = run(mixed, [(2, 1, 1), (0, 100, 1), (1, 55, 1)])[1:2]
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.cat([first, second, third]), alone), "bit for bit"
