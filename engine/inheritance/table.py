"""Names of the pieces of a cache, to be read after its owner's death (pure).

The table lies beside the pieces, in memory that outlives its owner. An entry is made once a piece, such as a
full block, is computed, and is void before its slot may be written again. Owners are killed between any two
instructions, and what they stored before that is there. So it holds at each of these points:

- An entry has a checksum over the name, the slot and a number that only this owner has. It is cleared before
  anything else of the entry changes, and is stored last. So an entry that is not whole counts for nothing.
- The step loop stores it after the step that filled the slot has ended. So an entry that counts has a piece
  that is whole.
- The index of names drops a name before it gives the slot out (:class:`Publisher`). So no entry counts whose
  slot was filled anew.

Nobody reads the table while its owner lives (:mod:`engine.inheritance.heir`): then nothing changes any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import msgspec

from engine.pieces.kinds import HASH_BYTES
from engine.pieces.pool import BlockHash, PiecePool

MAGIC = b"LSKVMEM1"
ENTRY_BYTES = 32
"""Checksum, name, and bytes that are not used."""
CHECK_BYTES = 8
DIGEST_BYTES = 16
HEADER_BYTES = 1 << 16
"""Bytes before the table."""
NOTHING = bytes(CHECK_BYTES)


class CacheHeader(msgspec.Struct, frozen=True, omit_defaults=True):
    """Header of a cache's memory: layout, identity and owner."""

    owner: str
    """A random text of this owner."""
    identity: str
    """The cache's identity (:mod:`engine.transfers.identity`)."""
    num_blocks: int
    parts: list[tuple[int, int]]
    """Where each tensor begins, and the bytes of a block in it."""
    further: list[tuple[int, list[tuple[int, int]]]] = []
    """The same of each boundary kind: its number of slots, and its tensors."""

    @property
    def num_slots(self) -> int:
        """Slots of all kinds, each of which has an entry in the table."""
        return self.num_blocks + sum(count for count, _ in self.further)

    def parts_of(self, slot: int) -> list[tuple[int, int]]:
        """Offset in the file and bytes of each part of the piece in a slot."""
        index = slot
        for count, parts in [(self.num_blocks, self.parts), *self.further]:
            if index < count:
                return [(begin + index * size, size) for begin, size in parts]
            index -= count
        raise IndexError(f"slot {slot} of {self.num_slots}")


def packed(header: CacheHeader) -> bytes:
    """The first bytes of the memory.

    Raises:
        ValueError: there is no room for it.
    """
    text = msgspec.json.encode(header)
    found = MAGIC + len(text).to_bytes(4, "little") + _digest(text, DIGEST_BYTES) + text
    if len(found) > HEADER_BYTES:
        raise ValueError(f"{len(header.parts)} tensors are too many")
    return found


def unpacked(data: bytes) -> CacheHeader | None:
    """The header that these bytes begin with; None if they hold none that is whole."""
    if data[:8] != MAGIC:
        return None
    text = data[28 : 28 + int.from_bytes(data[8:12], "little")]
    if _digest(text, DIGEST_BYTES) != data[12:28]:
        return None
    try:
        return msgspec.json.decode(text, type=CacheHeader)
    except msgspec.DecodeError:
        return None


class Table:
    """Entries of all slots of a cache, written where they are."""

    def __init__(self, memory: memoryview, owner: str) -> None:
        """``memory``: ``ENTRY_BYTES`` of each slot."""
        self._memory = memory
        self._owner = owner.encode()

    def __repr__(self) -> str:
        return f"<Table of {len(self._memory) // ENTRY_BYTES} slots>"

    def set(self, block: int, name: BlockHash) -> None:
        """Enter a slot's piece as complete under its name."""
        begin = block * ENTRY_BYTES
        self.clear(block)
        self._memory[begin + CHECK_BYTES : begin + CHECK_BYTES + HASH_BYTES] = name
        self._memory[begin : begin + CHECK_BYTES] = _check(self._owner, block, name)

    def clear(self, block: int) -> None:
        """Remove a slot's entry before it is filled again."""
        self._memory[block * ENTRY_BYTES : block * ENTRY_BYTES + CHECK_BYTES] = NOTHING

    def read(self) -> dict[BlockHash, int]:
        """Complete pieces of the table: slot by name."""
        found: dict[BlockHash, int] = {}
        for block in range(len(self._memory) // ENTRY_BYTES):
            entry = bytes(self._memory[block * ENTRY_BYTES : (block + 1) * ENTRY_BYTES])
            check, name = entry[:CHECK_BYTES], entry[CHECK_BYTES : CHECK_BYTES + HASH_BYTES]
            if check != NOTHING and check == _check(self._owner, block, name):
                found[name] = block
        return found


class Publisher:
    """Keeps the table of a cache: an :class:`engine.pieces.pool.Observer` of it."""

    def __init__(self, pool: PiecePool, table: Table) -> None:
        self._pool = pool
        self._table = table
        self._pending: dict[BlockHash, None] = {}
        self._entries: dict[BlockHash, int] = {}

    def __repr__(self) -> str:
        return f"<Publisher of {len(self._entries)} pieces, {len(self._pending)} pending>"

    def stored(self, block_hash: BlockHash) -> None:
        """Note a new piece in the cache, perhaps not yet computed."""
        self._pending[block_hash] = None

    def dropped(self, block_hash: BlockHash) -> None:
        """Note that a piece is evicted, or may hold wrong content."""
        self._pending.pop(block_hash, None)
        block = self._entries.pop(block_hash, None)
        if block is not None:
            self._table.clear(block)

    def turn(self, being_filled: Callable[[], set[int]]) -> None:
        """Make entries of pieces that are computed by now."""
        if not self._pending:
            return
        filled = being_filled()
        waiting: dict[BlockHash, None] = {}
        for name in self._pending:
            slot = self._pool.slot_of(name)
            if slot is not None and slot not in filled:
                self._table.set(slot, name)
                self._entries[name] = slot
            elif slot is not None:
                waiting[name] = None
        self._pending = waiting


def _check(owner: bytes, block: int, name: BlockHash) -> bytes:
    return _digest(owner + block.to_bytes(8, "little") + name, CHECK_BYTES)


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()
