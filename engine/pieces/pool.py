"""Slots of a cache's pieces: reference counts and the index of names (pure).

A block holds the keys and values of ``block_size`` tokens. A full block is named by a hash over its
tokens, the hash of the block before it and the request's cache salt, so equal hashes mean equal
contexts from the first token on (the scheme of vLLM's automatic prefix caching). Pieces of other kinds
(:mod:`engine.pieces.kinds`) lie in slots behind the blocks, and are held, named and evicted alike. Freed
slots keep their content until they are needed again, oldest first.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.pieces.kinds import HASH_BYTES, BoundarySlots, PieceKinds
from engine.prompt_images import PromptImage, names_between

BlockHash = bytes

NAME_BYTES = 8
"""Bytes of a block hash that routers get.

Routers only choose an instance by it, so a collision costs some time at worst.
"""


TAG = "\udcff"
"""Mark of a root beyond a salt: a byte that no text has in UTF-8."""


def rooted(salt: str, adapter: str) -> str:
    """Salt of the blocks of a request with an adapter, which no other request has.

    ``adapter``: digest of the adapter; empty for none.
    """
    return f"{TAG}adapter {adapter}{TAG}{salt}" if adapter else salt


def root_of(salt: str, weights: str = "") -> bytes:
    """Beginning of a context's names: the request's salt, and the version of the weights.

    ``weights``: digest of a version that took the place of those that were loaded; empty for those. No salt
    of a client begins as a version does: it is UTF-8.
    """
    own = salt.encode("utf-8", "surrogateescape")
    return b"\xff" + weights.encode() + b"\0" + own if weights else own


def hash_block(
    parent: BlockHash | None,
    tokens: Sequence[int],
    salt: str = "",
    weights: str = "",
    images: bytes = b"",
) -> BlockHash:
    """Hash of a full block. ``salt`` keeps requests with different salts apart.

    So does ``weights`` with versions of the weights, and ``images`` with those that begin in the block
    (:func:`engine.prompt_images.names_between`). BLAKE2b with 128 bits: nobody can craft a collision to
    read another request's context.
    """
    digest = _begun(parent or root_of(salt, weights), images)
    digest.update(b"|" if parent else b"#")
    digest.update(array("I", tokens).tobytes())
    return digest.digest()


def _begun(before: bytes, images: bytes) -> hashlib.blake2b:
    """A hash that has taken in what comes before a block's tokens."""
    if not images:
        return hashlib.blake2b(before, digest_size=HASH_BYTES)
    digest = hashlib.blake2b(before, digest_size=HASH_BYTES, person=b"images")  # equal to no name without any
    digest.update(len(images).to_bytes(4, "little") + images)
    return digest


