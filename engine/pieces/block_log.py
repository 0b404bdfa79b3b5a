"""Log of stored and dropped prefix cache blocks, which instances send to routers (pure).

Every change has a number. A router gets all changes since those that it has. When the log does not keep them
any more, the router gets everything that is known now. Routers compute the same names from a prompt's tokens
(:func:`engine.pieces.pool.prefix_names`) and so know how much of a prompt an instance has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from engine.messages import BlockEvents
from engine.pieces.pool import NAME_BYTES, BlockHash

MAX_EVENTS = 65_536
"""Changes that the log keeps; a router that is further behind gets everything anew."""


def split_names(names: bytes) -> Iterable[bytes]:
    """The single names of ``BlockEvents.stored`` or ``dropped``.

    Bytes at the end that make no whole name are left out.
    """
    whole = len(names) - len(names) % NAME_BYTES
    return (names[start : start + NAME_BYTES] for start in range(0, whole, NAME_BYTES))


class BlockLog:
    """The newest changes of the prefix cache, numbered from 0."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: deque[tuple[bool, BlockHash]] = deque(maxlen=max_events)
        self._count = 0

    def __repr__(self) -> str:
        return f"<BlockLog {self._count} changes, {len(self._events)} kept>"

    @property
    def next(self) -> int:
        """The number of the next change."""
        return self._count

    def stored(self, block_hash: BlockHash) -> None:
        self._events.append((True, block_hash))
        self._count += 1

    def dropped(self, block_hash: BlockHash) -> None:
        self._events.append((False, block_hash))
        self._count += 1

    def since(self, number: int | None, known: Iterable[BlockHash]) -> BlockEvents | None:
        """Events for a router that has all changes before ``number``, or none at all (None).

        ``known`` are all blocks that the prefix index has now. Returns None if nothing has changed.
        """
        if number == self._count:
            return None
        behind = None if number is None else self._count - number
        if behind is None or behind < 0 or behind > len(self._events):
            return BlockEvents(self._count, self._count, True, b"".join(each[:NAME_BYTES] for each in known))
        last: dict[BlockHash, bool] = {}
        for is_stored, block_hash in islice(self._events, len(self._events) - behind, None):
            last[block_hash] = is_stored
        return BlockEvents(
            first=self._count - behind,
            next=self._count,
            stored=b"".join(each[:NAME_BYTES] for each, is_stored in last.items() if is_stored),
            dropped=b"".join(each[:NAME_BYTES] for each, is_stored in last.items() if not is_stored),
        )
