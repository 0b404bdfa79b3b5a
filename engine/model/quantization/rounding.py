"""Activations rounded to 8 bits before a product, as checkpoints for W8A8 ask for.

A row is rounded as ``x / scale + zero``, to the nearest whole number from -128 to 127. The scale is a row's
own, its greatest size over 127, or the checkpoint's. Where tensor-parallel ranks may have parts of a row,
each part has its own scale (:mod:`parallel.parts`). Products of whole numbers are added up as such, so their
sums have no order. ``rounding.hpp`` does the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

LEAST, MOST = -128, 127
WORD_INPUTS = 64
"""Inputs of a matrix whose activations are rounded are a multiple of this.

So that parts of it are whole words.
"""
MOST_INPUTS = 1 << 16
"""Most inputs whose products of bytes fit into a sum of 32 bits."""
_EXACT_INPUTS = 1024
"""Products of bytes whose sum is exact in float32, in any order."""


@dataclass(frozen=True)
class Rounding:
    """Rounding of activations to whole numbers of 8 bits."""

    scale: float = 0.0
    """Scale of all rows; 0: each row has its own."""
    zero: int = 0
    """Zero point, if there is a scale of all rows."""
    is_symmetric: bool = True
    """Whether 0 becomes 0 where rows have their own scale."""

    @property
    def is_centred(self) -> bool:
        """Whether 0 becomes 0."""
        return self.zero == 0 if self.scale else self.is_symmetric

    def rows(self, x: torch.Tensor, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows [..., k] as whole numbers, with scales and zero points, all float32.

        They are [..., parts, k / parts], and [..., parts, 1].
        """
        x = x.float().unflatten(-1, (parts, -1))
        if self.scale:
            scale = x.new_full((*x.shape[:-1], 1), self.scale)
            zero = torch.full_like(scale, self.zero)
        else:
            scale, zero = self._found(x)
        codes = torch.where(scale > 0, x / scale, 0).round() + zero
        return codes.clamp(LEAST, MOST), scale, zero

    def product(
        self, x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, parts: int = 1
    ) -> torch.Tensor:
        """Product of rows [..., k], rounded, with weights [outputs, k]: float32 [..., outputs].

        The weights are codes of 8 bits with ``scales`` [outputs].
        """
        rows, row_scales, zeros = self.rows(x, parts)
        total: list[torch.Tensor] = []
        for part, columns in enumerate(codes.chunk(parts, dim=-1)):
            sums = integer_product(rows[..., part, :], columns)
            if self._has_zeros:
                sums -= zeros[..., part, :].to(torch.int32) * columns.sum(-1, dtype=torch.int32)
            total.append(sums.float() * scales * row_scales[..., part, :])
        while len(total) > 1:
            total = [one + other for one, other in zip(total[::2], total[1::2], strict=True)]
        return total[0]

    @property
    def _has_zeros(self) -> bool:
        """Whether 0 may become another number."""
        return bool(self.zero) if self.scale else not self.is_symmetric

    def _found(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        least, most = x.amin(-1, keepdim=True).clamp(max=0), x.amax(-1, keepdim=True).clamp(min=0)
        # Divided by a tensor of the device: in place of dividing by a number CUDA multiplies by its inverse.
        if self.is_symmetric:
            scale = torch.maximum(most, -least) / torch.full_like(most, MOST)
            return scale, torch.zeros_like(scale)
        scale = (most - least) / torch.full_like(most, MOST - LEAST)
        return scale, torch.where(scale > 0, LEAST - least / scale, 0).round()


def common(roundings: list[Rounding | None]) -> Rounding | None:
    """The rounding of an input of several products; None where they have none in common.

    Of several scales the greatest is taken, as in vLLM.
    """
    known = [each for each in roundings if each is not None]
    if len(known) < len(roundings):
        return None
    if len(set(known)) == 1:
        return known[0]
    if all(each.scale and not each.zero for each in known):
        return replace(known[0], scale=max(each.scale for each in known))
    return None


def integer_product(rows: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Exact product of whole numbers of 8 bits, [..., k] and [outputs, k], as int32."""
    if codes.device.type == "cpu" and rows.numel() and _bytes_are_exact():
        found: torch.Tensor = torch._int_mm(rows.flatten(0, -2).to(torch.int8), codes.T)
        return found.view(*rows.shape[:-1], len(codes))
    sums = torch.zeros(*rows.shape[:-1], len(codes), dtype=torch.int32, device=rows.device)
    for some, columns in zip(
        rows.float().split(_EXACT_INPUTS, -1), codes.split(_EXACT_INPUTS, -1), strict=True
    ):
        sums += (some @ columns.float().T).to(torch.int32)
    return sums


@cache
def _bytes_are_exact() -> bool:
    """Whether torch multiplies bytes exactly here, in a tenth of the time of floats.

    Processors that lack instructions for it add pairs of products up in 16 bits. These overflow at the ends
    of the range.
    """
    ends = torch.tensor([LEAST, MOST], dtype=torch.int8)
    codes = ends.repeat_interleave(64)[torch.arange(192) % 128].expand(32, -1).contiguous()
    try:
        for rows in (codes, -codes - 1, codes.flip(-1)):
            exact = rows.int() @ codes.int().T
            if not all(torch.equal(torch._int_mm(rows[:n], codes.T), exact[:n]) for n in (1, 3, 32)):
                return False
    except (RuntimeError, AttributeError, NotImplementedError):  # not every build of torch has it
        return False
    return True
