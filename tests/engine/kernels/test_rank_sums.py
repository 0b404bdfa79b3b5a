"""Logits of tensor-parallel ranks equal those of one worker, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.kernels import library
from parallel.communicators.base import Communicator
from tests.engine.kernels.test_native_shards import Rank, of_all, shared
from tests.engine.tiny_models import make_tiny_model
from tests.parallel.thread_group import thread_group

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")
LAYERS = 3
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "vocab_size": 385}
SHAPES = {
    "qwen2": WIDE | {"head_dim": None},
    "qwen3_moe": WIDE | {"moe_intermediate_size": 128, "num_experts_per_tok": 3},
}

@pytest.fixture(scope="module", params=SHAPES)
def directory(request, tmp_path_factory):
    family = str(request.param)
    place = tmp_path_factory.mktemp(family)
    changes = {k: v for k, v in SHAPES[family].items() if v is not None}
    return make_tiny_model(place, family, layers=LAYERS, **changes)

def run(directory, size, groups, dtype):
    results = of_all(size, groups, lambda rank, group: Rank(directory, rank, group, dtype).run())
    return [torch.cat(parts, dim=1) for parts in zip(*results, strict=True)]

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("how", ["shared", "communicator"])
def test_equal(directory, size, dtype, how):
    alone = run(directory, 1, thread_group(1).__getitem__, dtype)
    groups = shared(size) if how == "shared" else thread_group(size).__getitem__
    for a, b in zip(alone, run(directory, size, groups, dtype), strict=True):
        assert torch.equal(a, b), (a - b).abs().max()
