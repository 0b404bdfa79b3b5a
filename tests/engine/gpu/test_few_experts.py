"""Experts of few tokens, pair by pair, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.gpu import few_experts, fused_layers, grouped_experts
from engine.gpu.few_experts import few_forward
from engine.gpu.grouped_experts import FEW_ATTRIBUTE, FEW_TOKENS, each_expert, use_few_experts
from tests.engine.gpu.families import own_functions_again
from tests.engine.tiny_models import FAMILIES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def make(family: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype, attn_implementation="eager")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.1, std=0.3)
    model = model.to(DEVICE).eval().requires_grad_(False)
    with own_functions_again():
        fused_layers.fuse_layers(model)
    return model


def layers_of(model) -> list[torch.nn.Module]:
    return [module for module in model.modules() if hasattr(module, "gate_up_proj")]


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_those_of_a_product_each(family: str, dtype: torch.dtype) -> None:
    """And a token has the bits that it has alone. Numbers beyond the experts add nothing."""
    layer = layers_of(make(family, dtype))[0]
    count, width = layer.gate_up_proj.shape[0], layer.gate_up_proj.shape[2]
    numbers = torch.Generator().manual_seed(2)
    hidden = torch.randn(6, width, generator=numbers).to(DEVICE, dtype)
    chosen = torch.rand(6, count, generator=numbers).topk(2)
    ids, shares = chosen.indices.to(DEVICE), chosen.values.to(DEVICE, dtype)
    with torch.inference_mode():
        found, expected = few_forward(layer, hidden, ids, shares), each_expert(layer, hidden, ids, shares)
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )
        for token in (0, 5):
            one = slice(token, token + 1)
            assert torch.equal(few_forward(layer, hidden[one], ids[one], shares[one]), found[one])
        beyond = torch.where(ids == ids[0, 0], count, ids)
        kept = torch.where(ids == ids[0, 0], 0.0, shares)
        other = few_forward(layer, hidden, beyond, shares)
        assert torch.equal(other, few_forward(layer, hidden, ids, kept))


def test_few_tokens_take_this_way_and_many_another(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("qwen3_moe")
    monkeypatch.setattr(grouped_experts, "CHECKED_TOKENS", (1, 3))
    grouped_experts.register(ALL_EXPERTS_FUNCTIONS)
    few, many = (torch.arange(count, device=DEVICE)[None] * 7 % 90 for count in (FEW_TOKENS, FEW_TOKENS + 1))
    launched: list[int] = []

    def noted(module, hidden, *rest) -> torch.Tensor:
        launched.append(len(hidden))
        return few_forward(module, hidden, *rest)

    with torch.inference_mode():
        expected = [model(input_ids=ids, use_cache=False).logits for ids in (few, many)]
        model.set_experts_implementation(grouped_experts.NAME)
        layers = len(layers_of(model))
        assert use_few_experts(model) == layers
        monkeypatch.setattr(few_experts, "few_forward", noted)
        found = [model(input_ids=ids, use_cache=False).logits for ids in (few, many)]
        assert launched == [FEW_TOKENS] * layers
        model.set_experts_implementation(grouped_experts.FIXED_NAME)
        model(input_ids=few[:, :2], use_cache=False)
    assert len(launched) == layers, "fixed tiles are one form for any number of tokens"
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()), rtol=1e-4)


def test_experts_that_compute_something_else_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong kernels, and experts of another form: with biases, transposed, a gate of their own."""
    monkeypatch.setattr(grouped_experts, "CHECKED_TOKENS", (1, 3))
    assert use_few_experts(make("gpt_oss")) == 0
    model = make("qwen3_moe")
    launch = few_experts.few_forward

    def wrong(module, hidden, ids, shares) -> torch.Tensor:
        return launch(module, hidden, ids.flip(1), shares)

    monkeypatch.setattr(few_experts, "few_forward", wrong)
    assert use_few_experts(model) == 0
    assert not any(FEW_ATTRIBUTE in vars(layer) for layer in layers_of(model))
