"""Placement of experts on ranks: which ranks hold which expert, per layer (pure).

The first group of a mesh is placed by :func:`assign_experts`, and its copies by
:func:`parallel.balancing.balance.with_copies`. Strategies have vLLM's names: ``linear`` gives each rank a run
of neighbours, ``round_robin`` deals them out like cards. Numbers that do not divide give the first ranks one
expert more. Later groups are placed by :func:`cover`, which moves as little as it can.

A *rank* is here a member's index in its group, from 0 without gaps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

import msgspec

Strategy = Literal["linear", "round_robin"]

_LONGEST_CHAIN = 100
"""Maximum length of a chain of handed-on experts that keeps one expert in place."""


Copies = tuple[tuple[int, ...], ...]
"""Ranks that hold each expert of a layer, ascending."""


class Placement(msgspec.Struct, frozen=True):
    """Ranks that hold the experts of each layer."""

    owners: tuple[int, ...]
    """Rank that holds each expert; empty where layers differ or experts have replicas."""
    num_ranks: int
    replicas: tuple[Copies, ...] = ()
    """By layer with experts; empty where all have one owner, the same in each layer."""

    @property
    def num_experts(self) -> int:
        return len(self.replicas[0] if self.replicas else self.owners)

    @property
    def num_layers(self) -> int | None:
        """Layers with experts; None if all are alike."""
        return len(self.replicas) or None

    def copies(self, layer: int = 0) -> Copies:
        """Ranks that hold each expert of a layer; only layers with experts are counted."""
        return self.replicas[layer] if self.replicas else tuple((owner,) for owner in self.owners)

    def experts_of(self, rank: int, layer: int = 0) -> list[int]:
        """The experts of a rank, ascending: expert ``experts_of(rank)[i]`` is its local number i."""
        return [expert for expert, ranks in enumerate(self.copies(layer)) if rank in ranks]

    def numbers_at(self, rank: int, layer: int = 0) -> list[int]:
        """Each expert's number among those of a rank; -1 where it is elsewhere."""
        numbers = [-1] * self.num_experts
        for number, expert in enumerate(self.experts_of(rank, layer)):
            numbers[expert] = number
        return numbers


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


def assign_experts(num_experts: int, num_ranks: int, strategy: Strategy = "linear") -> Placement:
    """Spread the experts of a layer over the ranks.

    Raises:
        ValueError: there are fewer experts than ranks, so that some would hold none.
    """
    if num_experts < num_ranks:
        raise ValueError(
            f"{num_experts} experts cannot be spread over {num_ranks} ranks: use at most {num_experts}, or "
            "--no-enable-expert-parallel"
        )
    if strategy == "round_robin":
        return Placement(tuple(expert % num_ranks for expert in range(num_experts)), num_ranks)
    share, more = divmod(num_experts, num_ranks)
    owners = [rank for rank in range(num_ranks) for _ in range(share + (rank < more))]
    return Placement(tuple(owners), num_ranks)


def cover(num_experts: int, held: Sequence[Collection[int]], room: Sequence[int]) -> Placement:
    """Spread the experts over members who hold some of them already.

    ``held[rank]`` are the experts of a member, ``room[rank]`` is how many it can own (0: any number). Loads
    are as equal as the room allows: to within one, where it is no limit. Of the experts as many stay
    where they are as loads permit (for certain when no expert is held twice); the others go to those who have
    the fewest. The same arguments, the same placement.

    Raises:
        ValueError: there is not room for all.
    """
    limits = [limit or num_experts for limit in room]
    if sum(limits) < num_experts:
        raise ValueError(f"{num_experts} experts do not fit on instances that have room for {limits}")
    holdings = [{expert for expert in experts if 0 <= expert < num_experts} for experts in held]
    quotas = _quotas(num_experts, limits, [len(experts) for experts in holdings])
    owners = _keep(num_experts, holdings, quotas)
    counts = Counter(owners)
    loads = [counts[rank] for rank in range(len(quotas))]
    for expert, owner in enumerate(owners):
        if owner is None:
            below = [rank for rank, quota in enumerate(quotas) if loads[rank] < quota]
            rank = min(below, key=lambda rank: (loads[rank], rank))
            owners[expert] = rank
            loads[rank] += 1
    return Placement(tuple(owner for owner in owners if owner is not None), len(quotas))


def _quotas(num_experts: int, limits: Sequence[int], holdings: Sequence[int]) -> list[int]:
    """Number of experts that each member is to own.

    Where one more or less is open, who holds more gets more.
    """
    level = 0
    while sum(min(limit, level + 1) for limit in limits) <= num_experts and level < num_experts:
        level += 1
    quotas = [min(limit, level) for limit in limits]
    open_to_more = [rank for rank, limit in enumerate(limits) if limit > level]
    open_to_more.sort(key=lambda rank: (-holdings[rank], rank))
    for rank in open_to_more[: num_experts - sum(quotas)]:
        quotas[rank] += 1
    return quotas


def _keep(num_experts: int, holdings: Sequence[Collection[int]], quotas: Sequence[int]) -> list[int | None]:
    """Owners for as many experts as possible among their holders.

    The matching is found by augmenting paths.
    """
    owners: list[int | None] = [None] * num_experts
    owned: list[list[int]] = [[] for _ in quotas]
    holders: list[list[int]] = [[] for _ in owners]
    for rank, holding in enumerate(holdings):
        for expert in holding:
            holders[expert].append(rank)

    def give(expert: int, tried: set[int]) -> bool:
        """Give an expert to a holder with room, or make room by handing another on."""
        for rank in holders[expert]:
            if rank in tried or len(tried) == _LONGEST_CHAIN:
                continue
            tried.add(rank)
            if len(owned[rank]) >= quotas[rank]:
                handed = next((other for other in owned[rank] if give(other, tried)), None)
                if handed is None:
                    continue
                owned[rank].remove(handed)
            owned[rank].append(expert)
            owners[expert] = rank
            return True
        return False

    for expert in range(num_experts):
        give(expert, set())
    return owners


def held_by_rank(placement: Placement, ranks: int, index: int) -> list[list[list[int]]]:
    """The experts of one instance, ascending, by tensor-parallel rank and layer.

    There is one layer where all are alike.

    Args:
        placement: over all ranks of all instances, those of an instance side by side.
        ranks: tensor-parallel ranks of each instance.
        index: the instance's number in its group.
    """
    layers = range(placement.num_layers or 1)
    return [[placement.experts_of(index * ranks + rank, layer) for layer in layers] for rank in range(ranks)]


def rank_loads(load: Sequence[float], copies: Copies, size: int) -> list[float]:
    """Rows of each rank in a layer; copies share those of an expert evenly."""
    loads = [0.0] * size
    for rows, ranks in zip(load, copies, strict=True):
        for rank in ranks:
            loads[rank] += rows / len(ranks)
    return loads
