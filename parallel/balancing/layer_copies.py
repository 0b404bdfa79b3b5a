"""Copies of one layer's experts on ranks, while a placement is worked out (pure)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from parallel.placement import Copies, Seats, rank_loads


class CopyLimits(NamedTuple):
    """Limits on the copies of a layer's experts."""

    slots: Sequence[int]
    """Most experts on each rank."""
    total: int
    """Copies in all."""
    least: int
    """Copies of each expert, at least."""


class LayerCopies:
    """Copies of a layer's experts by rank, and the load of each rank.

    Those who change copies keep :attr:`loads` up, or :meth:`measure` them anew.
    """

    def __init__(self, load: Sequence[float], held: Copies, seats: Seats, limits: CopyLimits) -> None:
        """``load``: rows of each expert. ``held``: ranks by expert to begin with."""
        self.load, self.seats = load, seats
        self.slots, self.total, self.least = limits
        self.held = [frozenset(ranks) for ranks in held]
        """Ranks that held each expert at first, and need not read it."""
        self.ranks = [set(ranks) for ranks in held]
        """Ranks of each expert."""
        self.experts: list[set[int]] = [set() for _ in self.slots]
        """Experts of each rank."""
        for expert, ranks in enumerate(held):
            for rank in ranks:
                self.experts[rank].add(expert)
        self.loads: list[float] = []
        """Load of each rank, in rows."""
        self.measure()

    def copies(self) -> Copies:
        """The placement: ranks of each expert, in order."""
        return tuple(tuple(sorted(ranks)) for ranks in self.ranks)

    def measure(self) -> None:
        """Work out the load of each rank; an expert that no rank holds adds nothing."""
        self.loads = rank_loads(self.load, self.copies(), len(self.slots))

    @property
    def greatest(self) -> float:
        """Load of the slowest rank."""
        return max(self.loads)

    def is_sound(self) -> bool:
        """Whether each expert has enough copies, and each rank fits and holds some."""
        within = zip(self.experts, self.slots, strict=True)
        fewest = int(self.total >= len(self.slots))
        return all(fewest <= len(experts) <= slots for experts, slots in within) and all(
            self.num_instances(ranks) >= self.least for ranks in self.ranks
        )

    def is_crowded(self) -> bool:
        """Whether a rank has more experts than it has room for."""
        return any(
            0 < room < len(experts) for room, experts in zip(self.seats.room, self.experts, strict=True)
        )

    def num_instances(self, ranks: Collection[int]) -> int:
        """Number of instances that these ranks belong to."""
        return len({self.seats.instances[rank] for rank in ranks})

    def num_hosts(self, ranks: Collection[int]) -> int:
        """Number of hosts that these ranks are on."""
        return len({self.seats.hosts[rank] for rank in ranks})

    def load_of(self, expert: int) -> float:
        """Load of one copy of an expert, in rows."""
        return self.load[expert] / len(self.ranks[expert])

    def cheapest(self, rank: int) -> int:
        """Expert of an overfull rank that is cheapest to drop, preferably one with other copies."""
        return min(
            self.experts[rank],
            key=lambda expert: (
                len(self.ranks[expert]) == 1,
                self.load[expert] / len(self.ranks[expert]),
                expert,
            ),
        )

    def take(self, expert: int, rank: int) -> None:
        """Remove a copy of an expert from a rank."""
        self.ranks[expert].discard(rank)
        self.experts[rank].discard(expert)

    def put(self, expert: int, rank: int) -> None:
        """Add a copy of an expert on a rank."""
        self.ranks[expert].add(rank)
        self.experts[rank].add(expert)
