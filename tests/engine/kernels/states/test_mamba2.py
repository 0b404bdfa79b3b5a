"""Mamba 2 layers of all families' kinds are recognised and computed natively."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig
from engine.kernels.core import library
from engine.kernels.make import make_program
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from tests.engine.tiny_models import save, widen
from tests.families.configs import make_config

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

FACTORS: dict[str, Any] = {
    "ssm_multipliers": [0.7, 1.3, 0.9, 1.2, 0.8],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "key_multiplier": 0.05,
    "mlp_multipliers": [0.8, 0.6],
    "embedding_multiplier": 5.65,
    "lm_head_multiplier": 0.04,
}
GRANITE = {
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.0,
    "logits_scaling": 6.0,
    "attention_multiplier": 0.2,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "one part a layer, groups, biases": ("mamba2", {"n_groups": 2, "use_bias": True}),
    "limits of step sizes": ("mamba2", {"time_step_limit": (0.05, 0.3)}),
    "experts without a gate": ("nemotron_h", {"n_groups": 2, "time_step_min": 0.1}),
    "a factor on what parts add": ("granitemoehybrid", {"mamba_n_groups": 2} | GRANITE),
    "no experts": ("granitemoehybrid", {"num_local_experts": 0} | GRANITE),
    "attention in other layers": ("bamba", {"mamba_n_groups": 2}),
    "no norm, factors": ("falcon_h1", FACTORS),
    "norm before the gate": ("falcon_h1", FACTORS | {"mamba_rms_norm": True}),
    "norm behind the gate": (
        "falcon_h1",
        FACTORS | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2},
    ),
}


def program_of(directory: Path, family: str, changes: dict[str, Any], dtype: torch.dtype) -> Any:
    """The program of a tiny model with these changes of its configuration."""
    config = make_config(family)
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    widen(model, 1)
    save(model.to(dtype), directory)
    info = read_model_info(directory)
    return make_program(load_model(info, ModelConfig(), dtype=dtype, device=torch.device("cpu")), 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_all_kinds_are_computed_by_the_kernels(
    kind: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    family, changes = KINDS[kind]
    program = program_of(tmp_path, family, changes, dtype)
    assert program is not None
    assert program.states is not None


def test_a_module_that_computes_something_else_is_left_to_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        assert program_of(tmp_path, "mamba2", {"hidden_act": "gelu"}, torch.float32) is None
    assert "Mamba2Mixer computes something else of its projections" in caplog.text
