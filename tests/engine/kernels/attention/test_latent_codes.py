"""Latents as codes of eight bits, behind numbers that stay in 16 bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.kv_codes import KVCodes
from engine.kernels.cache.native_cache import NativeCache
from engine.kernels.core import library
from engine.kernels.program import Program
from tests.engine.kernels.test_kernels import SCENARIO, everything, packed_rows, program_of
from tests.engine.kernels.test_native_trial import load
from tests.engine.native_families import LATENT, make_family

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

SHARED, LATENT_SIZE = LATENT["qk_rope_head_dim"], LATENT["kv_lora_rank"]
BLOCKS, BLOCK_SIZE = 64, 16
WIDER = 64.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("youtu"), "youtu")


def widen_shared(model: torch.nn.Module, factor: float) -> None:
    """Multiply what all keys share, and divide the queries that meet it.

    Scores stay as they are.
    """
    heads, own, changed = LATENT["qk_nope_head_dim"], LATENT["qk_nope_head_dim"] + SHARED, 0
    for name, weight in model.named_parameters():
        with torch.no_grad():
            if "kv_a_proj_with_mqa" in name:
                weight[LATENT_SIZE:] *= factor
                changed += 1
            elif "q_b_proj" in name:
                weight.view(-1, own, *weight.shape[1:])[:, heads:] /= factor
                changed += 1
    assert changed >= 2


def logits_of(
    directory: Path, dtype: torch.dtype, codes: KVCodes | None, factor: float = 1.0
) -> torch.Tensor:
    """Logits of rows in some steps; later ones read what earlier ones stored."""
    model = load(directory, dtype)
    widen_shared(model.module, factor)
    program: Program = program_of(model)
    room = {"num_blocks": BLOCKS, "block_size": BLOCK_SIZE, "dtype": dtype}
    program.use(NativeCache(program.cached, **room, codes=codes))
    assert program.cached[0].apart == SHARED
    found = []
    with torch.inference_mode():
        for rows in SCENARIO:
            packed, ids = packed_rows(rows)
            found.append(program.forward(packed, ids, everything(ids)).clone())
    return torch.cat(found)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    spread = (exact - exact.mean(dim=-1, keepdim=True)).norm(dim=-1)
    return float(((found - exact).norm(dim=-1) / spread).median())


@pytest.mark.parametrize(("codes", "most"), [("int8", 0.01), ("fp8", 0.04)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wide_shared_parts_cost_latents_no_codes(
    dtype: torch.dtype, codes: KVCodes, most: float, directory: Path
) -> None:
    """One scale for both would leave seven bits less of a latent."""
    exact = logits_of(directory, torch.float32, None)
    numbers = distance(logits_of(directory, dtype, None), exact)
    found = logits_of(directory, dtype, codes)
    assert 0 < distance(found, exact) <= most + 1.5 * numbers
    assert torch.equal(logits_of(directory, dtype, codes, WIDER), found)


def test_room_of_a_token(directory: Path) -> None:
    program = program_of(load(directory, torch.bfloat16))
    cache = NativeCache(
        program.cached, num_blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=torch.bfloat16, codes="int8"
    )
    bytes_kept = sum(int(each.nbytes) for each in cache.stored) // (BLOCKS * BLOCK_SIZE)
    assert bytes_kept == sum(layer.bytes_per_token(torch.bfloat16, "int8") for layer in program.cached)
    assert bytes_kept == len(program.cached) * (2 * SHARED + 2 * LATENT_SIZE + 4)
    assert np.all([len(each) == BLOCKS * BLOCK_SIZE for each in cache.stored])
