"""Experts without a gate: the square of what is above 0, between two products."""

from __future__ import annotations

import pytest
import torch
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from engine.kernels.core import library
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.experts.form import form_of
from engine.kernels.experts.packed_experts import NativeExperts

COUNTS = [3, 0, 7, 1, 20]
HIDDEN = 96


def made(width: int, dtype: torch.dtype) -> NemotronHExperts:
    config = NemotronHConfig(hidden_size=HIDDEN, n_routed_experts=len(COUNTS), moe_intermediate_size=width)
    module = NemotronHExperts(config)
    for weight in module.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return module.to(dtype)


def by_torch(module: NemotronHExperts, rows: torch.Tensor) -> torch.Tensor:
    """Results of rows that are sorted by expert, in float32."""
    results = []
    for up, down, some in zip(module.up_proj, module.down_proj, rows.split(COUNTS), strict=True):
        results.append((some.float() @ up.float().T).relu().square() @ down.float().T)
    return torch.cat(results)


@pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")
@pytest.mark.parametrize("width", [32, 48, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("avx2", [False, True])
@torch.inference_mode()
def test_the_results_are_torchs(avx2: bool, dtype: torch.dtype, width: int) -> None:
    module, rows = made(width, dtype), torch.randn(sum(COUNTS), HIDDEN).to(dtype)
    found = NativeExperts(library.opened("avx2" if avx2 else None)).compute(module, rows, COUNTS)
    right = by_torch(module, rows)
    assert (found.float() - right).norm() < (1e-6 if dtype == torch.float32 else 5e-3) * right.norm()


def test_others_without_a_gate_are_not_taken_for_them() -> None:
    module = made(32, torch.float32)
    assert not form_of(module).has_gate
    module.act_fn = torch.nn.SiLU()
    with pytest.raises(NotRecognised, match="without a gate whose activation is SILU"):
        form_of(module)
