"""The source's side of transfers (pure: no sockets, no clock).

Events in, actions out. A loan is looked up, and its blocks are held, by the step loop; from then on it is
read here piece by piece, as the taker grants room. It ends when its last piece was read, when the taker wants
no more, or when the taker's connection is gone. No clock ends it: bytes that are read must be held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.pieces.kinds import BLOCKS_ONLY, PieceKinds
from engine.pieces.pool import BlockHash
from engine.transfers.messages import (
    LARGEST_WHOLE,
    PART_BYTES,
    Enough,
    Held,
    Holder,
    Lent,
    LoanRefused,
    LoanRequest,
    ToSource,
    WindowGrant,
    joined,
    split,
)

Peer = bytes
Key = tuple[Peer, int]
"""A taker's connection, and its number of the transfer."""

MOST_LOANS = 32
"""Loans at once; further ones are refused, and the taker computes."""
MOST_LOANS_OF_PEER = 4
MOST_UNREAD = 64
"""Takers that are asked whether they have read everything before their connections end."""


@dataclass(frozen=True)
class SendToTaker:
    """Send a message; where that fails, the taker is gone."""

    peer: Peer
    message: Lent | LoanRefused | Held


@dataclass(frozen=True)
class Lookup:
    """Have the step loop look up and hold blocks; it answers by :meth:`Lender.found`."""

    loan: Key
    names: list[BlockHash]
    holder: Holder | None = None
    """A request to hand over: see :class:`engine.transfers.messages.LoanRequest`.

    :meth:`Lender.handed_over` or :meth:`Lender.refused` is the answer.
    """
    room: int = 0


@dataclass(frozen=True)
class SendPiece:
    """Read blocks, or a part of one, and send them with their digests."""

    peer: Peer
    number: int
    first: int
    names: Sequence[BlockHash]
    blocks: Sequence[int]
    part: tuple[int, int] | None = None
    """Begin and end of the part, in bytes; None: the blocks are sent whole."""


@dataclass(frozen=True)
class Return:
    """Have the step loop let go of the blocks of a loan that has ended."""

    loan: Key


Action = SendToTaker | Lookup | SendPiece | Return


@dataclass
class _Loan:
    names: list[BlockHash]
    pieces: int
    """Pieces that the taker has room for."""
    blocks: Sequence[int] | None = None
    """None while they are looked up."""
    next: int = 0
    """Index of the next block to read."""
    offset: int = 0
    """Bytes of it that were read, where it is sent in parts."""
    is_over: bool = False
    """The taker went while its blocks were looked up."""
    told: tuple[bytes, bool] = (b"", False)
    """Names that the taker lacks, and whether the last block is partly filled."""


