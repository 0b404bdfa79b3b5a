"""Recognition of layers with a gated delta rule, and of those left to torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import ModelConfig
from engine.kernels.core import library
from engine.kernels.core.base_model import BaseModel
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.make import make_program
from engine.kernels.products.activations import ActivationKind
from engine.kernels.states.delta import DeltaRule, delta_rule_of
from engine.model.checkpoint import read_model_info
from engine.model.weights import load_model
from engine.states.layers import has_state
from tests.engine.states.models import make_state_model
from tests.families.configs import make_config

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

SEEN: dict[str, dict[str, Any]] = {
    "qwen3_next": {"step_factor": 1.0, "gate_kind": ActivationKind.SILU, "by_channel": False, "bound": 0.0},
    "qwen3_5_text": {"step_factor": 1.0, "gate_kind": ActivationKind.SILU, "by_channel": False, "bound": 0.0},
    "olmo_hybrid": {"step_factor": 2.0, "gate_kind": ActivationKind.SILU, "by_channel": False, "bound": 0.0},
    "kimi_linear": {
        "step_factor": 1.0,
        "gate_kind": ActivationKind.SIGMOID,
        "by_channel": True,
        "bound": 0.0,
    },
    "bailing_hybrid": {
        "step_factor": 1.0,
        "gate_kind": ActivationKind.SIGMOID,
        "by_channel": True,
        "bound": -5.0,
    },
}
"""What is seen of the layers of each family."""
NATIVE = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "kimi_linear"]


def module_of(family: str, dtype: torch.dtype) -> Any:
    """The first layer with a state, with random parameters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family), dtype=dtype)
    module = next(part for part in model.modules() if has_state(part))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.4)
    return module


def recognised(module: Any) -> DeltaRule | None:
    with torch.inference_mode():
        return delta_rule_of(module, None, BaseModel.__new__(BaseModel))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", SEEN)
def test_what_a_module_does_is_seen_in_its_results(family: str, dtype: torch.dtype) -> None:
    found = recognised(module_of(family, dtype))
    assert found is not None
    decay = {"by_channel": found.decay.by_channel, "bound": found.decay.bound}
    assert decay | {"step_factor": found.step_factor, "gate_kind": found.gate_kind} == SEEN[family]


def test_a_module_with_the_same_parts_that_does_something_else_is_refused() -> None:
    module = module_of("qwen3_next", torch.float32)
    module.norm.activation = "relu"
    with pytest.raises(NotRecognised, match="mixes tokens in another way"):
        recognised(module)


def test_a_module_without_the_parts_is_another_recognisers() -> None:
    assert recognised(module_of("nemotron_h", torch.float32)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", NATIVE)
def test_families_are_computed_by_the_kernels(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make_state_model(tmp_path, family, dtype)
    info, cpu = read_model_info(tmp_path), torch.device("cpu")
    assert make_program(load_model(info, ModelConfig(), dtype=dtype, device=cpu), 16) is not None
