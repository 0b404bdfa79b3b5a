"""Experts on a GPU: which operator computes them, and our kernels in Triton's interpreter."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.gpu import grouped_experts, grouped_kernels, grouped_products
from engine.gpu.grouped_experts import check_experts, each_expert, grouped_forward
from engine.gpu.product_choice import product_for
from engine.model.expert_weights import expert_modules
from tests.engine.tiny_models import FAMILIES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("capability", "dtype", "is_rocm", "has_triton", "expected"),
    [
        ((9, 0), BF16, False, True, "grouped_mm"),
        ((10, 0), BF16, False, False, "grouped_mm"),
        ((9, 0), FP16, False, True, "triton"),
        ((10, 3), FP32, False, True, "triton"),
        ((8, 0), BF16, False, True, "triton"),
        ((8, 9), BF16, False, False, "batched_mm"),
        ((12, 0), BF16, False, True, "triton"),
        ((12, 0), BF16, False, False, "batched_mm"),
        ((7, 5), FP16, False, True, "batched_mm"),
        ((9, 4), BF16, True, True, "triton"),  # gfx942, whose number is no NVIDIA device's
        ((9, 4), BF16, True, False, "batched_mm"),
    ],
)
def test_the_product_follows_from_device_and_type(capability, dtype, is_rocm, has_triton, expected) -> None:
    chosen = product_for("cuda", capability, dtype, is_rocm=is_rocm, has_triton=has_triton)
    assert chosen == expected
    assert product_for("cpu", None, dtype, is_rocm=is_rocm, has_triton=has_triton) == "grouped_mm"


@pytest.mark.parametrize(("count", "experts"), [(1, 3), (9, 5), (70, 9), (130, 65)])
def test_pairs_are_sorted_as_a_stable_sort_does(count: int, experts: int, monkeypatch) -> None:
    """By the kernel, and by torch where there are many."""
    ids = torch.randint(0, experts, (count, 2), generator=torch.Generator().manual_seed(count)).to(DEVICE)
    ids[0, 0] = experts - 1
    expected = ids.reshape(-1).sort(stable=True)
    for limit in (grouped_products.SORTED_BY_KERNEL, 0):
        monkeypatch.setattr(grouped_products, "SORTED_BY_KERNEL", limit)
        pairs = grouped_products.Pairs.of(ids, experts)
        assert pairs.order.tolist() == expected.indices.tolist()
        assert pairs.order[pairs.places.long()].tolist() == list(range(2 * count))
        ends = torch.bincount(ids.reshape(-1), minlength=experts).cumsum(0)
        assert pairs.ends.tolist() == ends.tolist()
        assert len(pairs) == 2 * count


def experts_of(family: str, dtype: torch.dtype):
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype).to(DEVICE)
    layer = next(iter(expert_modules(model).values()))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return layer.requires_grad_(False)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3_moe", FP32),
        ("qwen3_moe", BF16),
        ("gpt_oss", FP32),  # transposed matrices, biases, a gate of its own
        ("mixtral", FP16),
    ],
)
def test_equals_a_product_for_each_expert(family: str, dtype: torch.dtype, monkeypatch) -> None:
    """One token, a few, and many; experts without tokens, and one with most."""
    layer = experts_of(family, dtype)
    tolerance = {FP32: 1e-5, BF16: 3e-2, FP16: 3e-3}[dtype]
    numbers = torch.Generator().manual_seed(1)
    width = FAMILIES[family]().hidden_size
    monkeypatch.setattr(grouped_products, "MANY_ROWS", 8)
    for tokens in (1, 3, 21):
        hidden = torch.randn(tokens, width, generator=numbers).to(DEVICE, dtype)
        ids = torch.rand(tokens, layer.num_experts, generator=numbers).topk(2).indices.to(DEVICE)
        if tokens > 3:
            ids[2:] = torch.tensor([1, 0])
        weights = torch.rand(tokens, 2, generator=numbers).to(DEVICE, dtype)
        found = grouped_forward(layer, hidden, ids, weights)
        expected = each_expert(layer, hidden, ids, weights)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)
    somewhere_else = ids.clone()
    somewhere_else[:, 1] = layer.num_experts  # an expert that another rank holds
    found = grouped_forward(layer, hidden, somewhere_else, weights)
    expected = each_expert(layer, hidden, ids[:, :1], weights[:, :1])
    torch.testing.assert_close(found.float(), expected.float(), atol=tolerance, rtol=tolerance)
    nothing = hidden[:0]
    assert grouped_forward(layer, nothing, ids[:0], weights[:0]).shape == (0, width)


def test_the_check_finds_wrong_kernels(monkeypatch) -> None:
    layer = experts_of("qwen3_moe", FP32)
    monkeypatch.setattr(grouped_experts, "CHECKED_TOKENS", (1, 3))
    assert check_experts([layer]) is None
    calls = itertools.count()
    kernel = grouped_kernels.weighted_sum

    class Wrong:
        def __getitem__(self, grid):
            def launch(computed, weights, places, *rest, **constants):
                next(calls)
                kernel[grid](computed, weights, places.roll(1), *rest, **constants)

            return launch

    class Failing:
        def __getitem__(self, grid):
            raise RuntimeError("at 3:1:\nout of resources")

    with monkeypatch.context() as patch:
        patch.setattr(grouped_kernels, "weighted_sum", Wrong())
        assert "differs from torch by" in (check_experts([layer]) or "")
        assert next(calls) == 2
    with monkeypatch.context() as patch:
        patch.setattr(grouped_kernels, "grouped_product", Failing())
        assert check_experts([layer]) == "its kernels fail: RuntimeError: out of resources"


def test_few_pairs_copy_their_weights_and_many_do_not(monkeypatch) -> None:
    layer = experts_of("qwen3_moe", FP32)
    registry = {name: lambda *_, name=name: name for name in ("batched_mm", "grouped_mm")}

    class Registry(dict):
        def register(self, name, function):
            self[name] = function

    known = Registry(registry)
    grouped_experts.register(known)
    few = known[grouped_experts.FEW_NAME]
    matrix = layer.gate_up_proj[0].nbytes
    monkeypatch.setattr(grouped_experts, "FEW_BYTES", 6 * matrix)
    ids = torch.zeros(3, 2, dtype=torch.int64)
    assert few(layer, None, ids, None) == "batched_mm"
    assert few(layer, None, torch.zeros(4, 2, dtype=torch.int64), None) == "grouped_mm"
