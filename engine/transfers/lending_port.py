"""The mover's end for takers: a listening socket over which blocks are lent.

What is lent, and when a loan ends, is decided by :mod:`engine.transfers.lending`. All calls are made in the
mover's thread (:mod:`engine.transfers.mover`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq.asyncio

from coordinator.rpc.codec import OtherProtocol
from coordinator.rpc.keys import MeshKeys
from coordinator.rpc.rpc import AsyncListener, Peer
from engine.pieces.kinds import PieceKinds
from engine.pieces.pool import BlockHash
from engine.transfers import lending
from engine.transfers.block_memory import CacheGone, CacheMemory
from engine.transfers.lending import Key, Lender, Lookup, Return
from engine.transfers.messages import BlockPiece, ToSource, ToTaker, digest_of, digest_of_part

PIECE_BYTES = 1 << 18
"""Bytes of a piece, if more than one block fits into it."""
LEAST_BYTES = 64
"""Fewest bytes that a block counts: without keys and values it has none."""
LARGEST_QUESTION = 2 << 20
"""Bytes of a message of a taker; a larger one costs it the connection."""
HELD_INTERVAL = 0.25
"""Seconds between two questions whether takers that keep a loan waiting are there."""
FAREWELL, FAREWELL_INTERVAL = 1.0, 0.01
"""Most seconds that a closing mover waits for its takers, and between two questions."""


class LendingPort:
    """Sends blocks of one cache to takers that ask for them."""

    def __init__(
        self,
        memory: CacheMemory,
        identity: str,
        kinds: PieceKinds,
        *,
        tell: Callable[[Lookup | Return], None],
        lose: Callable[[CacheGone], None],
    ) -> None:
        """``tell`` gets events for the step loop; ``lose``: the cache is out of reach."""
        per_piece = max(1, PIECE_BYTES // max(memory.block_bytes, LEAST_BYTES))
        self.lender = Lender(identity, per_piece, kinds, memory.bytes_of)
        self._memory = memory
        self._identity = identity
        self._tell, self._lose = tell, lose
        self.is_lost = False
        """Whether the cache is out of reach: nothing is sent from then on."""
        self._listener: AsyncListener[ToSource, ToTaker] | None = None
        self._in_parts: tuple[tuple[Peer, int, int], list[memoryview]] | None = None
        """The piece that was sent in parts last, and its bytes."""
        self._may_lend = asyncio.Event()
        """Whether there may be loans to look at: a thread without any sleeps."""

    def __repr__(self) -> str:
        return repr(self.lender)

    @property
    def is_at_rest(self) -> bool:
        """Whether no loan is looked at."""
        return not self._may_lend.is_set()

    def open(self, context: zmq.asyncio.Context, endpoint: str, keys: MeshKeys | None) -> str:
        """Listen; returns the address with the real port."""
        self._listener = AsyncListener(
            context, endpoint, ToSource, name="kv blocks", max_bytes=LARGEST_QUESTION, keys=keys
        )
        return self._listener.endpoint

    def close(self) -> None:
        """Close the socket."""
        if self._listener is not None:
            self._listener.close()

    async def receive_all(self) -> None:
        """Act on messages of takers until cancelled."""
        assert self._listener is not None
        await self._listener.receive_all(self._received)

    async def ask_if_held(self) -> None:
        """Ask takers that keep loans waiting whether they are there, until cancelled."""
        while True:
            await self._may_lend.wait()
            while self.lender:
                await asyncio.sleep(HELD_INTERVAL)
                self._carry_out(self.lender.waiting())
            self._may_lend.clear()

    async def await_readers(self) -> None:
        """Wait until takers have read what was sent to them, for at most ``FAREWELL`` seconds."""
        until = time.monotonic() + FAREWELL
        while not self.is_lost and time.monotonic() < until and (questions := self.lender.farewell()):
            self._carry_out(questions)
            await asyncio.sleep(FAREWELL_INTERVAL)

    # ---- answers of the step loop

    def found(self, loan: Key, blocks: Sequence[int]) -> None:
        """Send the blocks of a loan, which are held from now on."""
        self._carry_out(self.lender.found(loan, blocks))

    def handed_over(
        self, loan: Key, names: Sequence[BlockHash], blocks: Sequence[int], *, has_part: bool
    ) -> None:
        """Send the last blocks of a request that is handed over."""
        self._carry_out(self.lender.handed_over(loan, names, blocks, has_part=has_part))

    def refuse(self, loan: Key, reason: str) -> None:
        """Refuse to hand a request over."""
        self._carry_out(self.lender.refused(loan, reason))

    # ---- helpers

    def _carry_out(self, actions: Sequence[lending.Action]) -> None:
        assert self._listener is not None
        if self.lender:
            self._may_lend.set()
        waiting = deque(() if self.is_lost else actions)
        while waiting:
            match action := waiting.popleft():
                case lending.SendToTaker(peer, message):
                    if not self._listener.send(peer, message):
                        waiting.extend(self.lender.gone(peer))
                case lending.SendPiece():
                    try:
                        piece = self._piece(action)
                    except CacheGone as error:
                        self._lose(error)
                        return
                    if not self._listener.send(action.peer, piece):
                        waiting.extend(self.lender.gone(action.peer))
                case _:
                    self._tell(action)

    def _received(self, peer: Peer, message: ToSource | OtherProtocol) -> None:
        if not isinstance(message, OtherProtocol):  # of another version of Lockstep: its caches differ
            self._carry_out(self.lender.received(peer, message))

    def _piece(self, action: lending.SendPiece) -> BlockPiece:
        if action.part is not None:
            return self._part(action, *action.part)
        data = self._memory.read(action.blocks)
        digests = [
            digest_of(self._identity, name, row.data) for name, row in zip(action.names, data, strict=True)
        ]
        return BlockPiece(action.number, action.first, b"".join(digests), data.tobytes())

    def _part(self, action: lending.SendPiece, begin: int, end: int) -> BlockPiece:
        """A part of a block, which is read once: memory of workers is copied."""
        key = action.peer, action.number, action.first
        if self._in_parts is None or self._in_parts[0] != key:
            self._in_parts = key, self._memory.parts_of(action.blocks[0])
        (_, parts), at, data = self._in_parts, 0, bytearray()
        for each in parts:
            data += each[max(begin - at, 0) : max(end - at, 0)]
            at += each.nbytes
        digest = digest_of_part(self._identity, action.names[0], begin, data)
        if end == at:
            self._in_parts = None
        return BlockPiece(action.number, action.first, digest, bytes(data), begin)
