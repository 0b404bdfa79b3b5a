"""Which positions of requests a drafting model has in its own cache (no torch).

Its cache has the blocks of the served model's, under the same numbers. Blocks come without it from elsewhere,
and are given to others while it rests. So each block is stamped with a digest of all tokens up to its end,
and counts only for a request whose tokens have the same one. Positions behind a request's last block, which
nobody has given to it yet, are in blocks of its slot.
"""

from __future__ import annotations

import numpy as np

from engine.attention.base import Int32s, Int64s

EMPTY = 0
"""Stamp of a block without a context, or with a part of one."""


class DraftPositions:
    """Positions in the cache of a drafting model, by slot and block."""

    def __init__(self, num_blocks: int, block_size: int, most_proposed: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._per_slot = -(-most_proposed // block_size)
        """Blocks of a slot for positions behind its request's own."""
        self._stamps = [EMPTY] * num_blocks
        self._computed: dict[int, int] = {}
        """Positions whose keys and values are there, by slot."""
        self._first: dict[int, int] = {}
        """Position at which an incomplete context begins, by slot."""
        self._digests: dict[int, list[int]] = {}
        """Digest of the tokens up to the end of each full block, by slot."""

    def __repr__(self) -> str:
        return f"<DraftPositions of {len(self._computed)} requests in {self._num_blocks} blocks>"

    def num_blocks(self, slots: int) -> int:
        """Blocks of the cache for so many slots."""
        return self._num_blocks + slots * self._per_slot

    def forget(self, slot: int) -> None:
        """A slot has another request, or the same one anew."""
        self._computed.pop(slot, None)
        self._first.pop(slot, None)
        self._digests.pop(slot, None)

    def forget_blocks(self) -> None:
        """No block counts for requests to come: the weights that filled them are gone."""
        self._stamps = [EMPTY] * self._num_blocks

    def computed(self, slot: int, tokens: Int64s, table: Int32s) -> int:
        """Positions of a request's ``tokens`` that are there; ``table``: its blocks."""
        found = self._computed.get(slot)
        if found is None:
            full = min(len(tokens) // self._block_size, len(table))
            digests = self._digests_up_to(slot, tokens, full)
            found = 0
            while found < full and self._stamps[table[found]] == digests[found]:
                found += 1
            self._computed[slot] = found = found * self._block_size
        return found

    def first(self, slot: int, tokens: Int64s, table: Int32s, start: int) -> int:
        """First position of a context whose keys before ``start`` are lost.

        0 if that is there. Keys of such a context count positions from there, so its blocks get no stamps.
        """
        if self.computed(slot, tokens, table) < start:
            self._first[slot] = -(-start // self._block_size) * self._block_size
        return self._first.get(slot, 0)

    def table(self, slot: int, table: Int32s, length: int) -> Int32s:
        """Blocks of the first ``length`` positions: the request's ``table``, then those of its slot."""
        wanted = -(-length // self._block_size)
        behind = self._num_blocks + slot * self._per_slot
        own = np.arange(behind, behind + max(0, wanted - len(table)), dtype=np.int32)
        return np.concatenate([table, own])[:wanted]

    def fill(self, slot: int, tokens: Int64s, table: Int32s, start: int) -> None:
        """A pass computes all ``tokens`` from ``start`` on, of which those in the ``table`` stay.

        Its other requests may count on them already, and must not store them once more: a pass reads what it
        stores.
        """
        end = min(len(tokens), len(table) * self._block_size)
        full = end // self._block_size
        digests, first = self._digests_up_to(slot, tokens, full), self._first.get(slot, 0)
        for index in range(start // self._block_size, len(table)):
            self._stamps[table[index]] = digests[index] if index < full and not first else EMPTY
        self._computed[slot] = end

    def _digests_up_to(self, slot: int, tokens: Int64s, full: int) -> list[int]:
        digests, size = self._digests.setdefault(slot, []), self._block_size
        for index in range(len(digests), full):
            before = digests[-1] if digests else EMPTY
            digests.append(hash((before, tokens[index * size : (index + 1) * size].tobytes())) or 1)
        return digests
