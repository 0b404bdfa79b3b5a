"""A cache of keys and values and of toy states, in memory of this process."""

from __future__ import annotations

import numpy as np

from engine.pieces.kinds import BoundarySlots, PieceKinds
from engine.pieces.pool import PiecePool, hash_block
from engine.transfers.block_memory import BlockMemory
from engine.transfers.piece_memory import PieceMemory
from tests.engine.pieces.toy import toy_kind

BLOCK_SIZE, GRID = 4, 8
NUM_BLOCKS, NUM_STATES = 24, 6
WIDTHS = 96, 32
"""Bytes of a block in each tensor."""
STATE_WIDTHS = 200, 8, 16
"""Bytes of a state in each tensor."""
SLOTS = [BoundarySlots(toy_kind(GRID), NUM_STATES)]
KINDS = PieceKinds(NUM_BLOCKS, SLOTS, BLOCK_SIZE)


def chain(count: int, seed: int = 0) -> list[bytes]:
    """Chain hashes of a prompt's blocks."""
    found: list[bytes] = []
    for number in range(count):
        found.append(hash_block(found[-1] if found else None, [seed * 1000 + number] * BLOCK_SIZE))
    return found


class ToyCache:
    """Blocks and states with random bytes, and who has their names."""

    def __init__(self, seed: int = 1) -> None:
        self._draw = np.random.default_rng(seed)
        self.blocks = [self._random(NUM_BLOCKS, width) for width in WIDTHS]
        self.states = [self._random(NUM_STATES, width) for width in STATE_WIDTHS]
        self.memory = PieceMemory([BlockMemory(self.blocks), BlockMemory(self.states)])
        self.pool = PiecePool(NUM_BLOCKS, boundaries=SLOTS, block_size=BLOCK_SIZE)

    def _random(self, count: int, width: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint8]]:
        return self._draw.integers(0, 255, (count, width), dtype=np.uint8)

    def compute(self, links: list[bytes], positions: list[int]) -> None:
        """Have the blocks of a context, and states behind so many of them."""
        blocks = self.pool.take(len(links))
        assert blocks is not None
        for block, name in zip(blocks, links, strict=True):
            self.pool.name(block, name)
        for count in positions:
            slots = self.pool.take_boundary()
            assert slots is not None
            for slot, name in zip(slots, KINDS.boundary_names(links[count - 1]), strict=True):
                self.pool.name(slot, name)
            self.pool.release(slots)
        self.pool.release(blocks)

    def bytes_of(self, name: bytes) -> bytes:
        """What a named piece holds."""
        slot = self.pool.slot_of(name)
        assert slot is not None
        return self.bytes_in(slot)

    def bytes_in(self, slot: int) -> bytes:
        return b"".join(bytes(part) for part in self.memory.parts_of(slot))
