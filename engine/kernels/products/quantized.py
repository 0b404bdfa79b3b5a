"""Packed weights of 4, 8 and 16 bits in panels, as ``quantized.hpp`` reads them.

A product has the bits that it would have with the widened weights, so nothing depends on which weights of a
model stay packed.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels.core.operations import QUANTIZED, ROUNDED, RecordedWeights
from engine.kernels.core.pages import Arena
from engine.model.quantization.attached import codes_of
from engine.model.quantization.rounding import Rounding, common
from engine.model.quantization.stacks import TWICE
from engine.model.quantization.weight_codes import AT_ONCE, Codes

logger = logging.getLogger(__name__)

LANES = 16
WORD_BITS = 32
FLOAT8 = 2.0**120
"""Factor on the scales of floats of 8 bits."""
ROUNDING = np.dtype([("scale", np.float64), ("zero", np.int64), ("is_symmetric", np.int64)])
"""See ``rounding.hpp``."""


class CodeArithmetic(enum.IntEnum):
    """Ways from codes to weights that give the same bits: see ``coded_rows.hpp``."""

    ANY = 0
    BY_FLOATS = 1
    """Sums of floats round to bfloat16."""
    EXACT = 2
    """Products need no rounding to the type of the model."""


class QuantizedPanels(RecordedWeights):
    """The panels of a matrix, or of some matrices, as codes."""

    flag = QUANTIZED

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        bits: int,
        is_float: bool = False,
        order: torch.Tensor | None = None,
        arithmetic: CodeArithmetic = CodeArithmetic.ANY,
    ) -> None:
        """``codes``: int32 [panels, lines, 16]; scales and zeros: float32 [panels, groups, 16].

        ``is_float``: codes are floats. Scales of those of 8 bits are :data:`FLOAT8` times as large.
        ``order``: int32 [matrices, inputs], the group of each input; None: groups are of neighbours.
        """
        self._kept = codes, scales, zeros, order
        self.num_bytes = sum(each.nbytes for each in self._kept if each is not None)
        """Bytes that a product reads."""
        places = [0 if each is None else each.data_ptr() for each in self._kept]
        panels_each = len(codes) if order is None else len(codes) // len(order)
        self.record = np.array(
            [*places[:3], bits, scales.shape[1], is_float, places[3], panels_each, arithmetic], dtype=np.int64
        )
        """Record of addresses and sizes for the kernels."""

    def __repr__(self) -> str:
        return f"<QuantizedPanels {len(self._kept[0])} panels, {self.num_bytes} bytes>"


class EightBitPanels(RecordedWeights):
    """The panels of a matrix that multiplies inputs in 8 bits."""

    flag = ROUNDED

    def __init__(
        self, words: torch.Tensor, scales: torch.Tensor, sums: torch.Tensor, rounding: Rounding
    ) -> None:
        """``words``: int32 [panels, inputs / 4, 16]; scales [panels, 16]; sums: int32 [panels, parts, 16]."""
        self._kept = words, scales, sums
        self.parts = int(sums.shape[1])
        """Parts of the inputs, each of which has its own sum."""
        self.num_bytes = sum(each.nbytes for each in self._kept)
        """Bytes that a product reads."""
        self.record = np.array([*(each.data_ptr() for each in self._kept), self.parts], dtype=np.int64)
        """Record of addresses and sizes for the kernels."""
        self.rounding = np.zeros((), dtype=ROUNDING)
        """Rounding of inputs, as the kernels read it."""
        self.rounding["scale"], self.rounding["zero"] = rounding.scale, rounding.zero
        self.rounding["is_symmetric"] = rounding.is_symmetric

    def __repr__(self) -> str:
        return f"<EightBitPanels {len(self._kept[0])} panels, {self.num_bytes} bytes>"


def quantized(
    rows: Sequence[Sequence[torch.Tensor]],
    multiple: int,
    arena: Arena,
    parts: int = 1,
    *,
    has_pairs: bool = True,
) -> QuantizedPanels | EightBitPanels | None:
    """Panels of weights [..., outputs, inputs] that have codes.

    ``rows``: weights whose outputs are beside each other in panels; one row of panels after the other. The
    outputs of each are filled up to a multiple of ``multiple``. ``parts``: of the inputs, if they are
    rounded. ``has_pairs``: words of bfloat16 hold two inputs; if not, codes lie as those of float32.
    None where some have no codes, codes of several kinds, or codes that do not give their weights.
    """
    given: list[Codes] = []
    for row in rows:
        codes = [codes_of(weight) for weight in row]
        known = [each for each in codes if each is not None]
        if len(known) < len(codes) or len({each.kind for each in known}) > 1:
            return None
        if not all(each.has_order_of(known[0]) for each in known):
            return None
        given.append(_beside(known))
    first, dtype = given[0], rows[0][0].dtype
    if len({each.kind for each in given}) > 1 or not all(each.has_order_of(first) for each in given):
        return None
    for row, part in zip(rows, given, strict=True):
        if not _give(part, row, dtype):
            logger.warning("the codes of a quantised matrix do not give its weights, which stay widened")
            return None
    rounding = common([each.rounding for each in given])
    inputs, groups = first.codes.shape[-1], first.scales.shape[-1]
    if rounding is not None:
        laid = _laid([_byte_panels(part, multiple, parts) for part in given], arena)
        return EightBitPanels(laid[0], laid[1], laid[2], rounding)
    each_group = inputs if first.order is not None else 0 if inputs % groups else inputs // groups
    if not each_group or each_group % (WORD_BITS // first.bits):
        return None
    arithmetic = min(_arithmetic(part, dtype) for part in given)
    if first.is_float and first.bits == 8:
        given = [replace(part, scales=part.scales * FLOAT8) for part in given]
        if not all(bool(part.scales.isfinite().all()) for part in given):
            return None
    has_zeros = any(part.zeros is not None for part in given)
    pack = 2 if has_pairs and dtype == torch.bfloat16 else 1
    laid = _laid([_panels(part, multiple, has_zeros, pack) for part in given], arena)
    zeros = laid[2] if has_zeros else None
    order = None if first.order is None else first.order.reshape(-1, inputs).contiguous()
    return QuantizedPanels(laid[0], laid[1], zeros, first.bits, first.is_float, order, arithmetic)


def _give(codes: Codes, weights: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether codes of outputs in a row give these weights, to the bit."""
    begin, right = 0, True
    for weight in weights:
        rows = slice(begin, begin + weight.shape[-2])
        right = right and weight.dtype == dtype and codes.rows(rows).gives(weight.data)
        begin = rows.stop
    return right and begin == codes.codes.shape[-2]


