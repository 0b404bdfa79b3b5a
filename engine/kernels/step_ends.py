"""Begin and end of a step, and rows that are kept between.

Ids or given rows; all rows or wanted ones; the model's own output layer or another one's.
"""

from __future__ import annotations

import torch

from engine.kernels.choosing.output import PackedOutput
from engine.kernels.embedding.token_product import EMBEDDED, TokenProduct
from engine.kernels.lowering.buffers import Buffers, Needs
from engine.kernels.lowering.scratch import Scratch
from engine.kernels.norms.norm import Norm

INNER = "inner {}"
"""Name of the rows that go into a layer."""


class StepEnds:
    """Ends of a program's steps, chosen before its first one."""

    def __init__(self) -> None:
        self.from_rows = False
        """Whether steps begin with rows that are given, not with the embedding."""
        self.keeps = False
        """Whether all rows go through the last layer, not only those whose logits are wanted."""
        self.are_read = True
        """Whether the rows of the next step are read, if they are kept."""
        self.inner: tuple[int, ...] = ()
        """Numbers of layers whose input rows are kept."""
        self.tokens: TokenProduct | None = None
        """Product of tokens that the first layer adds to that of given rows."""
        self.output: PackedOutput | None = None
        """Output layer in place of the model's own."""
        self._rounds = False
        self._buffers: Buffers | None = None
        self._hidden = 0

    def __repr__(self) -> str:
        return f"<StepEnds from {'rows' if self.from_rows else 'ids'}, {'all' if self.keeps else 'wanted'}>"

    @property
    def all_rows(self) -> bool:
        """Whether all rows of the next step go through the last layer."""
        return self.keeps and self.are_read

    @property
    def kept_layers(self) -> tuple[int, ...]:
        """Layers whose input rows are kept in the next step."""
        return self.inner if self.are_read else ()

    def rows(self, tokens: int) -> torch.Tensor:
        """Rows [tokens, hidden] behind the last layer, before its norm; valid until the next step."""
        assert self.keeps
        assert self._buffers is not None
        return self._buffers.stream[:tokens, : self._hidden]

    def inner_rows(self, tokens: int) -> list[torch.Tensor]:
        """Rows [tokens, hidden] that went into each layer of :attr:`inner`."""
        assert self._buffers is not None
        return [self._buffers[INNER.format(each)][:tokens, : self._hidden] for each in self.inner]

    def share(self, output: PackedOutput, norm: Norm, *, rounds: bool) -> None:
        """Give logits by the output layer of another model, behind this norm.

        ``rounds``: whether some of that model's weights want rows in 8 bits.
        """
        self.output, self._rounds = output.behind(norm), rounds

    def needs(self, own: Needs) -> Needs:
        """Sizes of buffers, with what is kept here."""
        scratch = {INNER.format(each): Scratch(INNER.format(each), own.hidden) for each in self.inner}
        if self.tokens is not None:
            scratch[EMBEDDED] = self.tokens.scratch()
        found = own._replace(scratch={**own.scratch, **scratch}, rounds=own.rounds or self._rounds)
        return found if self.output is None else found._replace(vocab=self.output.output.vocab)

    def use(self, buffers: Buffers, hidden: int) -> None:
        """Read the rows of steps in these buffers from now on."""
        self._buffers, self._hidden = buffers, hidden
