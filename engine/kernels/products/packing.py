"""Laying out weights for ``step.cpp``: panels of 16 outputs.

A word of 32 bits holds one float32 or two bfloat16 that are neighbours along the inputs. Weights in float32
that are all numbers of float16, as those of a checkpoint in it, are kept so, and widened as they are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import OperationKind, OperationList, RecordedWeights
from engine.kernels.core.pages import Arena
from engine.kernels.products.compression import can_compress, compressed
from engine.kernels.products.quantized import EightBitPanels, QuantizedPanels, halves, quantized

PackedWeights: TypeAlias = "torch.Tensor | RecordedWeights"
"""Weights as operations read them."""
LANES = 16
PACK = {torch.float32: 1, torch.bfloat16: 2}
"""Numbers per word."""


def panels(weight: torch.Tensor, multiple: int = LANES) -> torch.Tensor:
    """[..., outputs, inputs] -> [..., outputs / 16, inputs / pack, 16, pack], contiguous.

    Outputs are filled up with zeros to a multiple of ``multiple``.
    """
    return _written(_stacked([weight], multiple))


def gate_and_up(weight: torch.Tensor) -> torch.Tensor:
    """[..., 2 * width, inputs], gate first -> gate's panels, then up's."""
    return _written([*map(_turned, weight.chunk(2, dim=-2))])


class Packer:
    """Lays weights out where they stay: in huge pages, compressed where that is worth it."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library
        self._arena = Arena()
        self.num_bytes = 0
        """Bytes of all that was laid out."""
        self.saved_bytes = 0
        """Bytes that compression saves of them."""
        self.quantized_bytes = 0
        """Bytes of packed weights of 4 and 8 bits."""
        self.half_bytes = 0
        """Bytes of weights that are kept as float16, and computed in float32."""

    def panels(self, *weights: torch.Tensor, multiple: int = LANES, parts: int = 1) -> PackedWeights:
        """See the function of this name, for several weights in a row.

        The outputs of all but the last one must fill whole panels. A parameter that knows its codes is kept
        as these. ``parts``: of the inputs, which are added up by themselves.
        """
        return self._keep(self._codes([weights], multiple, parts)) or self._lay(
            _stacked([weight.data for weight in weights], multiple)
        )

    def gate_and_up(self, gate: torch.Tensor, up: torch.Tensor) -> PackedWeights:
        """[..., width, inputs] of both -> gate's panels, then up's."""
        return self._keep(self._codes([[gate], [up]])) or self._lay([_turned(gate.data), _turned(up.data)])

    def gate_up_stack(self, gate_up: torch.Tensor) -> PackedWeights:
        """[experts, 2 * width, inputs], gate first -> of each expert gate's panels, then up's."""
        if gate_up.shape[-2] % (2 * LANES) == 0:
            laid = self._keep(self._codes([[gate_up]]))
            if laid is not None:
                return laid
        gate, up = gate_up.data.chunk(2, dim=-2)
        return self._lay([_turned(gate), _turned(up)])

    def _codes(
        self, rows: Sequence[Sequence[torch.Tensor]], multiple: int = LANES, parts: int = 1
    ) -> QuantizedPanels | EightBitPanels | None:
        return quantized(rows, multiple, self._arena, parts, has_pairs=self._library.has_avx512)

    def _keep(self, laid: QuantizedPanels | EightBitPanels | None) -> PackedWeights | None:
        if laid is not None:
            self.num_bytes += laid.num_bytes
            self.quantized_bytes += laid.num_bytes
        return laid

    def _lay(self, parts: Sequence[torch.Tensor]) -> PackedWeights:
        shape, dtype = _shape(parts), parts[0].dtype
        as_they_are = math.prod(shape) * dtype.itemsize
        if (as_halves := halves(parts, self._arena)) is not None:
            self.num_bytes += as_halves.num_bytes
            self.half_bytes += as_halves.num_bytes
            return as_halves
        if can_compress(self._library, shape, dtype):
            laid = compressed(self._library, _written(parts), self._arena)
            if laid is not None:
                self.num_bytes += laid.num_bytes
                self.saved_bytes += as_they_are - laid.num_bytes
                return laid
        self.num_bytes += as_they_are
        return _written(parts, self._arena.zeros(shape, dtype))


def _stacked(weights: Sequence[torch.Tensor], multiple: int) -> list[torch.Tensor]:
    """Panels of all weights in a row, filled up at the end."""
    *before, last = weights
    outputs = sum(weight.shape[-2] for weight in before)
    if outputs % LANES:
        raise ValueError(f"{outputs} outputs do not fill whole panels")
    missing = -(outputs + last.shape[-2]) % multiple
    return [*map(_turned, before), _turned(F.pad(last, (0, 0, 0, missing)) if missing else last)]


def _turned(weight: torch.Tensor) -> torch.Tensor:
    """Panels of a weight: a view of it, where its outputs fill them."""
    pack = PACK[weight.dtype]
    outputs, inputs = weight.shape[-2:]
    if inputs % pack:
        raise ValueError(f"{inputs} inputs do not divide into words of {pack}")
    missing = -outputs % LANES
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    split = padded.unflatten(-1, (inputs // pack, pack)).unflatten(-3, (-1, LANES))
    return split.transpose(-3, -2)


def _shape(parts: Sequence[torch.Tensor]) -> tuple[int, ...]:
    shape = [*parts[0].shape]
    shape[-4] = sum(part.shape[-4] for part in parts)
    return tuple(shape)


def _written(parts: Sequence[torch.Tensor], out: torch.Tensor | None = None) -> torch.Tensor:
    """Panels in a row, along their own dimension."""
    return torch.cat([*parts], dim=-4, out=out).contiguous()


def add_rounding(
    operations: OperationList,
    weights: PackedWeights | None,
    rows: Any,
    rounded: torch.Tensor | None,
    width: int,
    **which: Any,
) -> Any:
    """Rows for a product: rounded to 8 bits first, if its weights ask for it.

    ``which``: fields that say which rows.
    """
    if not isinstance(weights, EightBitPanels):
        return rows
    assert rounded is not None
    operations.add(
        OperationKind.ROUND,
        into=rows,
        out=rounded,
        more=weights.rounding,
        k=width,
        b=weights.parts,
        **which,
    )
    return rounded