class Lender:
    """State of all loans of one cache: windows, limits, and when each ends."""

    def __init__(
        self,
        identity: str,
        blocks_per_piece: int,
        kinds: PieceKinds = BLOCKS_ONLY,
        bytes_of: Callable[[int], int] = lambda _: 0,
    ) -> None:
        """``bytes_of``: bytes of the piece in a slot; large ones are sent in parts."""
        self._identity = identity
        self._bytes_of = bytes_of
        self._kinds = kinds
        self._per_piece = blocks_per_piece
        self._loans: dict[Key, _Loan] = {}
        self._unread: dict[Peer, int] = {}
        """Newest loan of each taker that may not have read its last piece yet."""

    def __repr__(self) -> str:
        return f"<Lender of {len(self._loans)} loans>"

    def __len__(self) -> int:
        return len(self._loans)

    def received(self, peer: Peer, message: ToSource) -> list[Action]:
        """Act on a taker's message."""
        match message:
            case LoanRequest():
                return self._asked(peer, message)
            case WindowGrant(number, pieces):
                return self._granted((peer, number), pieces)
            case Enough(number):
                if self._unread.get(peer) == number:
                    del self._unread[peer]
                return self._over((peer, number))

    def found(self, key: Key, blocks: Sequence[int]) -> list[Action]:
        """Begin to read a loan, whose blocks (maybe none) are held from now on.

        The boundary pieces behind them are the last of the ``blocks``.
        """
        loan = self._loans[key]
        loan.names = self._kinds.names_of(loan.names, len(blocks))
        return self._held(key, loan, blocks)

    def _held(self, key: Key, loan: _Loan, blocks: Sequence[int]) -> list[Action]:
        if loan.is_over:
            del self._loans[key]
            return [Return(key)]
        peer, number = key
        loan.blocks = blocks
        return [SendToTaker(peer, Lent(number, len(blocks), *loan.told)), *self._pieces(key, loan)]

    def handed_over(
        self, key: Key, names: Sequence[BlockHash], blocks: Sequence[int], *, has_part: bool
    ) -> list[Action]:
        """Begin to read the last blocks of a request that is handed over.

        They have these names, and are held from now on.
        """
        loan = self._loans[key]
        loan.names, loan.told = list(names), (joined(names), has_part)
        return self._held(key, loan, blocks)

    def refused(self, key: Key, reason: str) -> list[Action]:
        """Refuse to hand a request over."""
        loan = self._loans.pop(key)
        peer, number = key
        return [] if loan.is_over else [SendToTaker(peer, LoanRefused(number, reason))]

    def waiting(self) -> list[Action]:
        """Questions whether the takers of loans that wait for them are still there."""
        return [
            SendToTaker(key[0], Held(key[1]))
            for key, loan in self._loans.items()
            if loan.blocks is None or loan.pieces == 0
        ]

    def farewell(self) -> list[Action]:
        """Questions to takers that may not have read all that was sent.

        What a taker has not read when the connection ends is lost to it. A taker answers in the order of what
        it was sent, so its answer to the newest loan stands for the others.
        """
        return [SendToTaker(peer, Held(number)) for peer, number in self._unread.items()]

    def gone(self, peer: Peer) -> list[Action]:
        """End all loans of a taker whose connection has ended."""
        self._unread.pop(peer, None)
        return [action for key in list(self._loans) if key[0] == peer for action in self._over(key)]

    # ---- helpers

    def _asked(self, peer: Peer, ask: LoanRequest) -> list[Action]:
        key = peer, ask.number
        if ask.identity != self._identity:
            return [SendToTaker(peer, LoanRefused(ask.number, "the caches differ", for_good=True))]
        if key in self._loans:
            return [SendToTaker(peer, LoanRefused(ask.number, "a loan of this number is open"))]
        if len(self._loans) >= MOST_LOANS or self._num_of(peer) >= MOST_LOANS_OF_PEER:
            return [SendToTaker(peer, LoanRefused(ask.number, "too many loans at once"))]
        names = split(ask.names)
        self._loans[key] = _Loan(names, ask.pieces)
        return [Lookup(key, names, ask.holder, ask.room)]

    def _num_of(self, peer: Peer) -> int:
        return sum(key[0] == peer for key in self._loans)

    def _granted(self, key: Key, pieces: int) -> list[Action]:
        loan = self._loans.get(key)
        if loan is None:
            return []  # its last piece is on the way
        loan.pieces += pieces
        return self._pieces(key, loan)

    def _pieces(self, key: Key, loan: _Loan) -> list[Action]:
        if loan.blocks is None or loan.is_over:
            return []
        actions: list[Action] = []
        while loan.pieces > 0 and loan.next < len(loan.blocks):
            first, num_blocks = loan.next, len(loan.blocks) - len(self._kinds.boundaries)
            end = min(first + self._per_piece, num_blocks) if first < num_blocks else first + 1
            size, part = self._bytes_of(loan.blocks[first]), None
            if size > (LARGEST_WHOLE if first < num_blocks else PART_BYTES):
                part = loan.offset, min(loan.offset + PART_BYTES, size)
                loan.offset = part[1] % size
                end = first + 1
            actions.append(SendPiece(*key, first, loan.names[first:end], loan.blocks[first:end], part))
            loan.next, loan.pieces = end - bool(loan.offset), loan.pieces - 1
        if loan.next == len(loan.blocks):
            del self._loans[key]
            actions.append(Return(key))
            self._note_unread(*key)
        return actions

    def _note_unread(self, peer: Peer, number: int) -> None:
        self._unread.pop(peer, None)
        self._unread[peer] = number
        while len(self._unread) > MOST_UNREAD:
            del self._unread[next(iter(self._unread))]

    def _over(self, key: Key) -> list[Action]:
        loan = self._loans.get(key)
        if loan is None or loan.is_over:
            return []
        if loan.blocks is None:  # the step loop may be holding them just now
            loan.is_over = True
            return []
        del self._loans[key]
        return [Return(key)]
