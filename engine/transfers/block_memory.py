"""The bytes of a KV cache, block by block.

What they mean is the cache's own matter: blocks are copied whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.transfers.checksums import Parts

POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux; :mod:`mmap` does not name it."""
Bytes = npt.NDArray[np.uint8]


class CacheGone(OSError):
    """Error: blocks of a cache are out of reach; its process has ended or hangs."""


class CacheMemory(Protocol):
    """The blocks of a cache, wherever they lie.

    Any thread may use any block that the step loop lets it. All but :meth:`prepare` raise
    :class:`CacheGone`.
    """

    num_blocks: int

    @property
    def layout(self) -> tuple[int, ...]:
        """Bytes of a piece in each tensor, kind after kind."""
        ...

    @property
    def block_layout(self) -> tuple[int, ...]:
        """The same of blocks alone."""
        ...

    @property
    def shards(self) -> tuple[int, ...]:
        """Tensors of each worker, by stage, then rank; empty without workers."""
        ...

    @property
    def block_bytes(self) -> int: ...

    def bytes_of(self, slot: int) -> int:
        """Bytes of the piece in a slot, which is a block's but for :class:`.PieceMemory`."""
        ...

    def read(self, blocks: Sequence[int]) -> Bytes:
        """A copy of some blocks: [blocks, bytes]."""
        ...

    def parts_of(self, block: int) -> list[memoryview]:
        """The bytes of a block, in the order of :meth:`read`; to be read only."""
        ...

    def filling(self, block: int) -> AbstractContextManager[list[memoryview]]:
        """Room for the bytes of a block; the cache has them once the context ends."""
        ...

    def prepare(self, num_blocks: int, first: int = 0) -> bool:
        """Have the system give the pages of some blocks now; their content stays."""
        ...

    def write(self, block: int, data: memoryview) -> None:
        """Put bytes that :meth:`read` gave into a block."""
        ...


class CopiedMemory(ABC):
    """Base of caches out of reach of this process, whose blocks are copied whole."""

    num_blocks: int

    @property
    @abstractmethod
    def layout(self) -> tuple[int, ...]:
        """See :class:`CacheMemory`."""

    @property
    def block_layout(self) -> tuple[int, ...]:
        """See :class:`CacheMemory`."""
        return self.layout

    @property
    def block_bytes(self) -> int:
        return sum(self.layout)

    def bytes_of(self, slot: int) -> int:
        """See :class:`CacheMemory`."""
        return self.block_bytes

    @abstractmethod
    def read(self, blocks: Sequence[int]) -> Bytes:
        """See :class:`CacheMemory`."""

    @abstractmethod
    def write(self, block: int, data: memoryview) -> None:
        """See :class:`CacheMemory`."""

    def parts_of(self, block: int) -> list[memoryview]:
        """See :class:`CacheMemory`. A copy."""
        return [self.read([block])[0].data]

    @contextlib.contextmanager
    def filling(self, block: int) -> Iterator[list[memoryview]]:
        """See :class:`CacheMemory`. The room is here, and copied at the end."""
        room = np.empty(self.block_bytes, dtype=np.uint8)
        yield [room.data]
        self.write(block, room.data)

    def prepare(self, num_blocks: int, first: int = 0) -> bool:
        """See :class:`CacheMemory`. Only where the blocks lie could that be done."""
        return False


class BlockMemory:
    """Tensors of a cache in this process, each cut into as many equal blocks."""

    shards: tuple[int, ...] = ()

    def __init__(self, parts: Sequence[Bytes], num_blocks: int | None = None) -> None:
        """``parts``: [blocks, bytes of a block] each, sharing the memory of the cache.

        ``num_blocks``: needed where there are no parts, as in a stage without such layers.
        """
        self.num_blocks = len(parts[0]) if num_blocks is None else num_blocks
        assert {len(part) for part in parts} <= {self.num_blocks}, "all tensors have the same blocks"
        self._parts = list(parts)
        self._begins = np.array([part.ctypes.data for part in parts], dtype=np.int64)
        self._steps = np.array([part.strides[0] for part in parts], dtype=np.int64)
        self._sizes = np.array(self.layout, dtype=np.int64)

    def __repr__(self) -> str:
        return f"<BlockMemory {self.num_blocks} blocks of {self.block_bytes} bytes>"

    @property
    def layout(self) -> tuple[int, ...]:
        """Bytes of a block in each tensor."""
        return tuple(part.shape[1] for part in self._parts)

    block_layout = layout

    @property
    def block_bytes(self) -> int:
        return sum(self.layout)

    def bytes_of(self, slot: int) -> int:
        """Bytes of a block, whichever it is."""
        return self.block_bytes

    def read(self, blocks: Sequence[int]) -> Bytes:
        """A copy of some blocks: [blocks, bytes]."""
        found = np.empty((len(blocks), self.block_bytes), dtype=np.uint8)
        for row, block in zip(found, blocks, strict=True):
            begin = 0
            for part in self._parts:
                end = begin + part.shape[1]
                row[begin:end] = part[block]
                begin = end
        return found

    def parts_of(self, block: int) -> Parts:
        """The bytes of a block where they are, in the order of :meth:`read`.

        What is written there is in the cache.
        """
        spans = np.stack([self._begins + block * self._steps, self._sizes], axis=1)
        return Parts([memoryview(part[block]) for part in self._parts], spans)

    @contextlib.contextmanager
    def filling(self, block: int) -> Iterator[list[memoryview]]:
        """Room for the bytes of a block, in the cache itself."""
        yield self.parts_of(block)

    @property
    def places(self) -> list[tuple[int, int]]:
        """Address of each tensor, and the bytes of a block in it."""
        return [(part.ctypes.data, part.shape[1]) for part in self._parts]

    def prepare(self, num_blocks: int, first: int = 0) -> bool:
        """Have the system give the pages of some blocks now; their content stays.

        Getting a page costs more than filling it from a file; without Linux, or before 5.14, that is paid
        later, and this returns False. Any thread may call this while others read and write.
        """
        if not sys.platform.startswith("linux"):
            return False
        num_blocks = min(num_blocks, self.num_blocks - first)
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for part in self._parts:
            start = part.ctypes.data
            begin = max(start + -start % mmap.PAGESIZE, _whole(start + first * part.shape[1]))
            length = _whole(start + (first + num_blocks) * part.shape[1]) - begin
            if length > 0 and madvise(begin, length, POPULATE_WRITE):
                return False
        return True

    def write(self, block: int, data: memoryview) -> None:
        """Put bytes that :meth:`read` gave into a block."""
        row, begin = np.frombuffer(data, dtype=np.uint8), 0
        assert len(row) == self.block_bytes
        for part in self._parts:
            end = begin + part.shape[1]
            part[block] = row[begin:end]
            begin = end


def _whole(address: int) -> int:
    """Start of the page that an address is in."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE
