"""Running requests that give way to waiting ones of strictly higher priority (pure).

Slots, blocks and tokens of a step are taken alike: from the request that would go last, which is computed
again later. A request gives way only where that is enough for the waiting one, and never to an equal one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.pieces.pool import PiecePool
from engine.scheduling.request import Request


class Room:
    """Free slots, tokens and blocks for waiting requests; negative where they lack some."""

    def __init__(
        self,
        running: Sequence[Request],
        pool: PiecePool,
        block_size: int,
        *,
        slots: int,
        tokens: int,
        whole: bool,
    ) -> None:
        """``tokens`` are those of the next step; ``whole``: a prompt must fit into them."""
        self._pool, self._size, self._whole = pool, block_size, whole
        self._slots = slots
        self._blocks = pool.num_free - sum(self._grows(each) for each in running)
        self.tokens = tokens
        self._released: Counter[int] = Counter()
        self._held: set[int] = set()

    def __repr__(self) -> str:
        return f"<Room of {self._slots} slots, {self._blocks} blocks, {self.tokens} tokens>"

    @property
    def is_short(self) -> bool:
        return self._slots < 0 or self._blocks < 0 or (self._whole and self.tokens < 0)

    def could_do(self, requests: Iterable[Request]) -> bool:
        """Whether blocks could suffice if these requests give way."""
        return self._blocks + sum(len(each.blocks) for each in requests) >= 0

    def reserve(self, request: Request) -> None:
        """Set aside what a waiting request needs."""
        known = self._pool.find_prefix(request.prefix_hashes(self._size)[: request.most_cached])
        fresh = set(known) - self._held
        self._blocks -= sum(self._pool.num_holders(block) == self._released[block] for block in fresh)
        self._blocks -= -(-len(request.token_ids) // self._size) - len(known)
        self._held |= fresh
        self._slots -= 1
        self.tokens -= len(request.token_ids) - len(known) * self._size

    def release(self, request: Request) -> None:
        """Add the slot, tokens and blocks of a running request that gives way."""
        self._slots += 1
        self.tokens += self._whole  # its next token
        self._blocks += self._grows(request)
        self._released.update(request.blocks)
        self._blocks += sum(
            self._pool.num_holders(block) == self._released[block] and block not in self._held
            for block in request.blocks
        )

    def _grows(self, request: Request) -> bool:
        """Whether a running request's next token takes a block in this step."""
        return request.num_uncomputed == 1 and request.num_computed == len(request.blocks) * self._size


def giving_way(waiting: Iterable[Request], running: Sequence[Request], room: Room) -> list[Request]:
    """Running requests to preempt for waiting ones, both in order; the last one goes first.

    A request in a step under way is not preempted before its token is there. It counts all the same: the
    others do not give way in vain.
    """
    victims: list[Request] = []
    ahead = [each for each in running if each.tells_prompt]
    for request in waiting:
        lower = [
            each for each in reversed(running) if each.priority > request.priority and each not in victims
        ]
        if not lower or room.tokens <= 0 or _lacks_logits(request, ahead):
            break
        ahead.append(request)
        room.reserve(request)
        chosen = _enough(room, sorted(lower, key=lambda each: each.num_in_flight > 0))
        victims += [each for each in chosen if not each.num_in_flight]
        if room.is_short or any(each.num_in_flight for each in chosen):
            break
    return victims


def _enough(room: Room, lower: Sequence[Request]) -> list[Request]:
    """Shortest run of these requests that frees enough; empty if all are too few."""
    chosen: list[Request] = []
    if not room.could_do(lower):
        return chosen
    for each in lower:
        if not room.is_short:
            break
        room.release(each)
        chosen.append(each)
    return [] if room.is_short else chosen


def _lacks_logits(request: Request, ahead: Iterable[Request]) -> bool:
    """Whether log-probabilities of prompts before this one may leave no room for its own."""
    return request.tells_prompt and any(
        each.tells_prompt and each.priority <= request.priority for each in ahead
    )
