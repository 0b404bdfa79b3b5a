"""Memory of pieces of several kinds, a region for each.

A region is the memory of one kind, in which all pieces have the same size. Slots of all kinds have one
numbering (:class:`engine.pieces.kinds.PieceKinds`). So who copies pieces knows slots and sizes only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate

from engine.transfers.block_memory import Bytes, CacheMemory


class PieceMemory:
    """Implements :class:`engine.transfers.block_memory.CacheMemory` over one region for each kind."""

    def __init__(self, regions: Sequence[CacheMemory]) -> None:
        """``regions``: that of blocks, then those of the boundary kinds."""
        self._regions = list(regions)
        self._begins = [0, *accumulate(region.num_blocks for region in regions)]
        self.num_blocks = regions[0].num_blocks

    def __repr__(self) -> str:
        return f"<PieceMemory of {self._regions}>"

    @property
    def layout(self) -> tuple[int, ...]:
        """Bytes of a piece in each tensor, kind after kind."""
        return tuple(size for region in self._regions for size in region.layout)

    @property
    def block_layout(self) -> tuple[int, ...]:
        """See :class:`.CacheMemory`."""
        return self._regions[0].layout

    @property
    def shards(self) -> tuple[int, ...]:
        """Tensors of each worker, kind after kind."""
        return tuple(count for region in self._regions for count in region.shards)

    @property
    def block_bytes(self) -> int:
        return self._regions[0].block_bytes

    def bytes_of(self, slot: int) -> int:
        """Bytes of the piece in a slot."""
        return self._at(slot)[0].block_bytes

    def read(self, blocks: Sequence[int]) -> Bytes:
        """See :class:`.CacheMemory`; the slots are of one kind."""
        region, first = self._at(blocks[0])
        return region.read([slot - blocks[0] + first for slot in blocks])

    def parts_of(self, block: int) -> list[memoryview]:
        """See :class:`.CacheMemory`."""
        region, index = self._at(block)
        return region.parts_of(index)

    def filling(self, block: int) -> AbstractContextManager[list[memoryview]]:
        """See :class:`.CacheMemory`."""
        region, index = self._at(block)
        return region.filling(index)

    def prepare(self, num_blocks: int, first: int = 0) -> bool:
        """See :class:`.CacheMemory`; of blocks, whose number is the largest."""
        return self._regions[0].prepare(num_blocks, first)

    def write(self, block: int, data: memoryview) -> None:
        """See :class:`.CacheMemory`."""
        region, index = self._at(block)
        region.write(index, data)

    def _at(self, slot: int) -> tuple[CacheMemory, int]:
        """The region of a slot, and its index there."""
        kind = bisect_right(self._begins, slot) - 1
        return self._regions[kind], slot - self._begins[kind]
