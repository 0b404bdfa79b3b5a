"""Expert load balancing (pure): chooses replicas and their ranks from measured expert loads.

Each layer is balanced by itself. An expert with much load gets replicas, between which its rows are split
evenly (:func:`parallel.replicas.serving`). :func:`balance` begins with what the ranks hold, brings the number
of copies of each expert up to its share, then swaps experts of the most loaded rank as long as that makes a
layer's slowest rank faster. A layer whose gain does not pay for its moves stays as it is.

A *rank* is a member's index in its group. A *row* is a token that goes through one expert; the load of a
rank in a layer is its rows there. So *balancedness* is the mean over the maximum of loads.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Collection, Sequence

import msgspec

from parallel.placement import Copies

ROWS_PER_MOVE = 1000.0
"""Cost of moving an expert's weights, as the number of rows computed in that time.

Bytes that are read and operations of a row both grow with an expert's size, so this number does not.
"""
CLOSE = 1.005
"""Ratio of greatest to ideal rank load up to which a layer stays unchanged."""
WORSE = 1.01
"""Factor by which a fresh placement must lower the greatest load to be taken."""
DEALS = 8
SHUFFLED = 0.1
"""Strength of the random change to the order in which a fresh placement goes."""
WITHOUT = 4
"""Period of variants: all copies, or one fewer of one of three busiest experts."""
PARTNERS = 8
"""Number of least loaded ranks tried as swap partners of the most loaded rank."""
NEXT = 1e-6
"""Artificial load difference that orders a rank's experts before any load is measured."""
MOST_SWAPS = 400
"""Maximum number of expert swaps in one layer per balancing."""


class Seats(msgspec.Struct, frozen=True):
    """The ranks that hold experts: their capacity, instances and hosts."""

    room: tuple[int, ...]
    """Maximum experts of one layer on each rank; 0: unlimited."""
    instances: tuple[int, ...]
    """Number of the instance that each rank belongs to: an instance dies as a whole."""
    hosts: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.room)


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions under which rebalancing of experts may change a layer's placement."""

    num_redundant: int = 0
    """Number of redundant expert copies per layer."""
    survive: int = 0
    """Number of instance deaths that every expert shall survive, where room suffices."""
    deviations: float = 4.0
    """Standard deviations of the load that a gain must exceed, since less may be chance."""
    horizon: float = 1.0
    """Rows expected until the next change, per row in the measured loads."""
    rows_per_move: float = ROWS_PER_MOVE
    least_gain: float = 0.03
    """Minimum relative drop of the greatest load, per layer and over all layers."""
    most_moves: int | None = None
    """Maximum expert copies that one change may read, over all layers.

    Those that must be read are not counted.
    """


class Balanced(msgspec.Struct, frozen=True):
    """Result of balancing: the new placement, its moves, and balancedness before and after."""

    layers: tuple[Copies, ...]
    moves: int
    """Number of expert copies that ranks must still read."""
    before: float
    """Balancedness of the present placement, over all layers."""
    after: float


def balance(loads: Sequence[Sequence[float]], held: Sequence[Copies], seats: Seats, terms: Terms) -> Balanced:
    """Choose a better placement of the experts of all layers, with few moves.

    ``loads[layer][expert]`` are rows; ``held[layer][expert]`` are ranks. The same arguments, the same
    placement. Layers that must change, since experts are missing or too few of them, always do.

    Raises:
        ValueError: there is not room for all experts.
    """
    changes = [_change(load, copies, seats, terms) for load, copies in zip(loads, held, strict=True)]
    total = sum(change.most_before for change in changes)
    chosen = {number for number, change in enumerate(changes) if change.must}
    left = terms.most_moves
    pays = [number for number, change in enumerate(changes) if not change.must and change.pays(terms)]
    for number in sorted(pays, key=lambda number: (-changes[number].gain / changes[number].moves, number)):
        if left is None or changes[number].moves <= left:
            chosen.add(number)
            left = None if left is None else left - changes[number].moves
    gain = sum(changes[number].gain for number in chosen)
    if not any(change.must for change in changes) and gain < terms.least_gain * total:
        chosen = set()
    for number, change in enumerate(changes):
        if number not in chosen:
            changes[number] = change.undone()
    return Balanced(
        tuple(change.copies for change in changes),
        sum(change.moves for change in changes),
        balancedness([(change.mean, change.most_before) for change in changes]),
        balancedness([(change.mean, change.most_after) for change in changes]),
    )


