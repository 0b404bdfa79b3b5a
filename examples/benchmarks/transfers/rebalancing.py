"""Which running requests had better go on elsewhere (pure).

Requests end when they end, so instances that were chosen evenly become uneven, and one that joins has
nothing to do. Every step of a crowded instance takes longer for all that run there. A running request is
moved with its KV blocks where the difference is large. It must be larger by a margin than what the move
itself changes, so no request goes back and forth.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from router.dispatch import policy
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.policy import CONTEXT_COST, DECODE_COST, QUEUE_COST
from router.dispatch.pool import Pool, PooledInstance

INTERVAL = 0.1
"""Least seconds between two looks at all instances."""
REST = 3.0
"""Seconds for which a request that was moved stays where it is."""
FEWEST_LEFT = 64
"""Tokens that a request must still want: fewer are not worth the move."""
MARGIN = 4 * DECODE_COST
"""Difference between two instances that is left as it is, as prompt tokens to compute.

It is as much as four running requests.
"""
SHARE = 0.25
"""Least difference, as a part of the load of the busier instance."""
MOST_MOVES = 2
"""Requests of one instance that are moved at once."""


class Removal(NamedTuple):
    """A request that is to go on at another instance."""

    entry: Entry
    source: PooledInstance
    target: PooledInstance


class Rebalancer:
    """Chooses requests to move; :meth:`ended` is called once for each."""

    def __init__(self, pool: Pool, ledger: Ledger) -> None:
        self._pool = pool
        self._ledger = ledger
        self._looked_at = float("-inf")
        self._away: dict[Entry, tuple[str, str]] = {}
        """Requests that are moved now, from where and to where."""
        self._rests: dict[Entry, float] = {}
        """When a request that was moved may be moved again."""

    def __repr__(self) -> str:
        return f"<Rebalancer: {len(self._away)} are moved>"

    def ended(self, entry: Entry, now: float) -> None:
        """Record that a move is over: the request was moved, stayed or has ended."""
        if self._away.pop(entry, None) is not None:
            self._rests[entry] = now + REST

    def removals(self, now: float) -> list[Removal]:
        """Requests to move now; called whenever an instance has reported."""
        if now - self._looked_at < INTERVAL or len(self._pool) < 2:
            return []
        self._looked_at = now
        self._rests = {entry: until for entry, until in self._rests.items() if until > now}
        able = {each.rank for each in policy.eligible([each.candidate(now) for each in self._pool])}
        usable = [each for each in self._pool if each.rank in able and each.lends and each.report is not None]
        loads = {each.name: load_of(each) for each in usable}
        found: list[Removal] = []
        for source in sorted(usable, key=lambda each: -loads[each.name]):
            removal = self._from(source, usable, loads)
            if removal is not None:
                entry, target = removal.entry, removal.target
                self._away[entry] = source.name, target.name
                loads[source.name] -= weight_of(entry, source)
                loads[target.name] += weight_of(entry, target)
                found.append(removal)
        return found

    # ---- helpers

    def _from(
        self, source: PooledInstance, usable: Iterable[PooledInstance], loads: dict[str, float]
    ) -> Removal | None:
        """The request that leaves an instance, if one had better."""
        if sum(name == source.name for name, _ in self._away.values()) >= MOST_MOVES:
            return None
        others = [each for each in usable if each is not source and _is_alike(source, each)]
        target = min(others, key=lambda each: (loads[each.name], each.rank), default=None)
        if target is None:
            return None
        least = max(MARGIN, SHARE * loads[source.name])
        difference = loads[source.name] - loads[target.name]
        movable = [
            entry
            for entry in self._ledger.of_instance(source.name)
            if self._may_move(entry)
            and difference - weight_of(entry, source) - weight_of(entry, target) > least
            and entry.most < _room_of(target)
        ]
        entry = min(movable, key=lambda each: each.work, default=None)  # the fewest blocks
        return None if entry is None else Removal(entry, source, target)

    def _may_move(self, entry: Entry) -> bool:
        prompt = entry.prompt
        is_running = entry.emitted and not entry.fruitless
        if not is_running or prompt.background or prompt.rank is not None or entry.loss is not None:
            return False
        left = prompt.asked - len(entry.emitted) if prompt.asked else FEWEST_LEFT
        return left >= FEWEST_LEFT and entry not in self._away and entry not in self._rests


def load_of(instance: PooledInstance) -> float:
    """What each step of an instance bears, as prompt tokens to compute.

    What was sent since its report is included.
    """
    assert instance.report is not None
    assert instance.capacity is not None
    blocks = instance.report.blocks_used + instance.sent.blocks
    context = CONTEXT_COST * min(1.0, blocks / instance.capacity.num_blocks)
    return DECODE_COST * instance.num_requests + context + QUEUE_COST * instance.report.queued


def weight_of(entry: Entry, instance: PooledInstance) -> float:
    """The part of a request in the load of an instance."""
    assert instance.capacity is not None
    blocks = -(-entry.work // instance.capacity.block_size)
    return DECODE_COST + CONTEXT_COST * blocks / instance.capacity.num_blocks


def _is_alike(one: PooledInstance, other: PooledInstance) -> bool:
    """Whether blocks of one fit the other, and both have the same role."""
    if one.capacity is None or other.capacity is None:
        return False
    return (one.capacity.cache_identity, one.role) == (other.capacity.cache_identity, other.role)


def _room_of(instance: PooledInstance) -> int:
    """Tokens that the KV cache of an instance holds."""
    assert instance.capacity is not None
    return instance.capacity.num_blocks * instance.capacity.block_size