def prefix_names(
    tokens: Sequence[int],
    block_size: int,
    salt: str = "",
    weights: str = "",
    images: Sequence[PromptImage] = (),
) -> list[int]:
    """Names of a prompt's full blocks for routers: ``NAME_BYTES`` of each hash as a number.

    The last token is always computed, so a block that ends with it is left out.
    """
    data = array("I", tokens).tobytes()
    size = block_size * array("I").itemsize
    names, parent, mark = [], root_of(salt, weights), b"#"
    for start in range(0, (len(tokens) - 1) // block_size * size, size):
        at = start // array("I").itemsize
        digest = _begun(parent, names_between(images, at, at + block_size) if images else b"")
        digest.update(mark)
        digest.update(data[start : start + size])
        parent, mark = digest.digest(), b"|"
        names.append(int.from_bytes(parent[:NAME_BYTES], "big"))
    return names


class Observer(Protocol):
    """Receives the names of blocks, or of all pieces, that the index gains or loses."""

    def stored(self, block_hash: BlockHash) -> None: ...
    def dropped(self, block_hash: BlockHash) -> None: ...


class PartialBlocks:
    """Names of blocks that are partly filled, by the tokens that are in them.

    One request can go on in such a block, after nobody held it. No other finds it, no observer hears of it.
    Requests with equal tokens have a block each.
    """

    def __init__(self, references: Sequence[int]) -> None:
        """``references``: holders of each block."""
        self._references = references
        self._name_of: dict[int, BlockHash] = {}
        self._blocks: dict[BlockHash, list[int]] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._name_of

    def name(self, block: int, name: BlockHash) -> None:
        """Name a held block; the first name of its content stays."""
        if block not in self._name_of:
            self._blocks.setdefault(name, []).append(block)
            self._name_of[block] = name

    def find(self, name: BlockHash) -> int | None:
        """A block of this name that nobody holds."""
        return next((block for block in self._blocks.get(name, ()) if self._references[block] == 0), None)

    def clear(self) -> None:
        """Drop all names."""
        self._name_of.clear()
        self._blocks.clear()

    def forget(self, block: int) -> None:
        """Drop the name of a block, if it has one."""
        if (name := self._name_of.pop(block, None)) is not None:
            self._blocks[name].remove(block)
            if not self._blocks[name]:
                del self._blocks[name]


class PiecePool:
    """Slots of each kind with reference counts, least-recently-used free lists and one index of names."""

    def __init__(
        self,
        num_blocks: int,
        *,
        enable_prefix_caching: bool = True,
        observer: Observer | None = None,
        boundaries: Sequence[BoundarySlots] = (),
        block_size: int = 1,
    ) -> None:
        """``boundaries``: kinds beside keys and values, with their slots; ``block_size`` matters to them."""
        if num_blocks < 1:
            raise ValueError(f"a KV cache needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.kinds = PieceKinds(num_blocks, boundaries, block_size)
        self._caching = enable_prefix_caching
        self._observers = () if observer is None else (observer,)
        self._every_kind_observers: tuple[Observer, ...] = ()
        """Those of the observers that hear of pieces of every kind, not of blocks only."""
        self._references = [0] * self.kinds.num_slots
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._free_boundaries = [
            OrderedDict.fromkeys(self.kinds.slots_of(number + 1)) for number in range(len(boundaries))
        ]
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}
        self.parts = PartialBlocks(self._references)
        """Blocks that are partly filled."""
        self.num_touched = 0
        """Blocks that were ever given out: the first ones of the cache."""

    def __repr__(self) -> str:
        return f"<PiecePool {self.num_used} of {self.num_blocks} used, {len(self._block_of)} known>"

    def observe(self, observer: Observer, *, every_kind: bool = False) -> None:
        """Tell one more observer of changes to blocks, or to pieces of every kind."""
        self._observers = (*self._observers, observer)
        if every_kind:
            self._every_kind_observers = (*self._every_kind_observers, observer)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_free_boundaries(self) -> int:
        """Positions whose boundary pieces find slots."""
        return min(map(len, self._free_boundaries), default=0)

    @property
    def num_used(self) -> int:
        """Blocks that are held."""
        return self.num_blocks - len(self._free)

    @property
    def is_caching(self) -> bool:
        return self._caching

    @property
    def known(self) -> Iterable[BlockHash]:
        """Names of all pieces in the index."""
        return self._block_of

    def knows(self, block_hash: BlockHash) -> bool:
        return block_hash in self._block_of

    def slot_of(self, name: BlockHash) -> int | None:
        """The slot of a piece of any kind; None if it is not known."""
        return self._block_of.get(name)

    def find_prefix(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest prefix that a context can go on behind.

        :meth:`hold` takes references to them, and to those of :meth:`find_boundary`.
        """
        found = self.find_blocks(hashes)
        if self.kinds.step:
            del found[self.kinds.usable_of(hashes, len(found), self._block_of.get) :]
        return found

    def find_boundary(self, prefix: Sequence[BlockHash]) -> list[int]:
        """Slots of the boundary pieces behind a prefix that :meth:`find_prefix` has found."""
        return [self._block_of[name] for name in self.kinds.boundary_names(prefix[-1])] if prefix else []

    def find_blocks(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The blocks of the longest known prefix, with boundary pieces behind it or without."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_free_beside(self, blocks: Sequence[int]) -> int:
        """Free blocks that remain after these blocks are held."""
        return len(self._free) - sum(self._references[block] == 0 for block in blocks)

    def num_holders(self, block: int) -> int:
        """Requests that hold a slot; 0: it is free."""
        return self._references[block]

    def hold(self, blocks: Sequence[int]) -> None:
        """Take a reference to each (known) slot."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free_list_of(block)[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int] | None:
        """``count`` blocks without content, least recently used first; None if too few are free."""
        if count > len(self._free):
            return None
        taken = []
        for _ in range(count):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            self._references[block] = 1
            taken.append(block)
        self.num_touched = max(self.num_touched, max(taken, default=-1) + 1)
        return taken

    def take_boundary(self) -> list[int] | None:
        """A slot without content for each boundary piece of one position; None if one lacks."""
        if not all(self._free_boundaries):
            return None
        taken = [free.popitem(last=False)[0] for free in self._free_boundaries]
        for slot in taken:
            self._forget(slot)
            self._references[slot] = 1
        return taken

    def name(self, block: int, block_hash: BlockHash) -> None:
        """Put a held piece of any kind, a full block for one, into the index.

        If another slot has the same content, the index keeps that one.
        """
        if self._caching and block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            for observer in self._observers_of(block):
                observer.stored(block_hash)

    def go_on_in(self, block: int) -> None:
        """Hold a block that :meth:`PartialBlocks.find` found.

        It is about to be filled further, so its name is void.
        """
        self._forget(block)
        self.hold([block])

    def unname(self, hashes: Iterable[BlockHash] | None = None) -> None:
        """Take pieces whose content may be wrong out of the index.

        None: all, and partly filled blocks. Requests that hold them keep them.
        """
        if hashes is None:
            self.parts.clear()
        for block_hash in list(self._block_of) if hashes is None else hashes:
            block = self._block_of.get(block_hash)
            if block is not None:
                self._forget(block)
                if self._references[block] == 0:
                    self._free_list_of(block).move_to_end(block, last=False)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each slot of a request, given in order.

        The tail of a context is reused before its head, which other prompts are more likely to share.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"slot {block} released twice"
            if self._references[block] == 0:
                free = self._free_list_of(block)
                free[block] = None
                if block not in self._hash_of and block not in self.parts:
                    free.move_to_end(block, last=False)

    def _observers_of(self, slot: int) -> tuple[Observer, ...]:
        return self._observers if slot < self.num_blocks else self._every_kind_observers

    def _free_list_of(self, slot: int) -> OrderedDict[int, None]:
        if slot < self.num_blocks:
            return self._free
        return self._free_boundaries[bisect_right(self.kinds.ends, slot) - 1]

    def _forget(self, block: int) -> None:
        self.parts.forget(block)
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]
            for observer in self._observers_of(block):
                observer.dropped(block_hash)
