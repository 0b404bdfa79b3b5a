"""Keys and values as codes of eight bits and scales."""

from __future__ import annotations

import pytest
import torch

from engine.attention.base import LayerShape
from engine.attention.kv_codes import LARGEST, KVCodes, quantized, widened

KINDS: list[KVCodes] = ["int8", "fp8"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_greatest_number_keeps_its_size(kind: KVCodes) -> None:
    numbers = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(1))
    codes, scales = quantized(numbers, kind)
    assert codes.dtype == torch.int8
    assert scales.shape == (50, 3)
    greatest = numbers.abs().amax(dim=-1)
    assert (scales.float() * LARGEST[kind] >= greatest * (1 - 1e-6)).all()
    assert (scales.float() * LARGEST[kind] <= greatest * (1 + 2**-7)).all()
    kept = widened(codes, scales, kind, torch.float32)
    least = greatest.unsqueeze(-1) / (
        1 if kind == "int8" else 448 * 64
    )  # e4m3 has three digits, but below 2**-6
    step = 0.51 / 127 * least if kind == "int8" else torch.maximum(numbers.abs() / 16, least)
    assert ((kept - numbers).abs() <= 1.01 * step).all()


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_all_zero_or_tiny_are_zero(kind: KVCodes) -> None:
    numbers = torch.zeros(2, 16)
    numbers[1] = 1e-40
    codes, scales = quantized(numbers, kind)
    assert not codes.any()
    assert not scales.any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_number_stays_none(kind: KVCodes) -> None:
    numbers = torch.ones(2, 16)
    numbers[0, 3] = float("nan")
    kept = widened(*quantized(numbers, kind), kind, torch.float32)
    assert kept[0].isnan().all()
    assert not kept[1].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_takes_half_the_bytes_and_its_scales(kind: KVCodes) -> None:
    shape = LayerShape(8, 128, 128, None)
    assert shape.bytes_per_token(torch.bfloat16) == 8 * 256 * 2
    assert shape.bytes_per_token(torch.bfloat16, kind) == 8 * (256 + 4)
    assert shape.bytes_per_token(torch.bfloat16) > 1.9 * shape.bytes_per_token(torch.bfloat16, kind)
