"""Whole models on a pretended device: a decode step must not ask it for numbers.

What asks would make the capture of a CUDA graph fail, and raises here (``pretended_device``). Experts must be
multiplied in one grouped product for all of them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM

from engine.attention.base import IMPLEMENTATION, PLAN_KEYWORD, AttentionUse, paged_attention
from engine.model.weights import EXPERTS_IMPLEMENTATION
from tests.engine.pretended_device import Indexing, Launches
from tests.engine.tiny_models import FAMILIES

ROWS = 4
MIXTURES = {"qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss", "deepseek_v3"}


class Shapes:
    """A plan that gives tensors of the right shape."""

    def __init__(self) -> None:
        self.use = AttentionUse()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        return query.new_empty(query.shape[1], query.shape[0], value.shape[2])


def to_device(model: Any) -> None:
    for module in model.modules():
        for name, each in module._parameters.items():
            if each is not None:
                moved = torch.empty(each.shape, dtype=each.dtype, device="cuda")
                module._parameters[name] = torch.nn.Parameter(moved, requires_grad=False)
        for name, each in module._buffers.items():
            if each is not None:
                module._buffers[name] = torch.empty(each.shape, dtype=each.dtype, device="cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_decode_step_waits_for_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    config = FAMILIES[family]()
    launches = Launches()
    with FakeTensorMode(), torch.no_grad(), Indexing():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION
        ).eval()
        to_device(model)
        if model._can_set_experts_implementation():
            model.set_experts_implementation(EXPERTS_IMPLEMENTATION)
        for module in model.modules():
            module.lockstep_layer = 0
        numbers = torch.empty(2, ROWS, dtype=torch.int64, device="cuda")
        with launches:
            output = model(
                input_ids=numbers[0:1],
                position_ids=numbers[1:2],
                use_cache=False,
                **{PLAN_KEYWORD: Shapes()},
            )
    assert output.logits.shape[:2] == (1, ROWS)
    assert output.logits.device.type == "cuda"
    layers = config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    expected = 2 * layers if family in MIXTURES else 0
    assert launches.names.count("_grouped_mm") == expected, sorted(set(launches.names))
