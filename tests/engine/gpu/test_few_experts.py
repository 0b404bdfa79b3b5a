"""Experts of few tokens, pair by pair, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from engine.gpu import few_experts, fused_layers, grouped_experts
from engine.gpu.few_experts import few_forward
from engine.gpu.few_routers import ROUTED_TOKENS, fuse_routers
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


@pytest.mark.each_push
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_are_those_of_a_product_each(family: str, dtype: torch.dtype) -> None:
    """A token has its bits alone; numbers beyond the experts add nothing."""
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


@pytest.mark.parametrize("normalised", [False, True])
def test_the_most_likely_experts_are_chosen(normalised: bool) -> None:
    """The first ones of those that are equal; a token by itself gets the same."""
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    logits[3, 2:7] = 4.0
    scores, chosen = few_experts.choose_experts(logits, 3, normalised=normalised)
    expected = logits.softmax(dim=-1).topk(3)
    shares = expected.values / expected.values.sum(dim=-1, keepdim=True) if normalised else expected.values
    torch.testing.assert_close(scores, shares)
    assert chosen[3].tolist() == [2, 3, 4]
    rest = [0, 1, 2, 4]
    assert torch.equal(chosen[rest], expected.indices[rest])
    alone = few_experts.choose_experts(logits[1:2], 3, normalised=normalised)
    assert torch.equal(alone[0], scores[1:2])
    assert torch.equal(alone[1], chosen[1:2])


def test_routers_of_few_tokens_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_layers, "DEVICES", {"cpu", "cuda"})
    model = make("qwen3_moe")
    few, many = (
        torch.arange(count, device=DEVICE)[None] * 7 % 90 for count in (ROUTED_TOKENS, ROUTED_TOKENS + 1)
    )
    with torch.inference_mode():
        expected = [model(input_ids=ids, use_cache=False).logits for ids in (few, many)]
        assert fuse_routers(model) == len(layers_of(model))
        launched: list[int] = []
        launch = few_experts.choose_experts

        def noted(logits: torch.Tensor, *rest, **options):
            launched.append(len(logits))
            return launch(logits, *rest, **options)

        monkeypatch.setattr(few_experts, "choose_experts", noted)
        found = [model(input_ids=ids, use_cache=False).logits for ids in (few, many)]
    assert launched == [ROUTED_TOKENS] * len(layers_of(model))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4 * float(other.abs().max()), rtol=1e-4)
    other = make("qwen3_moe")
    for wrong in (
        lambda logits, top_k, normalised: launch(-logits, top_k, normalised=normalised),
        lambda logits, top_k, normalised: launch(logits, top_k, normalised=not normalised),
    ):
        monkeypatch.setattr(few_experts, "choose_experts", wrong)
        assert fuse_routers(other) == 0


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
