"""Memory for a KV cache that outlives its process.

``serve`` holds it open: an unnamed file (memfd) that the instance finds by a path of its launcher's. The
cache is mapped from it. While the instance lives it has a lock on the file, which the kernel drops when the
last of its threads is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import uuid
from typing import TYPE_CHECKING

from engine.inheritance.names import FILE_NAME
from engine.inheritance.table import ENTRY_BYTES, HEADER_BYTES, CacheHeader, Table, packed
from engine.kernels.core.pages import HUGE, VARIABLE
from engine.transfers.fetching import DEAD

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


class SharedCache:
    """KV cache in an unnamed file, and the allocator of its tensors."""

    def __init__(self, path: str) -> None:
        """Opens the file, and locks it for as long as this process lives.

        Raises:
            OSError: it cannot be opened, or another process lives on it.
        """
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._owner = uuid.uuid4().hex
        self._end = 0
        self._regions: dict[int, int] = {}
        """Offset in the file of each tensor, by its address."""
        self._maps: list[mmap.mmap] = []
        """Kept: closing any descriptor of the file would end the lock."""
        self._counts: tuple[int, ...] = ()
        """Slots of each kind of piece, blocks first."""
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def __repr__(self) -> str:
        return f"<SharedCache {self._path}: {self._end} bytes>"

    @property
    def address(self) -> str:
        """Address at which others find the cache after this process has died."""
        return f"{DEAD}{self._path}#{self._owner}"

    def reserve(self, num_blocks: int, *further: int) -> None:
        """Leave room for the table; called once, before there are tensors.

        ``further``: slots of each boundary kind.
        """
        self._counts = num_blocks, *further
        self._map(0, HEADER_BYTES + sum(self._counts) * ENTRY_BYTES)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros, which takes no memory until it is written."""
        import torch

        begin = self._end
        mapped = self._map(begin, max(1, math.prod(shape) * dtype.itemsize))
        if os.environ.get(VARIABLE) != "0":
            with contextlib.suppress(OSError, AttributeError):  # a system that has none
                mapped.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)[: math.prod(shape) * dtype.itemsize]
        self._regions[tensor.data_ptr()] = begin
        return tensor.view(dtype).view(shape)

    def table(self, identity: str, stored: Sequence[torch.Tensor], *further: Sequence[torch.Tensor]) -> Table:
        """An empty table of a cache whose tensors are these.

        ``further``: those of each boundary kind.

        Raises:
            ValueError: there is no room for their header.
        """
        (num_blocks, parts), *others = [
            (count, [(self._regions[each.data_ptr()], each.nbytes // count) for each in tensors])
            for count, tensors in zip(self._counts, [stored, *further], strict=True)
        ]
        memory = memoryview(self._maps[0])
        header = packed(CacheHeader(self._owner, identity, num_blocks, parts, others))
        memory[: len(header)] = header
        return Table(memory[HEADER_BYTES : HEADER_BYTES + sum(self._counts) * ENTRY_BYTES], self._owner)

    def _map(self, begin: int, num_bytes: int) -> mmap.mmap:
        os.ftruncate(self._file, begin + num_bytes)
        self._maps.append(mmap.mmap(self._file, num_bytes, offset=begin))
        self._end = -(-(begin + num_bytes) // HUGE) * HUGE
        return self._maps[-1]


def release(path: str) -> None:
    """Give the memory of a dead instance back; who reads it finds that it ends.

    Raises:
        OSError: it cannot be reached, or its owner lives.
    """
    if not is_cache(path):
        return
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, 0)
    finally:
        os.close(file)


def is_cache(path: str) -> bool:
    """Whether a path leads to memory of a cache, and to no other file."""
    try:
        return os.readlink(path).startswith(f"/memfd:{FILE_NAME}")
    except OSError:
        return False
