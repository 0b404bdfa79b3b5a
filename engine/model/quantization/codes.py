"""Unpacking of 4-bit and 8-bit numbers from 32-bit words."""

from __future__ import annotations

import torch

WORD_BITS = 32
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds a column, by the column's place among its eight.

AWQ packs eight columns so that its kernels get even and odd ones apart (AutoAWQ, ``gemm`` layout).
"""


def unpacked(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Numbers of 4 or 8 bits of each word in the last dimension, as uint8.

    Lowest bits come first. ``order`` gives the place in a word of each number.
    """
    numbers = torch.empty(words.shape, dtype=torch.int32).copy_(words).view(torch.uint8)
    if bits == 4:
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(-2)
    if order is not None:
        numbers = numbers.unflatten(-1, (-1, WORD_BITS // bits))[..., list(order)].flatten(-2)
    return numbers


def word_range(numbers: slice, bits: int) -> tuple[slice, slice]:
    """The words that hold a range of numbers, and its place in these."""
    each = WORD_BITS // bits
    first, last = numbers.start // each, -(-numbers.stop // each)
    return slice(first, last), slice(numbers.start - first * each, numbers.stop - first * each)
