"""Names of the blocks of a cache, to be read after its owner's death (pure).

The table lies beside the blocks, in memory that outlives its owner. An entry is made once a block is full and
computed, and is void before the block may be written again. Owners are killed between any two instructions,
and what they stored before that is there. So it holds at each of these points:

- An entry has a checksum over the name, the block and a number that only this owner has. It is cleared before
  anything else of the entry changes, and is stored last. So an entry that is not whole counts for nothing.
- The step loop stores it after the threads that filled the block have told it so. So an entry that counts
  has a block that is whole.
- The prefix index tells that it drops a name before it gives the block out (:class:`Publisher`). So no entry
  counts whose block was begun anew.

Nobody reads the table while its owner lives (:mod:`engine.inheritance.heir`): then nothing changes any more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from engine.scheduling.blocks import HASH_BYTES, BlockHash, BlockPool

MAGIC = b"LSKVMEM1"
ENTRY_BYTES = 32
"""Checksum, name, and bytes that are not used."""
CHECK_BYTES = 8
DIGEST_BYTES = 16
HEADER_BYTES = 1 << 16
"""Bytes before the table."""
NOTHING = bytes(CHECK_BYTES)


class Header(msgspec.Struct, frozen=True):
    """Header of a cache's memory: layout, identity and owner."""

    owner: str
    """A random text of this owner."""
    identity: str
    """The cache's identity (:mod:`engine.transfers.identity`)."""
    num_blocks: int
    parts: list[tuple[int, int]]
    """Where each tensor begins, and the bytes of a block in it."""


def packed(header: Header) -> bytes:
    """The first bytes of the memory.

    Raises:
        ValueError: there is no room for it.
    """
    text = msgspec.json.encode(header)
    found = MAGIC + len(text).to_bytes(4, "little") + _digest(text, DIGEST_BYTES) + text
    if len(found) > HEADER_BYTES:
        raise ValueError(f"{len(header.parts)} tensors are too many")
    return found


def unpacked(data: bytes) -> Header | None:
    """The header that these bytes begin with; None if they hold none that is whole."""
    if data[:8] != MAGIC:
        return None
    text = data[28 : 28 + int.from_bytes(data[8:12], "little")]
    if _digest(text, DIGEST_BYTES) != data[12:28]:
        return None
    try:
        return msgspec.json.decode(text, type=Header)
    except msgspec.DecodeError:
        return None


class Table:
    """Entries of all blocks, written where they are."""

    def __init__(self, memory: memoryview, owner: str) -> None:
        """``memory``: ``ENTRY_BYTES`` of each block."""
        self._memory = memory
        self._owner = owner.encode()

    def __repr__(self) -> str:
        return f"<Table of {len(self._memory) // ENTRY_BYTES} blocks>"

    def set(self, block: int, name: BlockHash) -> None:
        """Enter a block as complete under its name."""
        begin = block * ENTRY_BYTES
        self.clear(block)
        self._memory[begin + CHECK_BYTES : begin + CHECK_BYTES + HASH_BYTES] = name
        self._memory[begin : begin + CHECK_BYTES] = _check(self._owner, block, name)

    def clear(self, block: int) -> None:
        """Remove a block's entry before it is written again."""
        self._memory[block * ENTRY_BYTES : block * ENTRY_BYTES + CHECK_BYTES] = NOTHING

    def read(self) -> dict[BlockHash, int]:
        """Complete blocks of the table: block index by name."""
        found: dict[BlockHash, int] = {}
        for block in range(len(self._memory) // ENTRY_BYTES):
            entry = bytes(self._memory[block * ENTRY_BYTES : (block + 1) * ENTRY_BYTES])
            check, name = entry[:CHECK_BYTES], entry[CHECK_BYTES : CHECK_BYTES + HASH_BYTES]
            if check != NOTHING and check == _check(self._owner, block, name):
                found[name] = block
        return found


class Publisher:
    """Keeps the table of a cache: an :class:`engine.scheduling.blocks.Observer` of it."""

    def __init__(self, pool: BlockPool, table: Table) -> None:
        self._pool = pool
        self._table = table
        self._pending: dict[BlockHash, None] = {}
        self._entries: dict[BlockHash, int] = {}

    def __repr__(self) -> str:
        return f"<Publisher of {len(self._entries)} blocks, {len(self._pending)} pending>"

    def stored(self, block_hash: BlockHash) -> None:
        """Note a new block in the cache, perhaps not yet computed."""
        self._pending[block_hash] = None

    def dropped(self, block_hash: BlockHash) -> None:
        """Note that a block is evicted, or may hold wrong content."""
        self._pending.pop(block_hash, None)
        block = self._entries.pop(block_hash, None)
        if block is not None:
            self._table.clear(block)

    def turn(self, being_filled: Callable[[], set[int]]) -> None:
        """Make entries of blocks that are computed by now."""
        if not self._pending:
            return
        filled = being_filled()
        waiting: dict[BlockHash, None] = {}
        for name in self._pending:
            found: Sequence[int] = self._pool.find_prefix([name])
            if found and found[0] not in filled:
                self._table.set(found[0], name)
                self._entries[name] = found[0]
            elif found:
                waiting[name] = None
        self._pending = waiting


def _check(owner: bytes, block: int, name: BlockHash) -> bytes:
    return _digest(owner + block.to_bytes(8, "little") + name, CHECK_BYTES)


def _digest(data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, digest_size=size).digest()
