"""The source's side of hand-overs: running requests that another instance asks for (pure).

All full blocks of a request have been copied by then, but maybe the newest. At the end of a step the request
goes no further here, so its blocks change no more. What the taker lacks is lent like any block, with the one
that is partly filled. That one is named by its tokens: the taker finds it for a request that has just these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.pieces.kinds import BLOCKS_ONLY, PieceKinds
from engine.pieces.pool import BlockHash, PiecePool
from engine.scheduling.request import Request, Status
from engine.transfers.lending import Key, Lookup
from engine.transfers.messages import NO_BLOCK, Holder

Find = Callable[[Holder], Request | None]
"""Finds a request by its holder, waiting or running."""


def nobody(_: Holder) -> None:
    """Finds no request: none is handed over."""
    return


@dataclass(frozen=True)
class Tail:
    """Blocks of a request that its taker lacks, in order."""

    names: Sequence[BlockHash]
    blocks: Sequence[int]
    has_part: bool
    """Whether the last one is partly filled."""


def tail_of(
    request: Request, block_size: int, last: BlockHash, kinds: PieceKinds = BLOCKS_ONLY
) -> Tail | None:
    """The blocks of a request behind the one named ``last``.

    None if that is no block of it. The request is in no step. One that waits has no blocks.
    """
    if request.status is not Status.RUNNING:
        return Tail([], [], has_part=False)
    num_full, rest = divmod(request.num_computed, block_size)
    if kinds.step:  # rows behind the newest boundary piece stay here, and are computed again
        num_full, rest = request.boundary_at // block_size, 0
    names = request.hashes_up_to(num_full, block_size)
    if last != NO_BLOCK and last not in names:
        return None
    first = 0 if last == NO_BLOCK else names.index(last) + 1
    part = request.name_of_part(block_size) if request.num_uncomputed == 1 and rest else None
    if part is None:
        return Tail(
            *kinds.placed(names[first:], request.blocks[first:num_full], request.boundary), has_part=False
        )
    return Tail([*names[first:], part], request.blocks[first : num_full + 1], has_part=True)


class HandOvers:
    """Requests that takers have asked for, each until it is in no step."""

    def __init__(self, pool: PiecePool, block_size: int) -> None:
        self._pool = pool
        self._block_size = block_size
        self._asked: list[Lookup] = []

    def __repr__(self) -> str:
        return f"<HandOvers: {len(self._asked)} asked for>"

    def __len__(self) -> int:
        return len(self._asked)

    def add(self, look: Lookup) -> None:
        """Note that a taker asks for a request."""
        self._asked.append(look)

    def clear(self) -> None:
        """Forget what was asked for: no answer arrives any more."""
        self._asked.clear()

    def due(self, find: Find) -> list[tuple[Key, Request | None, Tail | str]]:
        """Answers to takers: requests that go, with their last blocks, or why none goes."""
        asked, self._asked = self._asked, []
        found: list[tuple[Key, Request | None, Tail | str]] = []
        gone: set[int] = set()
        for look in asked:
            assert look.holder is not None
            request = find(look.holder)
            if request is None or id(request) in gone:
                found.append((look.loan, None, "the request is not here"))
                continue
            request.is_asked_for = request.num_in_flight > 0
            if request.is_asked_for:
                self._asked.append(look)
                continue
            tail = tail_of(request, self._block_size, look.names[0], self._pool.kinds)
            if tail is None:
                found.append((look.loan, None, "the block is none of the request"))
            elif len(tail.blocks) > look.room:
                found.append((look.loan, None, "the request has outgrown the room for it"))
            else:
                gone.add(id(request))
                found.append((look.loan, request, tail))
        return found