def with_copies(held: Copies, seats: Seats, terms: Terms) -> Copies:
    """Initial placement of a layer's expert replicas, before any load is measured.

    Each expert has as many copies as the others or one more, the first ones of each rank first: so their
    copies find room elsewhere. The same arguments, the same copies.

    Raises:
        ValueError: there is not room for all experts.
    """
    slots, total = _slots(len(held), seats, terms)
    least = least_copies(len(held), seats, terms)
    numbers: Counter[tuple[int, ...]] = Counter()
    load = []
    for ranks in held:
        load.append(1.0 - NEXT * numbers[ranks])
        numbers[ranks] += 1
    layer = _Layer(load, held, seats, slots, total, least)
    layer.settle_copies()
    return layer.copies()


def balancedness(layers: Sequence[tuple[float, float]]) -> float:
    """Mean over maximum of loads, summed over layers of (mean, maximum); 1 without load."""
    most = sum(each for _, each in layers)
    return sum(mean for mean, _ in layers) / most if most > 0 else 1.0


def rank_loads(load: Sequence[float], copies: Copies, size: int) -> list[float]:
    """Rows of each rank in a layer; copies share those of an expert evenly."""
    loads = [0.0] * size
    for rows, ranks in zip(load, copies, strict=True):
        for rank in ranks:
            loads[rank] += rows / len(ranks)
    return loads


def keep(held: Sequence[Copies], room: Sequence[int]) -> tuple[Copies, ...]:
    """Placement with least reading after a loss: held copies stay, missing experts get ranks.

    Nothing is read that somebody holds: a group that lost a member goes on at once.

    Raises:
        ValueError: there is not room for all experts.
    """
    return tuple(_kept(copies, room) for copies in held)


def _kept(copies: Copies, room: Sequence[int]) -> Copies:
    ranks = [set(each) for each in copies]
    counts = [sum(rank in each for each in ranks) for rank in range(len(room))]

    def is_full(rank: int) -> bool:
        return 0 < room[rank] <= counts[rank]

    def take(rank: int, expert: int) -> None:
        ranks[expert].remove(rank)
        counts[rank] -= 1

    def on(rank: int) -> list[int]:
        """The experts of a rank, those with most other copies first."""
        return sorted((e for e, each in enumerate(ranks) if rank in each), key=lambda e: (-len(ranks[e]), -e))

    for rank, limit in enumerate(room):
        while 0 < limit < counts[rank]:
            take(rank, on(rank)[0])
    for each in ranks:
        if each:
            continue
        if all(map(is_full, range(len(room)))):  # a further copy of another expert gives way
            rank = max(range(len(room)), key=lambda rank: (len(ranks[on(rank)[0]]), -rank))
            if len(ranks[on(rank)[0]]) == 1:
                problem = f"{len(copies)} experts do not fit on instances that have room for {list(room)}"
                raise ValueError(problem)
            take(rank, on(rank)[0])
        rank = min(
            (rank for rank in range(len(room)) if not is_full(rank)), key=lambda rank: (counts[rank], rank)
        )
        each.add(rank)
        counts[rank] += 1
    return tuple(tuple(sorted(each)) for each in ranks)