_SMALL, _LARGE = 2.0**-90, 2.0**90
"""Scales by which no step of the arithmetic leaves the normal numbers."""


def _arithmetic(codes: Codes, dtype: torch.dtype) -> CodeArithmetic:
    scales, zeros = codes.scales, codes.zeros
    largest = 2.0**7 if codes.is_float and codes.bits == 8 else _LARGE  # times FLOAT8 it is a float
    sizes = scales[scales != 0].abs()
    if codes.order is not None or not bool(scales.isfinite().all()):
        return CodeArithmetic.ANY
    if len(sizes) and (sizes.min() < _SMALL or sizes.max() > largest):
        return CodeArithmetic.ANY
    if zeros is not None:
        offsets = zeros + 2.0 ** (codes.bits - 1)
        products = offsets.double() * scales.double()
        is_whole = bool(((zeros == zeros.round()) & (zeros.abs() <= 1 << 12)).all())
        if not is_whole or not torch.equal(products.float().double(), products):
            return CodeArithmetic.ANY
    if dtype == torch.float32:
        return CodeArithmetic.EXACT
    if codes.bits == 8 or zeros is not None:
        return CodeArithmetic.BY_FLOATS
    spare = 6 if codes.is_float else 5  # of the eight bits of a bfloat16, what codes leave for scales
    has_more = scales.contiguous().view(torch.int32) & ((1 << (24 - spare)) - 1)
    return CodeArithmetic.BY_FLOATS if bool(has_more.any()) else CodeArithmetic.EXACT


def _laid(parts: Sequence[Sequence[torch.Tensor]], arena: Arena) -> list[torch.Tensor]:
    """Tensors [..., panels, lines, 16] of several rows of panels, where they stay."""
    laid = []
    for pieces in zip(*parts, strict=True):
        first, rows = pieces[0], [piece.shape[-3] for piece in pieces]
        home = arena.zeros((*first.shape[:-3], sum(rows), *first.shape[-2:]), first.dtype)
        for place, piece in zip(home.split(rows, dim=-3), pieces, strict=True):
            place.copy_(piece)
        laid.append(home.flatten(0, -3))
    return laid


HALF = 16
"""Bits of a float16."""
_FEW = 4096
"""Numbers that are looked at first, which is enough for most weights in float32."""


