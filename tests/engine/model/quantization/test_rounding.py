"""Rows that are rounded to 8 bits, on another device than the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.model.quantization import rounding as roundings
from engine.model.quantization.attached import ATTRIBUTE, CodesReader
from engine.model.quantization.layers import round_inputs
from engine.model.quantization.rounding import Rounding, integer_product
from engine.model.quantization.weight_codes import Codes
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


@pytest.mark.parametrize("exact", [None, False], ids=["as torch can", "in floats"])
def test_sums_of_products_are_those_of_numpy(exact: bool | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of the range are among them, which overflow 16 bits in pairs."""
    if exact is not None:
        monkeypatch.setattr(roundings, "_bytes_are_exact", lambda: exact)
    numbers = torch.Generator().manual_seed(7)
    for count, outputs, inputs in ((1, 48, 64), (3, 16, 2048), (2, 100, 4160), (33, 64, 192)):
        codes = torch.randint(-128, 128, (outputs, 2 * inputs), generator=numbers, dtype=torch.int8)
        codes[0], codes[1] = -128, 127
        rows = torch.randint(-128, 128, (1, count, inputs), generator=numbers).float()
        rows[0, 0], rows[0, -1] = -128, 127
        part = codes.chunk(2, dim=-1)[1]  # as ranks and parts have them
        found = integer_product(rows, part)
        expected = rows.numpy().astype(np.int64) @ part.numpy().astype(np.int64).T
        assert found.dtype == torch.int32
        assert np.array_equal(found.numpy(), expected)


def test_products_of_bytes_are_used_only_where_they_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where pairs overflow in 16 bits, or torch has none, floats take their place."""

    def overflowing(rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        products = rows.int()[:, :, None] * columns.int()[None]
        pairs = products.unflatten(1, (-1, 2)).sum(2).clamp(-(1 << 15), (1 << 15) - 1)
        return pairs.sum(1, dtype=torch.int32)

    def missing(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such operator")

    for product in (overflowing, missing):
        roundings._bytes_are_exact.cache_clear()
        monkeypatch.setattr(torch, "_int_mm", product)
        assert not roundings._bytes_are_exact()
    roundings._bytes_are_exact.cache_clear()
