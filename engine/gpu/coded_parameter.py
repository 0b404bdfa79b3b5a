"""Attachment of packed weights to a parameter (loads no triton)."""

from __future__ import annotations

from typing import Any, Protocol

import torch

ATTRIBUTE = "lockstep_device_codes"
"""Attribute of an empty parameter: the codes that stand for it on the device."""


class CodedWeight(Protocol):
    """Interface of :class:`engine.gpu.coded_products.DeviceCodes` for modules that load no triton."""

    @property
    def codes(self) -> torch.Tensor: ...

    @property
    def inputs(self) -> int: ...

    @property
    def outputs(self) -> int: ...

    @property
    def numel(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    def widened(self, number: int, dtype: torch.dtype) -> torch.Tensor: ...

    def expected(self, number: int, rows: torch.Tensor) -> torch.Tensor: ...

    def product(
        self, rows: torch.Tensor, bias: torch.Tensor | None = None, pairs: Any = None, *, gather: bool = False
    ) -> torch.Tensor: ...


def coded_of(parameter: torch.Tensor) -> CodedWeight | None:
    """The codes that stand for a parameter; None for a plain one."""
    found: CodedWeight | None = getattr(parameter, ATTRIBUTE, None)
    return found