def least_copies(num_experts: int, seats: Seats, terms: Terms) -> int:
    """Minimum copies per expert, each on another instance, that the ranks' room allows."""
    slots, total = _slots(num_experts, seats, terms)
    room: dict[int, int] = {}
    for instance, most in zip(seats.instances, slots, strict=True):
        room[instance] = min(room.get(instance, 0) + most, num_experts)
    wanted = min(terms.survive + 1, len(room))
    return max(1, min(wanted, min(total, sum(room.values())) // num_experts))


class _Change(msgspec.Struct, frozen=True):
    """Proposed placement of one layer, with its gain and its number of moves."""

    copies: Copies
    before: Copies
    moves: int
    must: bool
    """Whether the change is required: experts lack copies, or a rank is too full."""
    mean: float
    most_before: float
    most_after: float

    @property
    def gain(self) -> float:
        """Drop of the greatest rank load, in rows."""
        return self.most_before - self.most_after

    def pays(self, terms: Terms) -> bool:
        """Whether the rows saved until the next change outweigh reading the moved experts."""
        least = max(terms.least_gain * self.most_before, terms.deviations * self.most_before**0.5)
        cost = terms.rows_per_move * self.moves
        return self.moves > 0 and self.gain > least and self.gain * terms.horizon > cost

    def undone(self) -> _Change:
        """The same change with the layer left at its present placement."""
        return msgspec.structs.replace(self, copies=self.before, moves=0, most_after=self.most_before)


def _change(load: Sequence[float], held: Copies, seats: Seats, terms: Terms) -> _Change:
    slots, total = _slots(len(load), seats, terms)
    layer = _Layer(load, held, seats, slots, total, least_copies(len(load), seats, terms))
    must, is_crowded = not layer.is_sound(), layer.is_crowded()
    layer.settle_copies()
    layer.refine()
    copies, is_sound, least = layer.copies(), layer.is_sound(), layer.greatest / WORSE
    chance = random.Random(0)  # the same for all that ask again
    for number in range(DEALS if layer.greatest > WORSE * CLOSE * sum(load) / seats.size else 0):
        layer.deal([1 + SHUFFLED * number * chance.random() for _ in load], number % WITHOUT)
        layer.refine()
        if layer.greatest < least and layer.is_sound():
            copies, is_sound, least = layer.copies(), True, layer.greatest
    must = must and (is_sound or not all(held) or is_crowded)
    moves = sum(len(set(new) - set(old)) for new, old in zip(copies, held, strict=True))
    return _Change(
        copies,
        held,
        moves,
        must,
        sum(load) / seats.size,
        max(rank_loads(load, held, seats.size)),
        max(rank_loads(load, copies, seats.size)),
    )


def _slots(num_experts: int, seats: Seats, terms: Terms) -> tuple[list[int], int]:
    """Per-rank capacity for a layer's experts, equal if possible, and total copies.

    Raises:
        ValueError: there is not room for all experts.
    """
    limits = [min(limit or num_experts, num_experts) for limit in seats.room]
    total = min(num_experts + terms.num_redundant, sum(limits))
    if total < num_experts:
        raise ValueError(f"{num_experts} experts do not fit on instances that have room for {limits}")
    level = 0
    while sum(min(limit, level) for limit in limits) < total:
        level += 1
    return [min(limit, level) for limit in limits], total


class _Layer:
    """Working state of the placement of one layer's experts."""

    def __init__(
        self,
        load: Sequence[float],
        held: Copies,
        seats: Seats,
        slots: Sequence[int],
        total: int,
        least: int,
    ) -> None:
        """``slots``: most experts on each rank. ``total``: copies in all. ``least``: of each expert."""
        self._load = load
        self._seats = seats
        self._slots = slots
        self._total = total
        self._least = least
        self._held = [frozenset(ranks) for ranks in held]
        self._ranks = [set(ranks) for ranks in held]
        self._experts: list[set[int]] = [set() for _ in slots]
        for expert, ranks in enumerate(held):
            for rank in ranks:
                self._experts[rank].add(expert)
        self._loads = self._measured()

    def copies(self) -> Copies:
        return tuple(tuple(sorted(ranks)) for ranks in self._ranks)

    def _measured(self) -> list[float]:
        """Load of each rank; an expert that no rank holds adds nothing."""
        return rank_loads(self._load, self.copies(), len(self._slots))

    def is_sound(self) -> bool:
        """Whether each expert has enough copies, and each rank fits and holds some."""
        within = zip(self._experts, self._slots, strict=True)
        fewest = int(self._total >= len(self._slots))
        return all(fewest <= len(experts) <= slots for experts, slots in within) and all(
            self._num_instances(ranks) >= self._least for ranks in self._ranks
        )

    def is_crowded(self) -> bool:
        """Whether a rank has more experts than it has room for."""
        return any(
            0 < room < len(experts) for room, experts in zip(self._seats.room, self._experts, strict=True)
        )

    def _num_instances(self, ranks: Collection[int]) -> int:
        return len({self._seats.instances[rank] for rank in ranks})

    def _num_hosts(self, ranks: Collection[int]) -> int:
        return len({self._seats.hosts[rank] for rank in ranks})

    # ---- how many copies

    def settle_copies(self) -> None:
        """Set each expert's number of copies in proportion to its load."""
        counts = self._counts()
        for expert, count in enumerate(counts):
            self._drop_surplus(expert, count)
        for rank, slots in enumerate(self._slots):
            while len(self._experts[rank]) > slots:
                self._take(self._cheapest(rank), rank)
        self._loads = self._measured()
        missing = [
            (self._load[expert] / count, expert)
            for expert, count in enumerate(counts)
            for _ in range(count - len(self._ranks[expert]))
        ]
        for _, expert in sorted(missing, key=lambda each: (-each[0], each[1])):
            self._add(expert)
        self._fill_empty()
        self._spread()
        self._loads = self._measured()

    def _counts(self) -> list[int]:
        """Copies per expert: each next copy goes to the highest load per copy.

        Of equal ones where there are fewest copies: all are equal while no load is known.
        """
        size = len(self._slots)
        counts = [self._least] * len(self._load)
        queue = [(-load / self._least, self._least, expert) for expert, load in enumerate(self._load)]
        heapq.heapify(queue)
        for _ in range(self._total - sum(counts)):
            while queue and counts[queue[0][-1]] >= size:
                heapq.heappop(queue)
            if not queue:
                break
            expert = queue[0][-1]
            counts[expert] += 1
            heapq.heapreplace(queue, (-self._load[expert] / counts[expert], counts[expert], expert))
        return counts

    def _drop_surplus(self, expert: int, count: int) -> None:
        """Remove surplus copies, first from instances with several, then from full or busy ranks."""
        while len(self._ranks[expert]) > count:
            instances = [self._seats.instances[rank] for rank in self._ranks[expert]]
            rank = max(
                self._ranks[expert],
                key=lambda rank: (
                    instances.count(self._seats.instances[rank]),
                    len(self._experts[rank]) - self._slots[rank],
                    self._loads[rank],
                    -rank,
                ),
            )
            self._take(expert, rank)

    def _cheapest(self, rank: int) -> int:
        """Expert of an overfull rank that is cheapest to drop, preferably one with other copies."""
        return min(
            self._experts[rank],
            key=lambda expert: (
                len(self._ranks[expert]) == 1,
                self._load[expert] / len(self._ranks[expert]),
                expert,
            ),
        )

    def _take(self, expert: int, rank: int) -> None:
        self._ranks[expert].discard(rank)
        self._experts[rank].discard(expert)

    def _put(self, expert: int, rank: int) -> None:
        self._ranks[expert].add(rank)
        self._experts[rank].add(expert)

    def _add(self, expert: int, each: float | None = None) -> None:
        """Add a copy on a rank with room and low load, on another instance.

        ``each``: its load; None if the load of the others falls with it.
        """
        free = [rank for rank, slots in enumerate(self._slots) if len(self._experts[rank]) < slots]
        without = [rank for rank in free if rank not in self._ranks[expert]]
        if not without:
            self._make_way(expert, free)
            return
        instances = {self._seats.instances[rank] for rank in self._ranks[expert]}
        hosts = {self._seats.hosts[rank] for rank in self._ranks[expert]}
        short = len(instances) < self._least
        is_new = each is not None
        if each is None:
            each = self._load[expert] / (len(self._ranks[expert]) + 1)
        rank = min(
            without,
            key=lambda rank: (
                short and self._seats.instances[rank] in instances,
                self._seats.hosts[rank] in hosts,
                self._seats.instances[rank] in instances,
                self._loads[rank] + (0.0 if is_new or rank in self._held[expert] else 0.02 * each),
                rank,
            ),
        )
        self._put(expert, rank)
        self._loads[rank] += each

    def _make_way(self, expert: int, free: Sequence[int]) -> None:
        """Add a copy though only ranks that hold this expert have room.

        One of them gets another expert, from a rank without this one.
        """
        for rank in sorted(free, key=lambda rank: (self._loads[rank], rank)):
            for other in sorted(range(len(self._slots)), key=lambda other: (self._loads[other], other)):
                movable = self._experts[other] - self._experts[rank]
                if expert in self._experts[other] or not movable or not self._slots[other]:
                    continue
                moved = min(movable, key=lambda each: (self._load[each], each))
                self._take(moved, other)
                self._put(moved, rank)
                self._put(expert, other)
                return

    def _fill_empty(self) -> None:
        """Give each rank without an expert one of a rank with most."""
        for rank, experts in enumerate(self._experts):
            if experts:
                continue
            giver = max(range(len(self._slots)), key=lambda other: (len(self._experts[other]), -other))
            if len(self._experts[giver]) > 1:
                expert = self._cheapest(giver)
                self._take(expert, giver)
                self._put(expert, rank)

    def _spread(self) -> None:
        """Swap copies of experts that are on too few instances for such of other instances."""
        for expert, ranks in enumerate(self._ranks):
            while len(ranks) >= self._least > self._num_instances(ranks):
                swap = self._swap_to_spread(expert)
                if swap is None:
                    break
                rank, other, taken = swap
                self._take(expert, rank)
                self._put(expert, other)
                if taken >= 0:
                    self._take(taken, other)
                    self._put(taken, rank)

    def _swap_to_spread(self, expert: int) -> tuple[int, int, int] | None:
        """Ranks that a copy goes from and to, and an expert in return, or -1."""
        instances = [self._seats.instances[rank] for rank in self._ranks[expert]]
        for rank in sorted(self._ranks[expert]):
            if instances.count(self._seats.instances[rank]) < 2:
                continue
            for other in range(len(self._slots)):
                if self._seats.instances[other] in instances:
                    continue
                if len(self._experts[other]) < self._slots[other]:
                    return rank, other, -1
                for taken in sorted(self._experts[other] - self._experts[rank]):
                    after = self._num_instances(self._ranks[taken] - {other} | {rank})
                    if after >= min(self._least, self._num_instances(self._ranks[taken])):
                        return rank, other, taken
        return None

    # ---- where they are

    @property
    def greatest(self) -> float:
        """Load of the slowest rank."""
        return max(self._loads)

    def deal(self, factors: Sequence[float], without: int) -> None:
        """Place the copies of all experts anew, the heaviest first, where the load is least.

        ``factors``: on the loads of the experts, for their order. ``without``: number of the expert that
        gets a copy less, among those with several, the busiest first, from 1 on; 0: none.
        """
        counts = self._counts()
        several = [expert for expert, count in enumerate(counts) if count > self._least]
        for expert in sorted(several, key=lambda expert: -self._load[expert])[max(0, without - 1) : without]:
            counts[expert] -= 1
        each = [load / count for load, count in zip(self._load, counts, strict=True)]
        for expert, ranks in enumerate(self._ranks):
            for rank in list(ranks):
                self._take(expert, rank)
        self._loads = [0.0] * len(self._slots)
        for expert in sorted(
            range(len(counts)), key=lambda expert: (-each[expert] * factors[expert], expert)
        ):
            for _ in range(counts[expert]):
                self._add(expert, each[expert])
        self._fill_empty()
        self._spread()
        self._loads = self._measured()

    def refine(self) -> None:
        """Swap experts of the most loaded rank for others with less load."""
        goal = CLOSE * sum(self._load) / len(self._slots)
        for _ in range(MOST_SWAPS):
            hot = max(range(len(self._slots)), key=lambda rank: (self._loads[rank], -rank))
            if self._loads[hot] <= goal or not (self._relieve(hot) or self._recount(hot)):
                return

    def _each(self, expert: int) -> float:
        """Load of one copy of an expert, in rows."""
        return self._load[expert] / len(self._ranks[expert])

    def _relieve(self, hot: int) -> bool:
        """Make the swap that relieves this rank most; False if none does."""
        best: tuple[float, int, int, int] | None = None
        limit = self._loads[hot] * (1 - 1e-6)
        ranks = sorted(range(len(self._slots)), key=lambda rank: (self._loads[rank], rank))
        for cold in ranks[:PARTNERS]:
            for given in self._experts[hot] - self._experts[cold]:
                for taken in (*(self._experts[cold] - self._experts[hot]), -1):
                    if taken < 0 and len(self._experts[cold]) >= self._slots[cold]:
                        continue
                    shift = self._each(given) - (self._each(taken) if taken >= 0 else 0.0)
                    worse = max(self._loads[hot] - shift, self._loads[cold] + shift)
                    if shift > 0 and worse < limit and self._may_swap(given, taken, hot, cold):
                        found = (worse, cold, given, taken)
                        best = found if best is None or found < best else best
        if best is None:
            return False
        self._swap(hot, *best[1:])
        return True

    def _swap(self, hot: int, cold: int, given: int, taken: int) -> None:
        shift = self._each(given) - (self._each(taken) if taken >= 0 else 0.0)
        self._loads[hot] -= shift
        self._loads[cold] += shift
        self._take(given, hot)
        self._put(given, cold)
        if taken >= 0:
            self._take(taken, cold)
            self._put(taken, hot)

    def _recount(self, hot: int) -> bool:
        """Relieve this rank by dropping or adding a copy; False if neither helps."""
        best: tuple[float, int, int] | None = None
        limit = self._loads[hot] * (1 - 1e-6)
        free = sum(map(len, self._ranks)) < self._total
        for expert in self._experts[hot]:
            ranks, count = self._ranks[expert], len(self._ranks[expert])
            changes = []
            if (
                count > 1
                and self._num_instances(ranks - {hot}) >= self._least
                and len(self._experts[hot]) > 1
            ):
                changes.append((hot, count - 1))
            if free:
                room = [
                    rank
                    for rank, slots in enumerate(self._slots)
                    if rank not in ranks and len(self._experts[rank]) < slots
                ]
                changes += [(rank, count + 1) for rank in room]
            for rank, then in changes:
                each, before = self._load[expert] / then, self._load[expert] / count
                held = ranks - {rank} if then < count else ranks | {rank}
                loads = [self._loads[other] + each - (before if other in ranks else 0.0) for other in held]
                if then < count:
                    loads.append(self._loads[hot] - before)
                if max(loads) < limit and (best is None or (max(loads), expert, rank) < best):
                    best = max(loads), expert, rank
        if best is None:
            return False
        _, expert, rank = best
        if rank == hot:
            self._take(expert, hot)
        else:
            self._put(expert, rank)
        self._loads = self._measured()
        return True

    def _may_swap(self, given: int, taken: int, hot: int, cold: int) -> bool:
        """Whether a swap leaves both experts on enough instances and no fewer hosts."""
        if self._seats.instances[hot] == self._seats.instances[cold]:
            return True
        moved = [(given, hot, cold), *([(taken, cold, hot)] if taken >= 0 else [])]
        return all(
            self._num_instances(after := self._ranks[expert] - {old} | {new}) >= self._least
            and self._num_hosts(after) >= self._num_hosts(self._ranks[expert])
            for expert, old, new in moved
        )
