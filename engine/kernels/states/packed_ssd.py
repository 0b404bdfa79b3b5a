"""State space duality in a step: weights laid out, and the operations that they write."""

from __future__ import annotations

from typing import Any

from engine.kernels.core.operations import NORM_LAST, OperationKind
from engine.kernels.lowering.parts import KeptNumbers, Packing
from engine.kernels.lowering.product import Product, Rows
from engine.kernels.lowering.writer import Writer, factor_field
from engine.kernels.states.ssd import (
    CONVOLVED,
    GATED_HEADS,
    MIXED_HEADS,
    PROJECTED,
    WANTED_HEADS,
    HeadNorm,
    Ssd,
)
from parallel.parts import parts_here


class PackedSsd:
    """A layer in a step: its weights laid out, and the operations that it writes."""

    def __init__(self, ssd: Ssd, packing: Packing) -> None:
        self.ssd = ssd
        self.inward = packing.packer.panels(ssd.inward, multiple=32)
        parts = parts_here(ssd.sizes.inner, packing.ranks if ssd.is_partial else 1)
        self.out = packing.packer.panels(ssd.out, multiple=32, parts=parts)
        bias = ssd.inward_bias
        self.inward_bias = None if bias is None else bias / ssd.inward_factor  # the factor comes behind it

    def project(self, writer: Writer, into: Rows, kept: KeptNumbers) -> None:
        """Write all up to the heads' results, behind their gate and norm."""
        ssd, sizes, buffers = self.ssd, self.ssd.sizes, writer.buffers
        projected, state = buffers[PROJECTED], writer.layer_state(kept.state)
        begin, itemsize = projected.data_ptr(), projected.element_size()
        writer.add(
            OperationKind.LINEAR,
            into=writer.rounded(into, self.inward, writer.hidden),
            out=projected,
            weights=self.inward,
            more=self.inward_bias,
            n=sizes.projected,
            k=writer.hidden,
            number=factor_field(ssd.inward_factor),
        )
        ssd.conv.write(writer, projected, buffers[CONVOLVED], state, n=sizes.projected, a=sizes.inner)
        writer.add(
            OperationKind.SSD_ROWS,
            into=buffers[CONVOLVED],
            out=buffers[MIXED_HEADS],
            weights=begin + (sizes.inner + sizes.convolved) * itemsize,
            n=sizes.projected,
            extra=state,
            more=ssd.of_heads,
            groups=sizes.groups,
            number=ssd.limits[0],
            cap=ssd.limits[1],
        )
        writer.add(
            OperationKind.GATED_NORM,
            into=buffers[MIXED_HEADS],
            out=buffers[GATED_HEADS],
            extra=projected,
            n=sizes.projected,
            k=sizes.inner,
            cap=factor_field(ssd.gate_factor),
            **({} if ssd.norm is None else _fields(ssd.norm)),
        )

    def mix(self, writer: Writer, kept: KeptNumbers) -> Product:
        """Write the choice of the wanted rows; returns the last product."""
        ssd, buffers = self.ssd, writer.buffers
        inner = ssd.sizes.inner
        rows = writer.selected(buffers[GATED_HEADS], buffers[WANTED_HEADS], inner)
        return Product(rows, self.out, inner, ssd.out_bias, ssd.is_partial)


def _fields(norm: HeadNorm) -> dict[str, Any]:
    """Fields of an operation with this norm."""
    flags = NORM_LAST if norm.is_last else 0
    return {"more": norm.weights, "number": norm.eps, "groups": norm.parts, "flags": flags}
