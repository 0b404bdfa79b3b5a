"""Choice of the operator for expert products, by device and data type."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Literal

import torch

Product = Literal["grouped_mm", "triton", "fixed", "batched_mm"]
"""Operators of experts: torch's, our kernel in two forms, or copies of the weights.

Tiles of our kernel follow the number of rows, or are fixed. Copies are for small steps.
"""

FAST_MAJORS = (9, 10)
"""Compute capabilities on which torch's grouped product is one kernel, in bfloat16."""
LEAST_TRITON = (8, 0)


def product_for(
    device_type: str,
    capability: tuple[int, int] | None,
    dtype: torch.dtype,
    *,
    is_rocm: bool,
    has_triton: bool,
) -> Product:
    """The operator for experts of one type on one device.

    ``capability`` is that of a CUDA device; on ROCm it numbers other devices, and says nothing here.
    """
    if device_type != "cuda":
        return "grouped_mm"
    assert capability is not None
    if not is_rocm and capability[0] in FAST_MAJORS and dtype == torch.bfloat16:
        return "grouped_mm"
    if has_triton and (is_rocm or capability >= LEAST_TRITON):
        return "triton"
    return "batched_mm"


def product_here(device: torch.device, dtype: torch.dtype) -> Product:
    """The operator for experts of one type on this device."""
    return product_for(
        device.type,
        torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype,
        is_rocm=torch.version.hip is not None,
        has_triton=has_triton(),
    )


def reads_codes(device: torch.device) -> bool:
    """Whether our kernels multiply by quantised weights on this device."""
    if device.type != "cuda" or not has_triton():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= LEAST_TRITON


@cache
def has_triton() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
