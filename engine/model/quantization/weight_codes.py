"""Codes of weights with their scales and zero points, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from engine.model.quantization.rounding import Rounding

FLOAT8 = torch.float8_e4m3fn
AT_ONCE = 1 << 18
"""Numbers that are computed with at once: in float32 they stay in a cache."""


def few_rows(shape: tuple[int, ...]) -> Iterator[slice]:
    """Rows of a matrix, some at a time."""
    outputs, inputs = shape
    step = max(1, AT_ONCE // max(1, inputs))
    return (slice(begin, begin + step) for begin in range(0, outputs, step))


def widened(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    dtype: torch.dtype,
    order: torch.Tensor | None = None,
) -> torch.Tensor:
    """Weights of codes [outputs, inputs]; scales and zeros are [outputs, groups].

    ``order``: the group of each input, where it does not follow from its place.
    """
    weights = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    groups = scales.shape[-1] if order is None else len(order)

    def of_inputs(values: torch.Tensor, rows: slice) -> torch.Tensor:
        return (values[rows] if order is None else values[rows].index_select(-1, order))[..., None]

    for rows in few_rows(codes.shape):
        numbers = _as_float(codes[rows])
        grouped = numbers.unflatten(-1, (groups, codes.shape[-1] // max(1, groups)))
        if zeros is not None:
            grouped -= of_inputs(zeros, rows)
        grouped *= of_inputs(scales, rows)
        weights[rows] = numbers
    return weights


_FLOATS = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
"""Numbers of all codes that are floats: five times as fast as torch's own conversion."""


def _as_float(codes: torch.Tensor) -> torch.Tensor:
    if codes.dtype != FLOAT8 or codes.device.type != "cpu":
        return codes.float()
    places = codes.contiguous().view(torch.uint8).flatten().int()
    return _FLOATS.index_select(0, places).view(codes.shape)


def _same(found: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether two tensors have equal numbers.

    They are compared as words where they can be, in a seventh of the time.
    """
    each = torch.int64.itemsize // weights.itemsize
    has_words = weights.is_contiguous() and not (weights.shape[-1] % each or weights.storage_offset() % each)
    if has_words and torch.equal(found.view(torch.int64), weights.view(torch.int64)):
        return True
    return bool(torch.equal(found, weights))


@dataclass(frozen=True)
class Codes:
    """A matrix, or a stack of them; a weight is ``(code - zero) * scale``."""

    codes: torch.Tensor
    """int8 [..., outputs, inputs], from ``-2 ** (bits - 1)`` on.

    Or, of floats: the bits of those of 8 bits, or twice those of 4 bits, which are whole numbers.
    """
    scales: torch.Tensor
    """float32 [..., outputs, groups]; groups are of neighbours, or as ``order`` says."""
    zeros: torch.Tensor | None
    """float32 like the scales; None: all are 0."""
    bits: int
    is_float: bool = False
    """Whether codes are floats (float8_e4m3fn, or e2m1 with 4 bits)."""
    rounding: Rounding | None = None
    """Rounding of activations before the product; None: not at all."""
    order: torch.Tensor | None = None
    """int32 [..., inputs]: the group of each input; None: groups are of neighbours."""

    @property
    def kind(self) -> tuple[int, ...]:
        """Properties that codes must share to be joined."""
        shape = self.scales.shape[-1], self.codes.shape[-1], self.codes.dim()
        return self.bits, self.is_float, self.order is None, *shape

    def has_order_of(self, other: Codes) -> bool:
        """Whether groups are of the same inputs."""
        if self.order is None or other.order is None:
            return self.order is other.order
        return bool(torch.equal(self.order, other.order))

    def of(self, number: int) -> Codes:
        """One matrix of a stack."""
        zeros, order = (None if each is None else each[number] for each in (self.zeros, self.order))
        return replace(self, codes=self.codes[number], scales=self.scales[number], zeros=zeros, order=order)

    def to(self, device: torch.device) -> Codes:
        """The same codes on another device."""
        zeros, order = (None if each is None else each.to(device) for each in (self.zeros, self.order))
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, zeros=zeros, order=order)

    def product(self, x: torch.Tensor, parts: int = 1) -> torch.Tensor:
        """Product of rows [..., inputs], rounded as these weights want: float32 [..., outputs]."""
        assert self.rounding is not None
        return self.rounding.product(x, self.codes, self.scales[:, 0], parts)

    def rows(self, rows: slice) -> Codes:
        """Codes of some outputs."""
        zeros = None if self.zeros is None else self.zeros[..., rows, :]
        return replace(self, codes=self.codes[..., rows, :], scales=self.scales[..., rows, :], zeros=zeros)

    def widened(self, dtype: torch.dtype) -> torch.Tensor:
        """Weights that the codes stand for."""
        if self.order is not None and self.codes.dim() > 2:
            return torch.stack([self.of(number).widened(dtype) for number in range(len(self.codes))])
        codes = self.codes.view(FLOAT8) if self.is_float and self.bits == 8 else self.codes
        flat = (None if each is None else each.flatten(0, -2) for each in (self.scales, self.zeros))
        scales, zeros = flat
        assert scales is not None
        return widened(codes.flatten(0, -2), scales, zeros, dtype, self.order).view(codes.shape)

    def gives(self, weights: torch.Tensor) -> bool:
        """Whether these weights are what the codes stand for, to the bit."""
        if self.codes.shape != weights.shape:
            return False
        if weights.dim() > 2:
            return all(self.of(number).gives(each) for number, each in enumerate(weights))
        some = few_rows(weights.shape)
        return all(_same(self.rows(rows).widened(weights.dtype), weights[rows]) for rows in some)
