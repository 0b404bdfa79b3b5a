"""Rows that are rounded to 8 bits, on another device than the CPU."""

from __future__ import annotations

import pytest
import torch

from engine.model.quantization.attached import ATTRIBUTE, CodesReader
from engine.model.quantization.layers import round_inputs
from engine.model.quantization.matrices import Codes
from engine.model.quantization.rounding import Rounding
from tests.parallel.other_device import DEVICE, Elsewhere, OtherDevice


@pytest.mark.parametrize("rounding", [Rounding(), Rounding(is_symmetric=False), Rounding(scale=0.02, zero=3)])
def test_codes_are_where_the_weights_are(rounding: Rounding, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are moved once, and products have the same bits."""
    numbers = torch.Generator().manual_seed(4)
    codes = Codes(
        torch.randint(-127, 128, (6, 64), generator=numbers, dtype=torch.int8),
        torch.rand(6, 1, generator=numbers),
        None,
        8,
        rounding=rounding,
    )
    read: list[Codes] = []
    monkeypatch.setattr(CodesReader, "rounds", True)
    monkeypatch.setattr(CodesReader, "read", lambda self: read.append(codes) or codes)
    inputs = torch.randn(3, 64, generator=numbers)

    def computed(device: torch.device) -> torch.Tensor:
        layer = torch.nn.Linear(64, 6, bias=False)
        weight = torch.nn.Parameter(torch.zeros(6, 64).to(device), requires_grad=False)
        setattr(weight, ATTRIBUTE, CodesReader([], is_stack=False))
        layer.weight = weight
        round_inputs(torch.nn.Sequential(layer))
        for _ in range(2):
            found: torch.Tensor = layer(inputs.to(device))
        return found

    with torch.no_grad():
        here = computed(torch.device("cpu"))
        with OtherDevice():
            there = computed(DEVICE)
    assert isinstance(there, Elsewhere)
    assert torch.equal(there.inside, here)
    assert len(read) == 2, "one time each"
