"""Product of a token's embedding, which is added to a layer's queries, keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kernels.attention.attention import PROJECTED
from engine.kernels.core.library import KernelLibrary
from engine.kernels.core.operations import ADD, OperationKind
from engine.kernels.core.rows import SLACK
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.lowering.writer import Writer
from engine.kernels.norms.norm import Norm
from engine.kernels.products.packing import Packer

EMBEDDED = "embedded"
"""Rows of the tokens of a step, behind their norm."""


class TokenProduct:
    """Weights of a layer that reads the token of a row beside what is given."""

    def __init__(
        self,
        library: KernelLibrary,
        table: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        matrices: Sequence[torch.Tensor],
    ) -> None:
        """``table`` [tokens, hidden] is read as it is.

        ``matrices`` [outputs, hidden]: of queries, keys and values.
        """
        self.table = table
        self._norm = Norm(norm.float(), eps, is_centred=False)
        self._weights = Packer(library).panels(*matrices, multiple=32)
        self._width = sum(map(len, matrices))

    def __repr__(self) -> str:
        return f"<TokenProduct of {len(self.table)} tokens>"

    def scratch(self) -> Scratch:
        """Rows that its operations hand on."""
        return Scratch(EMBEDDED, self.table.shape[1], slack=SLACK)

    def write(self, writer: Writer) -> None:
        """Write what is added behind the layer's own product."""
        rows, hidden = writer.buffers[EMBEDDED], writer.hidden
        writer.add(OperationKind.EMBED, out=rows, into=self.table, k=hidden)
        writer.normalise(self._norm, rows, rows, hidden)
        writer.add(
            OperationKind.LINEAR,
            into=rows,
            out=writer.buffers[PROJECTED],
            weights=self._weights,
            n=self._width,
            k=hidden,
            flags=ADD,
        )
