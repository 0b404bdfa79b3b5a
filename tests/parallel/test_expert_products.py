"""Products of local experts: what transformers' own experts modules compute, whatever their layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.integrations.moe import grouped_mm_experts_forward

from parallel.expert_products import ExpertProducts

HIDDEN, WIDTH, EXPERTS = 16, 24, 5


class Experts(torch.nn.Module):
    """With the attributes that transformers' ``use_experts_implementation`` gives an experts module."""

    def __init__(self, *, has_gate: bool, has_bias: bool, is_transposed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.has_post_expert_norm = self._is_expert_parallel = False
        self.num_experts = EXPERTS
        self.act_fn = torch.nn.SiLU()
        name, width = ("gate_up_proj", 2 * WIDTH) if has_gate else ("up_proj", WIDTH)
        for each, shape in ((name, (width, HIDDEN)), ("down_proj", (HIDDEN, WIDTH))):
            weight = torch.randn(EXPERTS, *(shape[::-1] if is_transposed else shape))
            setattr(self, each, torch.nn.Parameter(weight, requires_grad=False))
            if has_bias:
                setattr(self, f"{each}_bias", torch.nn.Parameter(torch.randn(EXPERTS, shape[0])))

    def _apply_gate(self, inner: torch.Tensor) -> torch.Tensor:
        gate, up = inner.chunk(2, dim=-1)
        result: torch.Tensor = self.act_fn(gate) * up
        return result


def both(module: Any, products: ExpertProducts, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(sum(counts), HIDDEN)
    ids = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))[:, None]
    with torch.inference_mode():
        expected = grouped_mm_experts_forward(module, rows, ids, torch.ones(len(rows), 1))
        return products.compute(module, rows, counts), expected


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("is_transposed", [True, False])
@pytest.mark.parametrize("counts", [[1, 0, 3, 0, 7], [0, 0, 0, 0, 1], [2, 2, 2, 2, 2]])
def test_as_transformers(has_gate: bool, has_bias: bool, is_transposed: bool, counts: list[int]) -> None:
    module = Experts(has_gate=has_gate, has_bias=has_bias, is_transposed=is_transposed)
    found, expected = both(module, ExpertProducts(), counts)
    torch.testing.assert_close(found, expected)


def test_weights_that_were_replaced_are_used() -> None:
    module, products = Experts(has_gate=True, has_bias=False, is_transposed=False), ExpertProducts()
    both(module, products, [1, 1, 1, 1, 1])
    module.down_proj = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH), requires_grad=False)
    found, expected = both(module, products, [1, 1, 1, 1, 1])
    torch.testing.assert_close(found, expected)
