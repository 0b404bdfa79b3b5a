"""Products and sums with fixed tiles: each row has its bits alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine.compute.device_blocks import DeviceBlocks
from engine.gpu import fixed_products
from engine.gpu.grouped_experts import fixed_forward

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHES = (1, 2, 8, 32, 256)
SHAPES = [(96, 64), (70, 700), (33, 1030)]
"""Outputs and inputs: one cut, two, and three that end inside a tile."""


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_of_a_product_has_the_bits_that_it_has_alone(outputs: int, inputs: int, dtype) -> None:
    rows, weight = random(max(BATCHES), inputs, dtype=dtype), random(outputs, inputs, dtype=dtype)
    bias = random(outputs, dtype=dtype) if outputs % 2 else None
    whole = fixed_products.linear(rows, weight, bias)
    expected = torch.nn.functional.linear(
        rows.double(), weight.double(), None if bias is None else bias.double()
    )
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(whole.double(), expected, atol=tolerance * inputs**0.5, rtol=tolerance)
    for count in BATCHES:
        assert torch.equal(fixed_products.linear(rows[:count], weight, bias), whole[:count])
        assert torch.equal(fixed_products.linear(rows[-count:], weight, bias), whole[-count:])


def test_cuts_are_added_in_their_order_by_one_program_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight, bias = random(5, 1030), random(33, 1030), random(33)
    parts = -(-33 // fixed_products.TILE[1])
    cuts, cut = fixed_products.cuts_of(parts, 1030)
    assert cuts > 2
    assert cuts * cut >= 1030 > (cuts - 1) * cut
    spread = fixed_products.linear(rows, weight, bias)
    with monkeypatch.context() as patch:
        patch.setattr(fixed_products, "cuts_of", lambda *_: (cuts, cut))
        patch.setattr(fixed_products, "WANTED_PROGRAMS", 1)
        assert torch.equal(fixed_products.linear(rows, weight, bias), spread)
        patch.setattr(fixed_products, "cuts_of", lambda *_: (1, 1088))
        wide = fixed_products.linear(rows.float(), weight.float())
        patch.setattr(fixed_products, "cuts_of", lambda *_: (cuts, cut))
        assert not torch.equal(fixed_products.linear(rows.float(), weight.float()), wide)


def test_cuts_follow_the_matrix() -> None:
    for outputs, inputs in ((64, 128), (1024, 3072), (4096, 12288), (151936, 1024), (33, 1030), (1, 1)):
        parts = -(-outputs // fixed_products.TILE[1])
        cuts, cut = fixed_products.cuts_of(parts, inputs)
        assert 1 <= cuts <= fixed_products.MOST_CUTS
        assert cuts * cut >= inputs > (cuts - 1) * cut
        assert cut % fixed_products.TILE[2] == 0
    assert fixed_products.cuts_of(16, 3072)[0] == 8
    assert fixed_products.cuts_of(2374, 1024)[0] == 1


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_tokens_experts_give_the_bits_that_they_give_alone(is_transposed: bool) -> None:
    experts, width, inner, top_k = 5, 48, 32, 2
    shapes = {"gate_up_proj": (2 * inner, width), "down_proj": (width, inner)}
    module = SimpleNamespace(
        num_experts=experts, is_transposed=is_transposed, has_bias=False, has_gate=True,
        _apply_gate=lambda rows: torch.nn.functional.silu(rows[:, :inner]) * rows[:, inner:],
    )  # fmt: skip
    for name, shape in shapes.items():
        setattr(module, name, random(experts, *(reversed(shape) if is_transposed else shape)))
    hidden = random(max(BATCHES), width)
    chosen = random(max(BATCHES), experts, dtype=torch.float32).topk(top_k)
    weights = chosen.values.softmax(-1).to(hidden.dtype)
    blocks = DeviceBlocks(DEVICE)
    with blocks, torch.inference_mode():
        whole = fixed_forward(module, hidden, chosen.indices, weights)
        for count in BATCHES[:-1]:
            found = fixed_forward(module, hidden[:count], chosen.indices[:count], weights[:count])
            assert torch.equal(found, whole[:count])


@pytest.mark.parametrize("shape", [(1, 7), (3, 2050), (4, 3, 33)])
def test_sums_along_rows(shape: tuple[int, ...]) -> None:
    rows = random(*shape)
    torch.testing.assert_close(fixed_products.sum_of_rows(rows), rows.float().sum(-1), atol=1e-3, rtol=1e-4)
    first = rows[:1]
    assert torch.equal(fixed_products.sum_of_rows(first), fixed_products.sum_of_rows(rows)[:1])


def test_operators_of_a_gpu_that_sum_by_the_number_of_rows_are_replaced() -> None:
    """The rules are those for a GPU, on tensors of the CPU."""
    blocks = DeviceBlocks(torch.device("cuda"))
    numbers = torch.randn(3, 5, 40, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode(), blocks:
        found = numbers.mean(-1, keepdim=True), numbers.sum((0, 2)), numbers.sum(), numbers.pow(2).mean(dim=1)
        counted = (numbers > 0).sum(-1)
        product = torch.addmm(numbers[0, 0, :3], numbers[0], numbers[1, :3].T[:40])
    with torch.inference_mode():
        plain = numbers.mean(-1, keepdim=True), numbers.sum((0, 2)), numbers.sum(), numbers.pow(2).mean(dim=1)
        for one, other in zip(found, plain, strict=True):
            torch.testing.assert_close(one, other)
        assert torch.equal(counted, (numbers > 0).sum(-1))
        expected = torch.addmm(numbers[0, 0, :3], numbers[0], numbers[1, :3].T[:40])
        torch.testing.assert_close(product, expected)


@pytest.mark.parametrize(
    "compute",
    [
        lambda rows: rows.cumsum(-1),
        lambda rows: rows.norm(dim=-1),
        lambda rows: rows.logsumexp(-1),
        lambda rows: torch.nn.functional.pad(rows, (0, 1001)).softmax(-1),
    ],
)
def test_operators_of_a_gpu_that_may_do_so_are_refused_in_the_trial(compute) -> None:
    from engine.compute.fixed_blocks import UnknownOperator

    blocks = DeviceBlocks(torch.device("cuda"))
    blocks.is_strict = True
    with torch.inference_mode(), blocks, pytest.raises(UnknownOperator):
        compute(torch.randn(3, 40))