def halves(parts: Sequence[torch.Tensor], arena: Arena) -> QuantizedPanels | None:
    """Panels [..., panels, inputs, 16, 1] in a row, if all numbers are float16."""
    for part in parts:
        some = part.flatten()[:_FEW] if part.is_contiguous() else part[..., :1, :1, :, :]
        if part.dtype != torch.float32 or part.shape[-3] % 2 or not (_are_halves(some) and _are_halves(part)):
            return None
    dim = parts[0].ndim - 4
    shape = [*parts[0].shape]
    shape[dim] = sum(part.shape[dim] for part in parts)
    laid = arena.zeros(tuple(shape), torch.float16)
    for begin, part in zip(_begins(parts, dim), parts, strict=True):
        laid.narrow(dim, begin, part.shape[dim]).copy_(part)
    lines = laid.view(-1, shape[-3] // 2, LANES * 2).view(torch.int32)
    return QuantizedPanels(lines, torch.zeros(0, 1, LANES), None, HALF)


def _begins(parts: Sequence[torch.Tensor], dim: int) -> list[int]:
    """Where each part begins along a dimension."""
    return [sum(part.shape[dim] for part in parts[:number]) for number in range(len(parts))]


def _are_halves(numbers: torch.Tensor) -> bool:
    return bool(torch.equal(numbers.to(torch.float16).to(torch.float32), numbers))


def _beside(parts: Sequence[Codes]) -> Codes:
    """Tensors joined along their outputs."""
    if len(parts) == 1:
        return parts[0]
    zeros = None
    if any(part.zeros is not None for part in parts):
        zeros = torch.cat([torch.zeros_like(p.scales) if p.zeros is None else p.zeros for p in parts], dim=-2)
    return replace(
        parts[0],
        codes=torch.cat([part.codes for part in parts], dim=-2),
        scales=torch.cat([part.scales for part in parts], dim=-2),
        zeros=zeros,
        rounding=common([part.rounding for part in parts]),
    )


def _byte_panels(part: Codes, multiple: int, parts: int) -> list[torch.Tensor]:
    """Words [..., panels, inputs / 4, 16], scales, and sums of each part.

    Scales are [..., panels, 1, 16], sums [..., panels, parts, 16].
    """
    codes, scales = _filled_up(part.codes, multiple), _filled_up(part.scales, multiple)
    sums = codes.unflatten(-1, (parts, -1)).sum(-1, dtype=torch.int32)
    return [_by_lane(value) for value in (codes.view(torch.int32), scales, sums)]


def _panels(part: Codes, multiple: int, has_zeros: bool, pack: int) -> list[torch.Tensor]:
    """Words of codes [..., panels, lines, 16], scales [..., panels, groups, 16], zeros if wanted."""
    codes = _filled_up(part.codes, multiple)
    *stack, outputs, inputs = codes.shape
    words = torch.empty(*stack, outputs // LANES, inputs * part.bits // WORD_BITS, LANES, dtype=torch.int32)
    matrices, places = codes.view(-1, outputs, inputs), words.view(-1, *words.shape[-3:])
    for one, place in zip(matrices, places, strict=True):
        for panels in _few_panels(one.shape):  # that stay in a cache meanwhile
            rows = one[panels.start * LANES : panels.stop * LANES]
            place[panels] = _words(rows, part.bits, part.is_float, pack)
    wanted = [part.scales]
    if has_zeros:
        wanted.append(torch.zeros_like(part.scales) if part.zeros is None else part.zeros)
    return [words, *(_by_lane(_filled_up(value, multiple)) for value in wanted)]


def _few_panels(shape: torch.Size) -> Iterator[slice]:
    """Panels of a matrix [outputs, inputs], some at a time."""
    outputs, inputs = shape
    step = max(1, AT_ONCE // (LANES * max(1, inputs)))
    return (slice(begin, begin + step) for begin in range(0, outputs // LANES, step))


def _words(codes: torch.Tensor, bits: int, is_float: bool, pack: int) -> torch.Tensor:
    """Words [panels, lines, 16] of codes [panels * 16, inputs]."""
    # Numbers in the order of a panel's memory: 16 outputs, each with `pack` inputs that are neighbours.
    lines = _by_lane(codes.view(torch.int16) if pack == 2 else codes).contiguous().view(torch.int8)
    chunks = lines.flatten(-2).unflatten(-1, (-1, WORD_BITS // bits, LANES))
    if bits == 4:
        chunks = _places_of_floats(chunks) if is_float else (chunks + 8) & 15  # none is negative
        chunks = chunks[..., 0::2, :] | (chunks[..., 1::2, :] << 4)
    return chunks.transpose(-2, -1).contiguous().view(torch.int32).squeeze(-1)


_PLACES = torch.zeros(32, dtype=torch.int8)
"""Codes of floats of 4 bits, by twice what they stand for, plus 16."""
_PLACES[TWICE.int() + 16] = torch.arange(16, dtype=torch.int8)
_PLACES[16] = 0


def _places_of_floats(numbers: torch.Tensor) -> torch.Tensor:
    """Codes of floats of 4 bits, from twice what they stand for."""
    return _PLACES.index_select(0, numbers.flatten().int() + 16).view(numbers.shape)


def _filled_up(values: torch.Tensor, multiple: int) -> torch.Tensor:
    """Values [..., outputs, numbers], contiguous, with zeros up to a multiple of outputs."""
    missing = -values.shape[-2] % multiple
    return F.pad(values, (0, 0, 0, missing)) if missing else values.contiguous()


def _by_lane(values: torch.Tensor) -> torch.Tensor:
    """Values of outputs in panels: [..., panels * 16, numbers] -> [..., panels, numbers, 16]."""
    return values.unflatten(-2, (-1, LANES)).transpose(-2, -1)
