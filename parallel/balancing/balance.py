"""Expert load balancing (pure): chooses replicas and their ranks from measured expert loads.

Each layer is balanced by itself. An expert with much load gets replicas, between which its rows are split
evenly (:func:`parallel.replicas.serving`). :func:`balance` begins with what the ranks hold, brings the number
of copies of each expert up to its share, then swaps experts of the most loaded rank as long as that makes a
layer's slowest rank faster. A layer whose gain does not pay for its moves stays as it is.

A *rank* is a member's index in its group. A *row* is a token that goes through one expert; the load of a
rank in a layer is its rows there. So *balancedness* is the mean over the maximum of loads.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from parallel.balancing.copy_settling import CopySettling
from parallel.balancing.layer_copies import CopyLimits, LayerCopies
from parallel.balancing.load_swaps import CLOSE, LoadSwaps
from parallel.placement import Copies, Seats, rank_loads

ROWS_PER_MOVE = 1000.0
"""Cost of moving an expert's weights, as the number of rows computed in that time.

Bytes that are read and operations of a row both grow with an expert's size, so this number does not.
"""
WORSE = 1.01
"""Factor by which a fresh placement must lower the greatest load to be taken."""
DEALS = 8
SHUFFLED = 0.1
"""Strength of the random change to the order in which a fresh placement goes."""
WITHOUT = 4
"""Period of variants: all copies, or one fewer of one of three busiest experts."""
NEXT = 1e-6
"""Artificial load difference that orders a rank's experts before any load is measured."""


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
    numbers: Counter[tuple[int, ...]] = Counter()
    load = []
    for ranks in held:
        load.append(1.0 - NEXT * numbers[ranks])
        numbers[ranks] += 1
    layer = LayerCopies(load, held, seats, _limits(len(held), seats, terms))
    CopySettling(layer).settle()
    return layer.copies()


def balancedness(layers: Sequence[tuple[float, float]]) -> float:
    """Mean over maximum of loads, summed over layers of (mean, maximum); 1 without load."""
    most = sum(each for _, each in layers)
    return sum(mean for mean, _ in layers) / most if most > 0 else 1.0


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
    layer = LayerCopies(load, held, seats, _limits(len(load), seats, terms))
    settling, swaps = CopySettling(layer), LoadSwaps(layer)
    must, is_crowded = not layer.is_sound(), layer.is_crowded()
    settling.settle()
    swaps.refine()
    copies, is_sound, least = layer.copies(), layer.is_sound(), layer.greatest / WORSE
    chance = random.Random(0)  # the same for all that ask again
    for number in range(DEALS if layer.greatest > WORSE * CLOSE * sum(load) / seats.size else 0):
        settling.deal([1 + SHUFFLED * number * chance.random() for _ in load], number % WITHOUT)
        swaps.refine()
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


def _limits(num_experts: int, seats: Seats, terms: Terms) -> CopyLimits:
    """Limits on the copies of a layer's experts, by the room that the ranks have.

    Raises:
        ValueError: there is not room for all experts.
    """
    slots, total = _slots(num_experts, seats, terms)
    return CopyLimits(slots, total, least_copies(num_experts, seats, terms))


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
