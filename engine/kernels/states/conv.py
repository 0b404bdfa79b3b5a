"""Causal convolutions of each number by itself: weights and operation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.kernels.core.operations import ACTIVATED, OperationKind
from engine.kernels.core.stand_ins import NotRecognised
from engine.kernels.lowering.product import Rows
from engine.kernels.lowering.writer import Writer
from engine.kernels.products.made_up import MadeUpWeights
from engine.states.grid import NATIVE_GRID


@dataclass(frozen=True)
class Conv:
    """A causal convolution of each number by itself, whose weights are copies in float32."""

    weights: torch.Tensor
    """[kernel, width], those of the oldest token first."""
    bias: torch.Tensor | None
    """[width]"""
    is_activated: bool = False
    """Whether SiLU is applied to what it gives."""

    @property
    def kernel(self) -> int:
        return len(self.weights)

    @property
    def width(self) -> int:
        return int(self.weights.shape[1])

    def of_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """What it gives for rows [tokens, width] of a context's beginning."""
        padded = F.pad(rows.float(), (0, 0, self.kernel - 1, 0))
        sums = sum(padded[number : number + len(rows)] * each for number, each in enumerate(self.weights))
        assert isinstance(sums, torch.Tensor)
        sums = sums if self.bias is None else sums + self.bias
        return F.silu(sums) if self.is_activated else sums

    def write(
        self,
        writer: Writer,
        into: Rows,
        out: Rows,
        state: np.ndarray[Any, Any],
        *,
        n: int,
        a: int = 0,
        b: int = -1,
        c: int = -1,
    ) -> None:
        """Write the operation for all tokens; ``state``: the layer's record.

        ``n``: numbers of a row of ``into``. In it are the inputs at ``a``, and at ``b`` and ``c`` factors on
        inputs and on results, -1 for none.
        """
        writer.add(
            OperationKind.CONV,
            into=into,
            out=out,
            weights=self.weights,
            more=self.bias,
            extra=state,
            flags=ACTIVATED if self.is_activated else 0,
            n=n,
            a=a,
            b=b,
            c=c,
        )

    def make_up(self, weights: MadeUpWeights, module: Any) -> None:
        """Make weights up for the module that it is of, as many."""
        weights.put(module.weight, tuple(module.weight.shape), size=self.kernel**-0.5)
        if module.bias is not None:
            weights.put(module.bias, tuple(module.bias.shape), size=0.2)


def conv_of(module: Any, *, is_activated: bool = False) -> Conv:
    """The convolution of a module of torch.

    Raises:
        NotRecognised: it mixes the numbers of a token, or reads too many tokens.
    """
    if type(module) is not torch.nn.Conv1d or module.weight.shape[1] != 1:
        raise NotRecognised(f"a convolution of type {type(module).__name__} that mixes a token's numbers")
    weight = module.weight
    is_plain = len(weight) == module.in_channels and module.dilation == module.stride == (1,)
    if not is_plain or weight.shape[2] - 1 > NATIVE_GRID:
        raise NotRecognised(f"a convolution over {weight.shape[2]} tokens, or over some of them")
    bias = None if module.bias is None else module.bias.detach().to(torch.float32, copy=True)
    return Conv(weight.detach()[:, 0].float().t().contiguous(), bias, is_activated)
