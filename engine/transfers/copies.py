"""Copies of requests that run elsewhere: their blocks are fetched before they move here (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from engine.pieces.pool import BlockHash, PiecePool
from engine.transfers.lending import Key

MOST_COPIES = 16
"""Copies at once; further ones are answered by what is here."""


class RequestCopies:
    """Copies under way, and those that have ended, by the router and its number."""

    def __init__(self, pool: PiecePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._names: dict[Key, Sequence[BlockHash]] = {}
        self._ended: list[tuple[Key, int, bool]] = []

    def __repr__(self) -> str:
        return f"<RequestCopies: {len(self._names)} under way>"

    def __contains__(self, key: Key) -> bool:
        return key in self._names

    @property
    def are_too_many(self) -> bool:
        """Whether the newest copy is one too many."""
        return len(self._names) > MOST_COPIES

    def begin(self, key: Key, names: Sequence[BlockHash]) -> int:
        """Begin to copy these blocks; returns how many of the first ones are here."""
        self._names[key] = names
        return len(self._pool.find_prefix(names))

    def end(self, key: Key, *, is_taken: bool = False) -> None:
        """End a copy; ``is_taken``: its request is taken over."""
        names = self._names.pop(key)
        self._ended.append((key, len(self._pool.find_prefix(names)) * self._block_size, is_taken))

    def end_all(self) -> None:
        """End all copies: nothing is fetched any more."""
        for key in list(self._names):
            self.end(key)

    def take_ended(self) -> list[tuple[Key, int, bool]]:
        """Copies that have ended.

        Each has the tokens of it that the cache has, and whether its request is taken over.
        """
        found, self._ended = self._ended, []
        return found

    def forget(self, peer: bytes) -> None:
        """Forget the copies of a router that is gone."""
        self._ended = [each for each in self._ended if each[0][0] != peer]
        for key in [key for key in self._names if key[0] == peer]:
            del self._names[key]
