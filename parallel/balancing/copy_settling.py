"""Copies of a layer's experts and their first ranks, by the experts' loads (pure)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from parallel.balancing.layer_copies import LayerCopies


class CopySettling:
    """Copies in proportion to the loads of experts: with few moves, or dealt anew."""

    def __init__(self, layer: LayerCopies) -> None:
        """``layer`` is changed in place."""
        self._layer = layer

    def settle(self) -> None:
        """Set each expert's number of copies in proportion to its load."""
        counts = self._counts()
        for expert, count in enumerate(counts):
            self._drop_surplus(expert, count)
        for rank, slots in enumerate(self._layer.slots):
            while len(self._layer.experts[rank]) > slots:
                self._layer.take(self._layer.cheapest(rank), rank)
        self._layer.measure()
        missing = [
            (self._layer.load[expert] / count, expert)
            for expert, count in enumerate(counts)
            for _ in range(count - len(self._layer.ranks[expert]))
        ]
        for _, expert in sorted(missing, key=lambda each: (-each[0], each[1])):
            self._add(expert)
        self._fill_empty()
        self._spread()
        self._layer.measure()

    def deal(self, factors: Sequence[float], without: int) -> None:
        """Place the copies of all experts anew, the heaviest first, where the load is least.

        ``factors``: on the loads of the experts, for their order. ``without``: number of the expert that
        gets a copy less, among those with several, the busiest first, from 1 on; 0: none.
        """
        counts = self._counts()
        several = [expert for expert, count in enumerate(counts) if count > self._layer.least]
        for expert in sorted(several, key=lambda expert: -self._layer.load[expert])[
            max(0, without - 1) : without
        ]:
            counts[expert] -= 1
        each = [load / count for load, count in zip(self._layer.load, counts, strict=True)]
        for expert, ranks in enumerate(self._layer.ranks):
            for rank in list(ranks):
                self._layer.take(expert, rank)
        self._layer.loads = [0.0] * len(self._layer.slots)
        for expert in sorted(
            range(len(counts)), key=lambda expert: (-each[expert] * factors[expert], expert)
        ):
            for _ in range(counts[expert]):
                self._add(expert, each[expert])
        self._fill_empty()
        self._spread()
        self._layer.measure()

    def _counts(self) -> list[int]:
        """Copies per expert: each next copy goes to the highest load per copy.

        Of equal ones where there are fewest copies: all are equal while no load is known.
        """
        size = len(self._layer.slots)
        counts = [self._layer.least] * len(self._layer.load)
        queue = [
            (-load / self._layer.least, self._layer.least, expert)
            for expert, load in enumerate(self._layer.load)
        ]
        heapq.heapify(queue)
        for _ in range(self._layer.total - sum(counts)):
            while queue and counts[queue[0][-1]] >= size:
                heapq.heappop(queue)
            if not queue:
                break
            expert = queue[0][-1]
            counts[expert] += 1
            heapq.heapreplace(queue, (-self._layer.load[expert] / counts[expert], counts[expert], expert))
        return counts

    def _drop_surplus(self, expert: int, count: int) -> None:
        """Remove surplus copies, first from instances with several, then from full or busy ranks."""
        while len(self._layer.ranks[expert]) > count:
            instances = [self._layer.seats.instances[rank] for rank in self._layer.ranks[expert]]
            rank = max(
                self._layer.ranks[expert],
                key=lambda rank: (
                    instances.count(self._layer.seats.instances[rank]),
                    len(self._layer.experts[rank]) - self._layer.slots[rank],
                    self._layer.loads[rank],
                    -rank,
                ),
            )
            self._layer.take(expert, rank)

    def _add(self, expert: int, each: float | None = None) -> None:
        """Add a copy on a rank with room and low load, on another instance.

        ``each``: its load; None if the load of the others falls with it.
        """
        free = [
            rank for rank, slots in enumerate(self._layer.slots) if len(self._layer.experts[rank]) < slots
        ]
        without = [rank for rank in free if rank not in self._layer.ranks[expert]]
        if not without:
            self._make_way(expert, free)
            return
        instances = {self._layer.seats.instances[rank] for rank in self._layer.ranks[expert]}
        hosts = {self._layer.seats.hosts[rank] for rank in self._layer.ranks[expert]}
        short = len(instances) < self._layer.least
        is_new = each is not None
        if each is None:
            each = self._layer.load[expert] / (len(self._layer.ranks[expert]) + 1)
        rank = min(
            without,
            key=lambda rank: (
                short and self._layer.seats.instances[rank] in instances,
                self._layer.seats.hosts[rank] in hosts,
                self._layer.seats.instances[rank] in instances,
                self._layer.loads[rank]
                + (0.0 if is_new or rank in self._layer.held[expert] else 0.02 * each),
                rank,
            ),
        )
        self._layer.put(expert, rank)
        self._layer.loads[rank] += each

    def _make_way(self, expert: int, free: Sequence[int]) -> None:
        """Add a copy though only ranks that hold this expert have room.

        One of them gets another expert, from a rank without this one.
        """
        for rank in sorted(free, key=lambda rank: (self._layer.loads[rank], rank)):
            for other in sorted(
                range(len(self._layer.slots)), key=lambda other: (self._layer.loads[other], other)
            ):
                movable = self._layer.experts[other] - self._layer.experts[rank]
                if expert in self._layer.experts[other] or not movable or not self._layer.slots[other]:
                    continue
                moved = min(movable, key=lambda each: (self._layer.load[each], each))
                self._layer.take(moved, other)
                self._layer.put(moved, rank)
                self._layer.put(expert, other)
                return

    def _fill_empty(self) -> None:
        """Give each rank without an expert one of a rank with most."""
        for rank, experts in enumerate(self._layer.experts):
            if experts:
                continue
            giver = max(
                range(len(self._layer.slots)), key=lambda other: (len(self._layer.experts[other]), -other)
            )
            if len(self._layer.experts[giver]) > 1:
                expert = self._layer.cheapest(giver)
                self._layer.take(expert, giver)
                self._layer.put(expert, rank)

    def _spread(self) -> None:
        """Swap copies of experts that are on too few instances for such of other instances."""
        for expert, ranks in enumerate(self._layer.ranks):
            while len(ranks) >= self._layer.least > self._layer.num_instances(ranks):
                swap = self._swap_to_spread(expert)
                if swap is None:
                    break
                rank, other, taken = swap
                self._layer.take(expert, rank)
                self._layer.put(expert, other)
                if taken >= 0:
                    self._layer.take(taken, other)
                    self._layer.put(taken, rank)

    def _swap_to_spread(self, expert: int) -> tuple[int, int, int] | None:
        """Ranks that a copy goes from and to, and an expert in return, or -1."""
        instances = [self._layer.seats.instances[rank] for rank in self._layer.ranks[expert]]
        for rank in sorted(self._layer.ranks[expert]):
            if instances.count(self._layer.seats.instances[rank]) < 2:
                continue
            for other in range(len(self._layer.slots)):
                if self._layer.seats.instances[other] in instances:
                    continue
                if len(self._layer.experts[other]) < self._layer.slots[other]:
                    return rank, other, -1
                for taken in sorted(self._layer.experts[other] - self._layer.experts[rank]):
                    after = self._layer.num_instances(self._layer.ranks[taken] - {other} | {rank})
                    if after >= min(self._layer.least, self._layer.num_instances(self._layer.ranks[taken])):
                        return rank, other, taken
        return None
