"""Copies of KV blocks between a cache on a device and host memory.

A block is gathered into one row of bytes by a kernel, and the row is copied at once; so is the way back. All
memory for it is taken at the start. Where the kernel cannot be had, or that memory, each tensor's part of a
block is a copy of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy as np
import numpy.typing as npt
import torch

from engine.gpu.copy_stream import CopyStream, host_memory
from engine.gpu.product_choice import has_triton

logger = logging.getLogger(__name__)

STAGE_BYTES = 1 << 20
"""Bytes that are copied at once, if more than one block fits into them."""
CHUNK = 1024
"""Words that a program of the kernel copies."""
MOST_ROWS = 4096
"""Most blocks of one copy, for caches whose blocks have few bytes."""


class BlockCopies:
    """Implements :class:`engine.transfers.staged_memory.DeviceCopies` for tensors of one device."""

    def __init__(self, parts: Sequence[torch.Tensor], stream: CopyStream) -> None:
        """``parts``: bytes [blocks, bytes of a block] of each tensor of the cache."""
        self.num_blocks = len(parts[0])
        self.layout = tuple(part.shape[1] for part in parts)
        self._stream = stream
        width = sum(self.layout)
        rows = min(MOST_ROWS, max(1, STAGE_BYTES // max(width, 1)))
        self._room = host_memory(stream, rows * width).view(rows, width)
        self.room: npt.NDArray[np.uint8] = self._room.numpy()
        self._way: _PartCopies | _KernelCopies = _PartCopies(parts)
        if width and has_triton():
            self._try_kernel(parts)

    def __repr__(self) -> str:
        return f"<BlockCopies of {self.num_blocks} blocks, {self._way!r}>"

    def gather(self, blocks: Sequence[int]) -> None:
        """Copy blocks to the first rows of :attr:`room`."""
        self._run(self._way, blocks, gathers=True)

    def scatter(self, blocks: Sequence[int]) -> None:
        """Copy the first rows of :attr:`room` to blocks."""
        self._run(self._way, blocks, gathers=False)

    def _run(self, way: _PartCopies | _KernelCopies, blocks: Sequence[int], *, gathers: bool) -> None:
        def copy() -> None:
            with torch.no_grad():
                way.copy(blocks, self._room[: len(blocks)], gathers=gathers)

        self._stream.run(copy)

    def _try_kernel(self, parts: Sequence[torch.Tensor]) -> None:
        """Copy by the kernel from now on, if it copies as torch does.

        Else the reason is logged. Blocks that are overwritten get back what they held.
        """
        blocks = sorted({0, self.num_blocks - 1})[: len(self._room)]
        try:
            kernel = _KernelCopies(parts, self._stream, len(self._room))
            self.gather(blocks)
            before = self.room[: len(blocks)].copy()
            is_right = self._is_right(kernel, blocks)
            self.room[: len(blocks)] = before
            self.scatter(blocks)
        except Exception as error:  # noqa: BLE001 (a compiler of kernels may raise anything)
            reason = (str(error).strip() or type(error).__name__).split("\n", 1)[0][:200]
        else:
            reason = "" if is_right else "the kernel copies wrongly"
            if is_right:
                self._way = kernel
        if reason:
            logger.warning("KV blocks are copied part by part, which is slower: %s", reason)

    def _is_right(self, kernel: _KernelCopies, blocks: Sequence[int]) -> bool:
        """Whether torch and the kernel gather what the kernel has scattered."""
        rows = self.room[: len(blocks)]
        rows[:] = pattern = np.random.default_rng(0).integers(0, 256, rows.shape, dtype=np.uint8)
        self._run(kernel, blocks, gathers=False)
        found = []
        for way in (self._way, kernel):
            rows[:] = ~pattern
            self._run(way, blocks, gathers=True)
            found.append(bool((rows == pattern).all()))
        return all(found)


class _PartCopies:
    """Copies of blocks by torch, each part of a block by itself."""

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self._parts = parts

    def __repr__(self) -> str:
        return "part by part"

    def copy(self, blocks: Sequence[int], rows: torch.Tensor, *, gathers: bool) -> None:
        """Launch the copies of blocks to ``rows``, or from there."""
        sizes = [part.shape[1] for part in self._parts]
        for row, block in zip(rows, blocks, strict=True):
            for part, here in zip(self._parts, row.split(sizes), strict=True):
                to, source = (here, part[block]) if gathers else (part[block], here)
                to.copy_(source, non_blocking=True)


class _KernelCopies:
    """Copies of blocks by a kernel, with its tables and its rows on the device."""

    def __init__(self, parts: Sequence[torch.Tensor], stream: CopyStream, rows: int) -> None:
        self._parts = parts  # the kernel knows only where they are
        sizes, device = [part.shape[1] for part in parts], parts[0].device
        addresses = [part.data_ptr() for part in parts]
        word = 4 if all(each % 4 == 0 for each in chain(sizes, addresses)) else 1
        self._word = {4: torch.int32, 1: torch.uint8}[word]
        self._row = sum(sizes) // word
        self._grid = -(-max(sizes) // word // CHUNK), len(parts)
        begins = list(accumulate(sizes, initial=0))[:-1]
        table = [addresses, [each // word for each in sizes], [each // word for each in begins]]
        self._table = torch.tensor(table, dtype=torch.int64).to(device)
        self._rows = torch.empty(rows, sum(sizes), dtype=torch.uint8, device=device)
        self._blocks = torch.zeros(rows, dtype=torch.int64, device=device)
        self._numbers = host_memory(stream, 8 * rows).view(torch.int64)

    def __repr__(self) -> str:
        return "by a kernel"

    def copy(self, blocks: Sequence[int], rows: torch.Tensor, *, gathers: bool) -> None:
        """Launch the copy of blocks to ``rows``, or from there."""
        from engine.gpu.block_kernels import copy_blocks  # loads triton

        count = len(blocks)
        self._numbers[:count] = torch.tensor(blocks, dtype=torch.int64)
        self._blocks[:count].copy_(self._numbers[:count], non_blocking=True)
        if not gathers:
            self._rows[:count].copy_(rows, non_blocking=True)
        places, widths, begins = self._table
        copy_blocks[(*self._grid, count)](
            places, widths, begins, self._blocks, self._rows.view(self._word),
            ROW=self._row, BLOCK=CHUNK, GATHERS=gathers,
        )  # fmt: skip
        if gathers:
            rows.copy_(self._rows[:count], non_blocking=True)
