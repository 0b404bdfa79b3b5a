"""Memory in huge pages for what every step reads.

That is weights as they are laid out for ``step.cpp``, the rows that operations hand on, and the KV cache. A
step reads all weights once. In pages of 4 KiB that is a miss of the TLB after every 64 lines, and on a
virtual machine a miss walks two tables. Linux has pages of 2 MiB for processes that ask (``madvise``, see its
``transparent_hugepage``). Where it gives none, or is not Linux, this is ordinary memory.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
from typing import Protocol

import torch

HUGE = 2 << 20
"""Bytes of a huge page on x86-64."""
CHUNK = 32 << 20
"""Bytes that small tensors share."""
ALIGNMENT = 64
VARIABLE = "LOCKSTEP_HUGE_PAGES"
"""Environment variable: 0 asks for no huge pages."""


def mapped(num_bytes: int) -> torch.Tensor:
    """Zeroed bytes in pages of their own, huge ones where Linux gives them.

    They cost neither time nor memory until they are written.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    memory = mmap.mmap(-1, num_bytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if os.environ.get(VARIABLE) != "0":
        with contextlib.suppress(OSError):  # a kernel that has none
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    begin = -whole.data_ptr() % HUGE
    return whole[begin : begin + num_bytes]


class Allocator(Protocol):
    """Gives tensors of zeros."""

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...


class Arena:
    """Allocator of tensors, small ones side by side.

    Memory is free again when all tensors that share it are gone.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def __repr__(self) -> str:
        return f"Arena({self._used} of {len(self._chunk)} bytes of the last chunk used)"

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros: no memory is given out twice."""
        size = math.prod(shape) * dtype.itemsize
        if size > CHUNK // 8:
            return mapped(size).view(dtype).view(shape)
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        if begin + size > len(self._chunk):
            self._chunk, begin = mapped(CHUNK), 0
        self._used = begin + size
        return self._chunk[begin : begin + size].view(dtype).view(shape)
