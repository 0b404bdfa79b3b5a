"""Launches per layer of a decode step, on a pretended CUDA device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AttentionInterface, AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from engine.attention import triton_paged
from engine.attention.base import IMPLEMENTATION, PLAN_KEYWORD, LayerShape, paged_attention
from engine.gpu import (
    coded_products,
    few_experts,
    few_routers,
    few_rows,
    fused_launches,
    fused_layers,
    grouped_experts,
    grouped_products,
    late_rotary,
    layer_products,
    product_choice,
)
from engine.model import coded_layers
from engine.model.experts_function import choose_experts_function
from engine.model.quantization import device_codes
from engine.model.quantization.attached import ATTRIBUTE as CODES
from engine.model.quantization.attached import CodesReader
from engine.model.quantization.rounding import Rounding
from engine.model.quantization.weight_codes import Codes
from tests.engine.compute.test_capturable import to_device
from tests.engine.gpu.recorder import Kernels
from tests.engine.pretended_device import Indexing, Launches

VIEWS = frozenset(
    [
        "view",
        "_unsafe_view",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "slice",
        "select",
        "expand",
        "permute",
        "reshape",
        "alias",
        "detach",
        "split",
        "chunk",
        "unbind",
        "as_strided",
        "empty",
        "new_empty",
        "empty_like",
        "lift_fresh",
        "split_with_sizes",
        "empty_strided",
        "device",
        "promote_types",
    ]
)
"""Operators that launch nothing."""
FEW, ROWS, MANY = 8, 32, 48
"""Rows of which experts are few, of which a layer's are, and more."""
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
MIXTURE: dict[str, Any] = {
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
}  # fmt: skip


class Known(CodesReader):
    """Codes of a weight, as a checkpoint in int4 or in W8A8 would give them."""

    def __init__(self, weight: torch.Tensor, *, rounded: bool) -> None:
        super().__init__([], weight.dim() == 3)
        self._shape, self._rounded = weight.shape, rounded

    @property
    def rounds(self) -> bool:
        return self._rounded

    def read(self) -> Codes:
        groups = 1 if self._rounded else self._shape[-1] // 128
        scales = torch.ones(*self._shape[:-1], groups)
        codes = torch.zeros(self._shape, dtype=torch.int8)
        rounding = Rounding() if self._rounded else None
        return Codes(codes, scales, None, 8 if self._rounded else 4, rounding=rounding)


def on_pretended_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def quantise(model: Any, *, rounded: bool) -> list[fused_layers.MergedLinear]:
    """Let the weights of layers be codes."""
    for path, parameter in model.named_parameters():
        if path.endswith(("_proj.weight", "gate_up_proj", "down_proj")):
            setattr(parameter, CODES, Known(parameter, rounded=rounded))
    kept = coded_layers.keep_weights_packed(model, torch.device("cuda"), experts=True)
    assert not any("widened" in what for what in kept.counts), kept.counts
    return kept.merged


def launches_of(config: Any, monkeypatch: pytest.MonkeyPatch, weights: str, rows: int) -> Counter[str]:
    """Operators and kernels of one step, by name."""
    launches = Launches()
    for module in (
        triton_paged,
        grouped_products,
        coded_products,
        fused_launches,
        layer_products,
        few_experts,
    ):
        monkeypatch.setattr(module, "kernels", Kernels(launches.names))
    layers = [LayerShape(8, 128, 128, None)] * config.num_hidden_layers
    cuda = torch.device("cuda")
    with FakeTensorMode(), torch.no_grad(), Indexing():  # in inference mode some operators stand for several
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=IMPLEMENTATION
        )
        to_device(model.eval())
        merged = [] if weights == "plain" else quantise(model, rounded=weights == "W8A8")
        if model._can_set_experts_implementation():
            model.set_experts_implementation(choose_experts_function(model))
        fused = fused_layers.fuse_layers(model, merged)
        few_rows.fuse_few_rows(model, fused.merged)
        late_rotary.turn_late(model, PLAN_KEYWORD)
        index = 0
        for module in model.modules():
            if hasattr(module, "o_proj"):
                module.lockstep_layer = index
                index += 1
        cache = triton_paged.TritonPagedAttention(
            layers, programs=264, num_blocks=600, block_size=16, dtype=torch.bfloat16, device=cuda
        )
        plan = cache.decode_buffers(rows, 4096).plan(rows)
        numbers = torch.empty(2, rows, dtype=torch.int64, device="cuda")
        with launches:
            launches.names.clear()
            model(
                input_ids=numbers[0:1], position_ids=numbers[1:2], use_cache=False, **{PLAN_KEYWORD: plan}
            )  # fmt: skip
    return Counter(name for name in launches.names if name not in VIEWS)


@pytest.mark.parametrize(
    ("kind", "capability", "weights", "rows", "count"),
    [
        ("dense", (9, 0), "plain", FEW, 7),
        ("dense", (9, 0), "plain", ROWS, 7),
        ("dense", (9, 0), "plain", MANY, 12),
        ("mixture", (9, 0), "plain", FEW, 11),
        ("mixture", (9, 0), "plain", ROWS, 16),
        ("mixture", (8, 0), "plain", FEW, 11),
        ("mixture", (8, 0), "plain", ROWS, 14),
        ("mixture", (8, 0), "plain", MANY, 21),
        ("dense", (9, 0), "int4", ROWS, 16),  # sums are cut, and their cuts added up
        ("dense", (9, 0), "W8A8", ROWS, 16),  # one more for each product, which rounds its inputs
        ("mixture", (9, 0), "int4", ROWS, 18),
        ("mixture", (8, 0), "W8A8", ROWS, 20),
    ],
)
def test_launches_per_layer(
    kind: str, capability, weights: str, rows: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything of a layer; transformers' own has 53 and 71 without attention."""
    monkeypatch.setattr(coded_layers, "_agrees", lambda codes, weight: True)
    monkeypatch.setattr(device_codes, "there", on_pretended_device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(product_choice, "has_triton", lambda: True)
    monkeypatch.setattr(grouped_experts, "check_experts", lambda *layers: None)
    for module in (fused_layers, few_rows, few_routers):
        monkeypatch.setattr(module, "are_alike", lambda *ways, **options: True)
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    make = Qwen3Config if kind == "dense" else Qwen3MoeConfig
    options = SIZES if kind == "dense" else SIZES | MIXTURE
    one, two = (
        launches_of(make(**options, num_hidden_layers=layers), monkeypatch, weights, rows)
        for layers in (1, 2)
    )
    per_layer = two - one
    assert per_layer["attend"] == per_layer["rotate_and_store"] == 1
    assert not per_layer["store"]
    assert not per_layer["rotate"]
    norms = 2 if weights != "plain" or rows == MANY else int(kind == "mixture")
    assert per_layer["rms_norm"] == norms, "others belong to products, or to rotary embeddings"
    assert sum(per_layer.values()) == count <= {"dense": 20, "mixture": 30}[kind], per_layer
    assert sum((one - per_layer).values()) <= 20, one - per_layer
