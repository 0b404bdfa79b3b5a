"""Codes are widened and compared a few rows at a time."""

from __future__ import annotations

import pytest
import torch

from engine.model.quantization import weight_codes
from engine.model.quantization.weight_codes import Codes

OUTPUTS, INPUTS, GROUPS = 37, 64, 4


def random_codes(*stack: int) -> Codes:
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (*stack, OUTPUTS, INPUTS), generator=generator).to(torch.int8)
    scales = torch.rand(*stack, OUTPUTS, GROUPS, generator=generator)
    zeros = torch.randint(-8, 8, (*stack, OUTPUTS, GROUPS), generator=generator).float()
    return Codes(codes, scales, zeros, 4)


@pytest.mark.parametrize("at_once", [1, 3 * INPUTS, 1 << 18])
@pytest.mark.parametrize("stack", [(), (3,)])
def test_weights_do_not_depend_on_how_many_rows_are_widened_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int, stack: tuple[int, ...]
) -> None:
    monkeypatch.setattr(weight_codes, "AT_ONCE", at_once)
    given = random_codes(*stack)
    assert given.zeros is not None
    each = INPUTS // GROUPS
    numbers = given.codes.float() - given.zeros.repeat_interleave(each, -1)
    weights = (numbers * given.scales.repeat_interleave(each, -1)).to(torch.bfloat16)
    assert torch.equal(given.widened(torch.bfloat16), weights)
    assert given.gives(weights)
    assert not given.gives(weights[..., :-1, :])
    weights[..., -1, -1] += 1
    assert not given.gives(weights)
