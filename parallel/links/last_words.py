"""Last words between the members of a group, and what their silence means (pure).

Each pair of members has a control connection, on which nothing ever comes but one word: why a member leaves.
A connection that ends without one has lost its member.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping

from parallel.links.errors import Evidence

Blame = tuple[str, int | None, Evidence]
"""Blame for a broken group: reason, rank at fault, and the evidence."""

CLOSED, ABORTED = 1, 2
"""Wire words on a control connection: closed normally, or aborted.

Words above: it gave up because of the rank that is 3 less.
"""
WORD_BYTES = 8

_word = struct.Struct("!q")


def word_for(rank: int | None) -> int:
    """Last word of a member that gives up, with the rank that it blames."""
    return ABORTED if rank is None else ABORTED + 1 + rank


def encoded(word: int) -> bytes:
    return _word.pack(word)


class LastWords:
    """Last words that one member has received, and the blame that follows from them.

    What breaks the group is returned as it happens.
    """

    def __init__(self, size: int, addresses: Mapping[int, str] | None = None) -> None:
        """``addresses``: both of the connection to each rank, in words."""
        self._size = size
        self._addresses = addresses or {}
        self._content: dict[int, bytes] = {}
        self.closed: set[int] = set()
        """Ranks that have made their last call."""

    def hear(self, peer: int, content: bytes) -> Blame | None:
        """Take in bytes from a member's control connection; words may arrive in pieces."""
        content = self._content[peer] = self._content.get(peer, b"") + content[: WORD_BYTES + 1]
        if len(content) < WORD_BYTES:
            return None
        word = _word.unpack(content[:WORD_BYTES])[0]
        if len(content) > WORD_BYTES or not CLOSED <= word <= ABORTED + self._size:
            self._content[peer] = content[: WORD_BYTES + 1]
            return f"rank {peer} sends what is no last word", peer, "closed"
        if word == CLOSED:
            self.closed.add(peer)
            return None
        if word == ABORTED:
            return f"rank {peer} has aborted", None, "closed"
        blamed = word - ABORTED - 1
        return f"rank {peer} has given up because of rank {blamed}", blamed, "closed"

    def exit(self, peer: int) -> Blame | None:
        """Record that a member's process ended, after its last word was read."""
        return None if peer in self.closed else (f"rank {peer} has died", peer, "exited")

    def end(self, peer: int, error: int = 0, *, has_exited: bool = False) -> Blame | None:
        """Record the end of a member's control connection; ``error``: errno or 0."""
        if has_exited or peer in self.closed:
            return self.exit(peer)
        return broken(peer, error, self._addresses.get(peer, "")), peer, "closed"

    def lose(self, peer: int, error: int) -> Blame:
        """Record the end of a tensor connection that nothing else explains."""
        if peer in self.closed:
            return f"rank {peer} has closed its end", peer, "closed"
        return broken(peer, error, self._addresses.get(peer, "")), peer, "closed"


def broken(peer: int, error: int, addresses: str = "") -> str:
    """Message for a connection that broke with this errno, or closed (0)."""
    between = f" ({addresses})" if addresses else ""
    return f"the connection to rank {peer}{between} broke" + (f" ({os.strerror(error)})" if error else "")
