"""Swaps of experts between ranks of a layer, which relieve the most loaded one (pure)."""

from __future__ import annotations

from parallel.balancing.layer_copies import LayerCopies

CLOSE = 1.005
"""Ratio of greatest to ideal rank load up to which a layer stays unchanged."""
PARTNERS = 8
"""Number of least loaded ranks tried as swap partners of the most loaded rank."""
MOST_SWAPS = 400
"""Maximum number of expert swaps in one layer per balancing."""


class LoadSwaps:
    """Swaps and changes of copies that lower the greatest load of a rank."""

    def __init__(self, layer: LayerCopies) -> None:
        """``layer`` is changed in place."""
        self._layer = layer

    def refine(self) -> None:
        """Swap experts of the most loaded rank for others with less load."""
        goal = CLOSE * sum(self._layer.load) / len(self._layer.slots)
        for _ in range(MOST_SWAPS):
            hot = max(range(len(self._layer.slots)), key=lambda rank: (self._layer.loads[rank], -rank))
            if self._layer.loads[hot] <= goal or not (self._relieve(hot) or self._recount(hot)):
                return

    def _relieve(self, hot: int) -> bool:
        """Make the swap that relieves this rank most; False if none does."""
        best: tuple[float, int, int, int] | None = None
        limit = self._layer.loads[hot] * (1 - 1e-6)
        ranks = sorted(range(len(self._layer.slots)), key=lambda rank: (self._layer.loads[rank], rank))
        for cold in ranks[:PARTNERS]:
            for given in self._layer.experts[hot] - self._layer.experts[cold]:
                for taken in (*(self._layer.experts[cold] - self._layer.experts[hot]), -1):
                    if taken < 0 and len(self._layer.experts[cold]) >= self._layer.slots[cold]:
                        continue
                    shift = self._layer.load_of(given) - (self._layer.load_of(taken) if taken >= 0 else 0.0)
                    worse = max(self._layer.loads[hot] - shift, self._layer.loads[cold] + shift)
                    if shift > 0 and worse < limit and self._may_swap(given, taken, hot, cold):
                        found = (worse, cold, given, taken)
                        best = found if best is None or found < best else best
        if best is None:
            return False
        self._swap(hot, *best[1:])
        return True

    def _swap(self, hot: int, cold: int, given: int, taken: int) -> None:
        shift = self._layer.load_of(given) - (self._layer.load_of(taken) if taken >= 0 else 0.0)
        self._layer.loads[hot] -= shift
        self._layer.loads[cold] += shift
        self._layer.take(given, hot)
        self._layer.put(given, cold)
        if taken >= 0:
            self._layer.take(taken, cold)
            self._layer.put(taken, hot)

    def _recount(self, hot: int) -> bool:
        """Relieve this rank by dropping or adding a copy; False if neither helps."""
        best: tuple[float, int, int] | None = None
        limit = self._layer.loads[hot] * (1 - 1e-6)
        free = sum(map(len, self._layer.ranks)) < self._layer.total
        for expert in self._layer.experts[hot]:
            ranks, count = self._layer.ranks[expert], len(self._layer.ranks[expert])
            changes = []
            if (
                count > 1
                and self._layer.num_instances(ranks - {hot}) >= self._layer.least
                and len(self._layer.experts[hot]) > 1
            ):
                changes.append((hot, count - 1))
            if free:
                room = [
                    rank
                    for rank, slots in enumerate(self._layer.slots)
                    if rank not in ranks and len(self._layer.experts[rank]) < slots
                ]
                changes += [(rank, count + 1) for rank in room]
            for rank, then in changes:
                each, before = self._layer.load[expert] / then, self._layer.load[expert] / count
                held = ranks - {rank} if then < count else ranks | {rank}
                loads = [
                    self._layer.loads[other] + each - (before if other in ranks else 0.0) for other in held
                ]
                if then < count:
                    loads.append(self._layer.loads[hot] - before)
                if max(loads) < limit and (best is None or (max(loads), expert, rank) < best):
                    best = max(loads), expert, rank
        if best is None:
            return False
        _, expert, rank = best
        if rank == hot:
            self._layer.take(expert, hot)
        else:
            self._layer.put(expert, rank)
        self._layer.measure()
        return True

    def _may_swap(self, given: int, taken: int, hot: int, cold: int) -> bool:
        """Whether a swap leaves both experts on enough instances and no fewer hosts."""
        if self._layer.seats.instances[hot] == self._layer.seats.instances[cold]:
            return True
        moved = [(given, hot, cold), *([(taken, cold, hot)] if taken >= 0 else [])]
        return all(
            self._layer.num_instances(after := self._layer.ranks[expert] - {old} | {new}) >= self._layer.least
            and self._layer.num_hosts(after) >= self._layer.num_hosts(self._layer.ranks[expert])
            for expert, old, new in moved
        )
