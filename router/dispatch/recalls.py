"""Which queued requests had better wait elsewhere (pure).

A choice is made when a request comes; what comes later may prove it wrong. A request that has not begun is
recalled from its instance when another one would have the first token sooner by a good deal. Whether it has
begun is for its instance to decide: it gives back what has not, and the rest stays where it is.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from router.dispatch import policy
from router.dispatch.ledger import Entry, Ledger
from router.dispatch.policy import Candidate
from router.dispatch.pool import Pool, PooledInstance

INTERVAL = 0.02
"""Least seconds between two looks at the queues of at most ``MANY`` instances.

A look takes some microseconds per instance, so it is rarer in proportion where there are more.
"""
MANY = 64
MAX_MOVES = 16
"""Most requests recalled at once."""
MOST_TRIES = 4
"""Tries after which a request stays where it is."""
MARGIN = 1024.0
"""Prompt tokens that a move must save."""


class Recaller:
    """Recalls requests from an instance in rounds, each after the answer to the one before.

    Each request is recalled at most once per try.
    """

    def __init__(self, pool: Pool, ledger: Ledger) -> None:
        self._pool = pool
        self._ledger = ledger
        self._looked_at = float("-inf")

    def recalls(self, now: float) -> dict[str, list[int]]:
        """Dispatch numbers to recall, by instance; called whenever an instance has reported."""
        if now - self._looked_at < INTERVAL * max(1.0, len(self._pool) / MANY):
            return {}
        self._looked_at = now
        crowded = [each for each in self._pool if each.report is not None and each.report.queued]
        if not crowded or len(self._pool) < 2:
            return {}
        candidates = {instance.name: self._pool.candidate(instance, now) for instance in self._pool}
        usable = {
            each.rank for each in policy.eligible(list(candidates.values())) if not policy.num_queued(each, 1)
        }
        if not usable:
            return {}
        found: dict[str, list[int]] = defaultdict(list)
        for instance in crowded:
            for entry in self._last_queued(instance):
                better = self._better(instance, entry, candidates, usable)
                if better is None:
                    break
                assert entry.address is not None
                entry.recalled = instance.asked_back = True
                found[instance.name].append(entry.address[1])
                candidates[instance.name] = _shifted(candidates[instance.name], entry, -1)
                candidates[better] = _shifted(candidates[better], entry, 1)
                if sum(map(len, found.values())) == MAX_MOVES:
                    return found
        return found

    def answered(self, instance: PooledInstance) -> None:
        """Record an instance's answer to a recall; requests it does not give back have begun."""
        instance.asked_back = False

    def _last_queued(self, instance: PooledInstance) -> list[Entry]:
        """Requests of this router that may still wait there, the last one first."""
        assert instance.report is not None
        if instance.asked_back:
            return []  # what comes of that is not known yet
        movable = [
            entry
            for entry in self._ledger.of_instance(instance.name)
            if not entry.has_begun
            and not entry.recalled
            and entry.prompt.rank is None
            and entry.attempts < MOST_TRIES
        ]
        return movable[::-1][: instance.report.queued]

    def _better(
        self, here: PooledInstance, entry: Entry, candidates: dict[str, Candidate], usable: set[int]
    ) -> str | None:
        """An instance that would serve the request sooner than the one where it is counted."""
        lengths = self._pool.index.prefix_lengths(entry.blocks or ())
        without = candidates[here.name]
        without = msgspec.structs.replace(without, requests=without.requests - 1)
        best, lowest = None, policy.cost(without, 0) - MARGIN
        for other in self._pool:
            if other is here or other.rank not in usable or other.capacity is None:
                continue
            if not policy.that_hold([candidates[other.name]], entry.most):
                continue
            cached = lengths.get(other.name, 0) * other.capacity.block_size
            there = msgspec.structs.replace(candidates[other.name], cached_tokens=cached)
            if (price := policy.cost(there, entry.work)) < lowest:
                best, lowest = other.name, price
        return best


def _shifted(candidate: Candidate, entry: Entry, sign: int) -> Candidate:
    """The candidate with one queued request more or less."""
    return msgspec.structs.replace(
        candidate,
        requests=candidate.requests + sign,
        waiting_tokens=max(0, candidate.waiting_tokens + sign * entry.uncached),
        queued=max(0, candidate.queued + sign),
    )
