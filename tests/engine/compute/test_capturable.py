"""Whole models on a pretended device: a decode step must not ask it for numbers.

What asks would make the capture of a CUDA graph fail, and raises here (``pretended_device``). Experts must be
multiplied in one kernel for all of them, which torch has on few devices.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM

from engine.attention.base import IMPLEMENTATION, PLAN_KEYWORD, AttentionUse, paged_attention
from engine.gpu import grouped_experts, grouped_products, product_choice
from engine.model.experts_function import choose_experts_function
from tests.engine.gpu.recorder import Kernels
from tests.engine.pretended_device import Indexing, Launches
from tests.engine.tiny_models import FAMILIES

ROWS = 4
MIXTURES = {"qwen2_moe", "qwen3_moe", "mixtral", "olmoe", "granitemoe", "gpt_oss", "deepseek_v3"}


class Shapes:
    """A plan that gives tensors of the right shape."""

    def __init__(self) -> None:
        self.use = AttentionUse()

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
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


NOWHERE_FAST = [((8, 0), torch.bfloat16), ((12, 0), torch.bfloat16), ((9, 0), torch.float16)]
"""Devices and types for which torch's grouped product reads counts back to the host."""
CASES = [
    *((family, (9, 0), torch.bfloat16, True) for family in FAMILIES),
    *((family, *NOWHERE_FAST[i % 3], True) for i, family in enumerate(sorted(MIXTURES))),
    *(("qwen3_moe", *where, False) for where in NOWHERE_FAST),
]


@pytest.mark.parametrize(("family", "capability", "dtype", "has_triton"), CASES)
def test_a_decode_step_waits_for_nothing(
    family: str, capability, dtype, has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are multiplied by one kernel, or without Triton from copies of their weights."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(product_choice, "has_triton", lambda: has_triton)
    monkeypatch.setattr(grouped_experts, "check_experts", lambda layers: None)
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    config = FAMILIES[family]()
    launches = Launches()
    monkeypatch.setattr(grouped_products, "kernels", Kernels(launches.names))
    with FakeTensorMode(), torch.no_grad(), Indexing():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=IMPLEMENTATION)
        to_device(model.eval())
        if model._can_set_experts_implementation():
            model.set_experts_implementation(choose_experts_function(model))
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
    products = 2 * layers if family in MIXTURES else 0
    is_fast = capability[0] == 9 and dtype == torch.bfloat16
    by_kind = {
        "_grouped_mm": products * is_fast,
        "grouped_product": products * (has_triton and not is_fast),
        "bmm": products * (not has_triton),
    }
    counted = {name: launches.names.count(name) for name in by_kind}
    if family not in MIXTURES:
        del by_kind["bmm"], counted["bmm"]
    assert counted == by_kind, sorted(set(launches.names))
