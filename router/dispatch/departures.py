"""Requests that leave an instance with their KV blocks (pure).

An instance whose drain is over asks for its requests to be moved. Each goes on there while another instance
copies its full blocks. What is computed meanwhile is copied next, until nothing is missing but the block in
the making. Then the other instance takes the request over: it ends at the first one, and that block comes,
too. So nothing is computed again. What cannot be copied is handed over at once, and computed again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.messages import Prefetch
from engine.prompt_images import names_of
from router.dispatch.ledger import Address, Entry, Loss
from router.dispatch.pool import PooledInstance

MOST_COPIES = 4
"""Requests of one instance whose blocks are copied at once."""
MOST_ROUNDS = 6
"""Copies of one request, at most.

Each has what came since the one before, and less than that. Then the request is handed over, with the rest.
"""
MOST_MISSING = 2
"""Full blocks that a target may lack where copies bring nothing more."""

MOST_TRIES = 3
"""Hand-overs of a request; it may outgrow the room for it meanwhile."""


@dataclass(frozen=True)
class Copy:
    """Have an instance fetch a request's blocks; where that cannot be sent, call :meth:`Departures.gone`."""

    target: PooledInstance
    message: Prefetch


@dataclass(frozen=True)
class HandOver:
    """Move a request now: to ``target``, or to whichever can take it."""

    entry: Entry
    source: PooledInstance
    target: PooledInstance | None
    loss: Loss
    copy: int = 0
    """Number of the copy by which the target takes it over.

    0: it computes what it lacks.
    """


Action = Copy | HandOver


@dataclass
class _Departure:
    """An instance that its requests leave."""

    source: PooledInstance
    loss: Loss
    waiting: deque[Entry]
    may_stay: bool = False
    """Whether a request stays if its blocks cannot be copied."""
    num_copied: int = 0
    """Requests that are copied now."""


@dataclass
class _Move:
    """Migration of one request whose blocks are copied."""

    entry: Entry
    address: Address
    """Address of its try at the source; another address means that it has gone."""
    departure: _Departure
    target: PooledInstance
    tokens: int = 0
    """Tokens that the target has after the last round."""
    rounds: int = field(default=1)
    missing: float = math.inf
    """Full blocks that the target lacked after the round before."""
    is_last: bool = False
    """Whether the target takes it over with this round."""
    tries: int = 0
    """Hand-overs that were begun."""


