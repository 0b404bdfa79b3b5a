"""Choice of the blocks that are written to files (pure; time is an argument).

Every full block is written once it is computed. A block that waited until it is evicted would have to be
copied by the step that takes its room. Events in, decisions out. Blocks are held while they are written, a
few at a time. Those that wait for their turn are only names: what the cache drops before is not written.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from engine.pieces.pool import BlockHash

MOST_PENDING = 65_536
"""Blocks that wait to be written; later ones are left out."""
PAUSE = 30.0
"""Seconds without a try after a block could not be written."""


@dataclass(frozen=True)
class Writing:
    """A block to hold, and to write to a file."""

    name: BlockHash
    block: int


class WriteBehind:
    """Blocks that wait to be written, and those that are being written.

    An :class:`engine.pieces.pool.Observer` of the cache.
    """

    def __init__(self, kept: Container[BlockHash], window: int, most_pending: int = MOST_PENDING) -> None:
        """``kept``: names of blocks in files. ``window``: most blocks held at once."""
        self._kept = kept
        self._window = window
        self._most_pending = most_pending
        self._pending: dict[BlockHash, None] = {}
        self._writing: dict[BlockHash, int] = {}
        self._paused_until = 0.0
        self.num_skipped = 0
        """Blocks not written: evicted before their turn, too many, or while the disk was full."""
        self.num_failed = 0

    def __repr__(self) -> str:
        return f"<WriteBehind {len(self._pending)} pending, {len(self._writing)} being written>"

    def __len__(self) -> int:
        """Blocks that wait for their turn."""
        return len(self._pending)

    @property
    def num_held(self) -> int:
        return len(self._writing)

    def stored(self, block_hash: BlockHash) -> None:
        """Note a new block in the cache, perhaps not yet computed."""
        if block_hash in self._kept or block_hash in self._writing:
            return
        if len(self._pending) >= self._most_pending:
            self.num_skipped += 1
        else:
            self._pending[block_hash] = None

    def dropped(self, block_hash: BlockHash) -> None:
        """Note that a block was evicted, or may hold wrong content."""
        if block_hash in self._pending:
            del self._pending[block_hash]
            self.num_skipped += 1

    def due(self, now: float, block_of: Callable[[BlockHash], int | None]) -> list[Writing]:
        """Blocks to write now, in the order in which they were named.

        ``block_of`` finds a block that is computed; None: it is not yet.
        """
        if now < self._paused_until:
            return []
        found: list[Writing] = []
        for name in self._pending:
            if len(self._writing) + len(found) >= self._window:
                break
            if name in self._kept:  # another instance wrote it
                found.append(Writing(name, -1))
            elif (block := block_of(name)) is not None:
                found.append(Writing(name, block))
            else:
                break  # those behind it are of the same step, or of a later one
        for each in found:
            del self._pending[each.name]
        found = [each for each in found if each.block >= 0]
        self._writing |= {each.name: each.block for each in found}
        return found

    def ended(self, name: BlockHash, now: float, *, is_written: bool) -> int | None:
        """The writing of a block is over; returns the block, which is held no longer."""
        if not is_written:
            self.num_failed += 1
            self.num_skipped += len(self._pending)
            self._pending.clear()
            self._paused_until = now + PAUSE
        return self._writing.pop(name, None)

    def clear(self) -> None:
        """Drop all waiting blocks, since all tiers are cleared."""
        self._pending.clear()

    def stop(self) -> None:
        """Drop all waiting blocks and accept no more."""
        self._pending.clear()
        self._most_pending = 0
