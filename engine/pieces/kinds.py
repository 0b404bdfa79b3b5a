"""Kinds of named pieces that the state of a context is made of (pure).

Keys and values are blocks: a context needs all of them. Of a *boundary kind* it needs one piece, that at its
end: a recurrent state after so many tokens. Such a piece exists at multiples of a constant number of tokens,
its grid. Only the room that computes a piece knows what is inside.

A context's position is named by a chain hash over all tokens before it (:mod:`engine.pieces.pool`).
That is the name of the block that ends there. A boundary piece at the same position has a name of its own,
made of the chain hash, its kind and its grid. So no two kinds share a name, and all
names follow from the tokens.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import msgspec

Name = bytes
"""Name of a piece by its content; the chain hash for keys and values."""
HASH_BYTES = 16
FEWEST_SLOTS = 2
"""Slots of a boundary kind: one to begin from, and one to fill."""


class BoundaryKind(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of which a context needs one piece: that at its end."""

    label: str
    """Word for the kind in names, errors and logs."""
    grid: int
    """Tokens between two positions that can have a piece, whatever chunks are computed."""
    num_bytes: int
    """Bytes of a piece in one worker, with what a request keeps beside it."""
    form: str = ""
    """Digest of a piece's shapes and data types: part of the cache's identity."""

    def name(self, chain: Name) -> Name:
        """Name of the piece at the position of a chain hash."""
        digest = hashlib.blake2b(chain, digest_size=HASH_BYTES, person=b"boundary")
        digest.update(f"{self.label}/{self.grid}".encode())
        return digest.digest()


class BoundarySlots(msgspec.Struct, frozen=True):
    """A boundary kind of one cache, and the number of its slots."""

    kind: BoundaryKind
    count: int


class PieceKinds:
    """Kinds of one cache, whose slots have one numbering: blocks first, then each boundary kind."""

    def __init__(self, num_blocks: int, boundaries: Sequence[BoundarySlots], block_size: int) -> None:
        """Raises ValueError where a grid does not fit the blocks, or slots are too few."""
        self.boundaries = tuple(each.kind for each in boundaries)
        self.ends = [num_blocks]
        """Number behind the last slot of each kind."""
        for each in boundaries:
            label, grid = each.kind.label, each.kind.grid
            if each.count < FEWEST_SLOTS:
                raise ValueError(f"a cache needs {FEWEST_SLOTS} slots for {label}, not {each.count}")
            if grid % block_size:
                raise ValueError(
                    f"{label} has a grid of {grid} tokens, no multiple of the {block_size} tokens of a "
                    f"block: give --block-size {math.gcd(grid, block_size)}"
                )
            self.ends.append(self.ends[-1] + each.count)
        self.step = math.lcm(*(kind.grid for kind in self.boundaries)) if boundaries else 0
        """Tokens between two positions that have pieces of all boundary kinds; 0 without such kinds."""
        self._links = self.step // block_size
        """Blocks between two of those positions."""

    def __repr__(self) -> str:
        return f"<PieceKinds {self.ends[0]} blocks, {[kind.label for kind in self.boundaries]}>"

    @property
    def num_slots(self) -> int:
        return self.ends[-1]

    def slots_of(self, kind: int) -> range:
        """Slots of a kind: 0 for blocks, then the boundary kinds."""
        return range(self.ends[kind - 1] if kind else 0, self.ends[kind])

    def boundary_names(self, chain: Name) -> list[Name]:
        """Names of the boundary pieces at the position of a chain hash."""
        return [kind.name(chain) for kind in self.boundaries]

    def usable(self, chain: Sequence[Name], has: Callable[[Name], object]) -> int:
        """Number of leading blocks that a context can go on behind.

        ``has`` knows them all, and the boundary pieces behind the last one. ``chain`` begins with the
        context, or behind a position that was usable.
        """
        known = next((index for index, name in enumerate(chain) if not has(name)), len(chain))
        return self.usable_of(chain, known, has)

    def usable_of(self, chain: Sequence[Name], known: int, has: Callable[[Name], object]) -> int:
        """The same, where the first ``known`` blocks are there."""
        if not self._links:
            return known
        for count in range(known // self._links * self._links, 0, -self._links):
            if all(has(name) for name in self.boundary_names(chain[count - 1])):
                return count
        return 0

    def placed(
        self, chain: Sequence[Name], blocks: Sequence[int], boundary: Sequence[int]
    ) -> tuple[list[Name], list[int]]:
        """Names of a usable context's pieces, and the slots that they go to.

        ``blocks``: room for its blocks, or for more. ``boundary``: slots for the pieces behind the last
        block, whichever that is.
        """
        slots = list(blocks[: len(chain)])
        return self.names_behind(chain), [*slots, *boundary] if chain else slots

    def names_of(self, chain: Sequence[Name], num_pieces: int) -> list[Name]:
        """Names of so many pieces that make a usable context of the first blocks."""
        return self.names_behind(chain[: max(0, num_pieces - len(self.boundaries))])

    def names_behind(self, chain: Sequence[Name]) -> list[Name]:
        """Names of a usable context's pieces: blocks, then the boundary pieces behind them."""
        return [*chain, *self.boundary_names(chain[-1])] if chain and self.boundaries else list(chain)


BLOCKS_ONLY = PieceKinds(1, (), 1)
"""Kinds of a cache of keys and values alone, where its size does not matter."""


def kept_positions(num_tokens: int, step: int, parted_at: int = 0) -> list[int]:
    """Positions of a prompt whose boundary pieces are kept for others, ascending (pure).

    They are its end, rounded down, and distances back from there that double. So is the place where it parts
    from a known context (``parted_at``), since others will part there, too.
    """
    end = num_tokens // step * step
    found = {end, parted_at // step * step}
    back = step
    while back < end:
        found.add(end - back)
        back *= 2
    return sorted(found - {0})