class Departures:
    """All requests of one router that leave with their blocks."""

    def __init__(self, choose: Callable[[Entry], PooledInstance | None]) -> None:
        """``choose`` gives the instance where a request had best go on; None: there is none."""
        self._choose = choose
        self._moves: dict[int, _Move] = {}
        self._numbers = 0

    def __repr__(self) -> str:
        return f"<Departures: {len(self._moves)} copies under way>"

    def begin_some(self, source: PooledInstance, entries: Iterable[Entry], loss: Loss) -> list[Action]:
        """Move requests that stay where their blocks cannot be copied."""
        return self._next(_Departure(source, loss, deque(entries), may_stay=True))

    def begin(self, source: PooledInstance, entries: Iterable[Entry], loss: Loss) -> list[Action]:
        """Move the requests of an instance, which goes on with them meanwhile."""
        actions: list[Action] = []
        waiting: deque[Entry] = deque()
        for entry in entries:
            if entry.emitted and not entry.fruitless:
                waiting.append(entry)
            else:  # nobody reads it yet
                actions.append(HandOver(entry, source, None, loss))
        return [*actions, *self._next(_Departure(source, loss, waiting))]

    def copied(
        self, target: PooledInstance, number: int, tokens: int, *, is_taken: bool = False
    ) -> list[Action]:
        """Act on the end of a copy: the target has ``tokens`` of the request.

        ``is_taken``: the source has let it go, as it says itself (:meth:`handed_over`).
        """
        move = self._moves.get(number)
        if move is None or move.target is not target or is_taken:
            return []
        del self._moves[number]
        before, move.tokens = move.tokens, tokens
        if move.entry.address != move.address or (move.is_last and not _may_try_again(move)):
            return self._over(move)
        if move.is_last:  # what came since is copied first
            move.is_last, move.rounds, move.missing = False, 1, math.inf
            return [self._copy(move)]
        missing, lacked = _num_missing(move), move.missing
        if tokens > before and move.rounds < MOST_ROUNDS and 0 < missing < lacked:
            move.rounds, move.missing = move.rounds + 1, missing
            return [self._copy(move)]
        # What it lacks comes with the hand-over. A source that outruns the copies never lacks less.
        if not target.ready or (missing > MOST_MISSING and tokens <= before):
            return self._over(move)
        move.is_last, move.tries = True, move.tries + 1
        return [self._copy(move)]

    def handed_over(self, source: PooledInstance, number: int) -> list[Action] | None:
        """Act on an instance's message that it has let a request go.

        Returns None if nobody asks for that any more.
        """
        address = source.name, number
        found = ((copy, move) for copy, move in self._moves.items() if move.tries and move.address == address)
        copy, move = next(found, (0, None))
        if move is None:
            return None
        del self._moves[copy]
        return self._over(move, copy if move.is_last else 0)  # else the target had given that hand-over up

    def gone(self, instance: PooledInstance) -> list[Action]:
        """An instance is lost: what it copied is handed over to another one at once.

        What was being taken over from it is moved like all that it had.
        """
        actions: list[Action] = []
        for number, move in list(self._moves.items()):
            if move.target is instance:
                actions += self._over(self._moves.pop(number))
            elif move.departure.source is instance and move.is_last:
                del self._moves[number]
                move.departure.num_copied -= 1
                move.departure.loss.less()
        return actions

    # ---- helpers

    def _next(self, departure: _Departure) -> list[Action]:
        actions: list[Action] = []
        while departure.waiting and departure.num_copied < MOST_COPIES:
            entry = departure.waiting.popleft()
            address = entry.address
            if address is None or address[0] != departure.source.name:
                departure.loss.less()
                continue
            if departure.may_stay and self._is_moving(entry):
                departure.loss.less()
                continue
            target = self._choose(entry)
            can_copy = target is not None and _can_copy(departure.source, target)
            if target is departure.source or (departure.may_stay and not can_copy):
                departure.loss.less()
                continue
            if target is None or not can_copy:
                actions.append(HandOver(entry, departure.source, target, departure.loss))
                continue
            departure.num_copied += 1
            actions.append(self._copy(_Move(entry, address, departure, target)))
        return actions

    def _is_moving(self, entry: Entry) -> bool:
        """Whether a request is being copied already, as when a role is set twice."""
        moves = self._moves.values()
        return any(move.entry is entry and move.address == entry.address for move in moves)

    def _copy(self, move: _Move) -> Copy:
        assert move.departure.source.capacity is not None
        self._numbers += 1
        self._moves[self._numbers] = move
        prompt = move.entry.prompt
        return Copy(
            move.target,
            Prefetch(
                self._numbers,
                prompt.prompt_ids + move.entry.emitted,
                move.departure.source.capacity.blocks_at,
                prompt.cache_salt,
                move.address[1] if move.is_last else 0,
                prompt.adapter,
                names_of(prompt.images),
            ),
        )

    def _over(self, move: _Move, copy: int = 0) -> list[Action]:
        """End a request's copies: hand it over, unless it has ended or gone meanwhile.

        ``copy``: the target takes it over by this one, and its source has let it go.
        """
        departure = move.departure
        departure.num_copied -= 1
        is_short = not copy and (not move.target.ready or move.is_last or _num_missing(move) > MOST_MISSING)
        if move.entry.address != move.address or (departure.may_stay and is_short):
            departure.loss.less()
            return self._next(departure)
        target = move.target if move.target.ready else None
        action = HandOver(move.entry, departure.source, target, departure.loss, copy if target else 0)
        return [action, *self._next(departure)]


def _can_copy(source: PooledInstance, target: PooledInstance) -> bool:
    one, other = source.capacity, target.capacity
    if one is None or other is None or not source.lends or not target.lends:
        return False
    return one.cache_identity == other.cache_identity


def _may_try_again(move: _Move) -> bool:
    """Whether a failed migration is tried once more."""
    return move.tries < MOST_TRIES and move.target.ready


def _num_missing(move: _Move) -> int:
    """Full blocks of the request that the target lacks."""
    assert move.target.capacity is not None
    size = move.target.capacity.block_size
    return (move.entry.work - 1) // size - move.tokens // size
