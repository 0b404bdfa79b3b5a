"""Messages between the two ends of a transfer of KV blocks.

They have connections of their own. The source binds the socket. The taker asks for blocks by their names, and
grants the source so many pieces at a time. A number names one transfer on its connection.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from engine.pieces.kinds import HASH_BYTES
from engine.pieces.pool import BlockHash
from engine.transfers.checksums import Buffer, crc32

DIGEST_BYTES = 16
CRC = struct.Struct("<IQ")
MOST_BLOCKS = 65_536
"""Blocks of one transfer."""
LARGEST_WHOLE = 32 << 20
"""Bytes of a block above which it comes in parts, in several messages."""
PART_BYTES = 4 << 20
"""Bytes of such a part. A boundary piece above it comes in parts."""
MOST_PIECES = 16
"""Pieces that a taker grants at once."""

NO_BLOCK: BlockHash = bytes(HASH_BYTES)
"""Name of the block before a request's first one."""

Number = Annotated[int, Meta(ge=0, le=2**53)]
Holder = tuple[str, Number]
"""A running request: its router's name, and the router's number of it at the source."""


def digest_of(identity: str, name: BlockHash, data: Buffer) -> bytes:
    """Digest of a block's bytes, its name, and the cache that it fits.

    So the bytes of another block, or of another layout, are wrong like torn ones. The bytes count by their
    CRC, which finds every flipped bit at several gigabytes a second: nobody in a mesh means to deceive, and
    others have no key.
    """
    return digest_of_parts(identity, name, [data])


def digest_of_parts(identity: str, name: BlockHash, parts: Sequence[Buffer]) -> bytes:
    """:func:`digest_of` bytes that lie in several places, one after the other."""
    return digest_of_crc(identity, name, crc32(parts), sum(len(part) for part in parts))


def digest_of_crc(identity: str, name: BlockHash, crc: int, length: int) -> bytes:
    """:func:`digest_of` so many bytes with this CRC."""
    facts = CRC.pack(crc, length)
    return hashlib.blake2b(identity.encode() + name + facts, digest_size=DIGEST_BYTES).digest()


def digest_of_part(identity: str, name: BlockHash, offset: int, data: Buffer) -> bytes:
    """:func:`digest_of` a part of a block, and the place where it begins."""
    return digest_of(identity, name + offset.to_bytes(8, "little"), data)


def joined(names: Iterable[BlockHash]) -> bytes:
    """Names of blocks in one string of bytes, as messages carry them."""
    return b"".join(names)


def split(names: bytes, size: int = HASH_BYTES) -> list[bytes]:
    """Names or digests of a message, one by one."""
    return [names[start : start + size] for start in range(0, len(names), size)]


# ---- taker -> source


class LoanRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Request of a taker for blocks: as many of the first ones as are there."""

    number: Number
    identity: str
    """That of the taker's cache: see :mod:`engine.transfers.identity`."""
    names: Annotated[bytes, Meta(max_length=MOST_BLOCKS * HASH_BYTES)]
    pieces: Annotated[int, Meta(ge=1, le=MOST_PIECES)]
    """Pieces that may be sent at once."""
    holder: Holder | None = None
    """A request to hand over.

    ``names`` is then the last of its blocks that the taker has. The source stops the request at the end
    of a step. It lends what comes after that block, with the one that is partly filled.
    """
    room: Annotated[int, Meta(ge=0, le=MOST_BLOCKS)] = 0
    """Blocks that the taker has room for, with ``holder``."""

    def __post_init__(self) -> None:
        if not self.names or len(self.names) % HASH_BYTES:
            raise ValueError(
                f"names of blocks have {HASH_BYTES} bytes each; these have {len(self.names)} in all"
            )


class WindowGrant(msgspec.Struct, frozen=True, tag="more"):
    """Room of a taker for some more pieces."""

    number: Number
    pieces: Annotated[int, Meta(ge=1, le=MOST_PIECES)]


class Enough(msgspec.Struct, frozen=True, tag="enough"):
    """End of a transfer at its taker, which wants no more of it."""

    number: Number


ToSource = LoanRequest | WindowGrant | Enough

# ---- source -> taker


class Lent(msgspec.Struct, frozen=True, tag="lent"):
    """Number of the first blocks that are held and come; 0: none are here."""

    number: Number
    count: Annotated[int, Meta(ge=0, le=MOST_BLOCKS)]
    names: Annotated[bytes, Meta(max_length=MOST_BLOCKS * HASH_BYTES)] = b""
    """Names of a handed over request's blocks: the taker did not know them."""
    has_part: bool = False
    """Whether the last one is partly filled, and named by the tokens in it."""


class BlockPiece(msgspec.Struct, frozen=True, tag="piece"):
    """Consecutive blocks of a loan, with their digests."""

    number: Number
    first: Annotated[int, Meta(ge=0, le=MOST_BLOCKS)]
    """Index of the first one among the names that were asked for."""
    digests: bytes
    """:data:`DIGEST_BYTES` of each block."""
    data: bytes
    """The blocks one after the other, or a part of a single one."""
    offset: Annotated[int, Meta(ge=0)] = 0
    """Place of the first byte in its block; parts of a block come in order."""

    def __post_init__(self) -> None:
        if not self.digests or len(self.digests) % DIGEST_BYTES:
            raise ValueError(f"digests have {DIGEST_BYTES} bytes each; these have {len(self.digests)} in all")


class LoanRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Refusal of a loan."""

    number: Number
    reason: str
    for_good: bool = False
    """Whether it would be refused again: the caches differ."""


class Held(msgspec.Struct, frozen=True, tag="held"):
    """Question of a source that holds blocks: does the taker still want them?"""

    number: Number


ToTaker = Lent | BlockPiece | LoanRefused | Held
