"""The algorithm that DeepSeek published for the balance of experts (EPLB), to compare with.

Written from its description: where hosts matter, groups of experts are packed into hosts, then experts are
copied inside each; everywhere the expert whose copy has most load is copied again, until all slots are used,
and copies are packed into ranks, the heaviest first, each into the rank with least load that has a slot left.
"""

from __future__ import annotations

from collections.abc import Sequence


def packed(weights: Sequence[float], num_packs: int) -> list[int]:
    """The pack of each weight: the heaviest first to the lightest pack with room."""
    each, loads, counts = len(weights) // num_packs, [0.0] * num_packs, [0] * num_packs
    found = [0] * len(weights)
    for number in sorted(range(len(weights)), key=lambda number: -weights[number]):
        pack = min((pack for pack in range(num_packs) if counts[pack] < each), key=lambda pack: loads[pack])
        found[number] = pack
        loads[pack] += weights[number]
        counts[pack] += 1
    return found


def copies(weights: Sequence[float], num_slots: int) -> list[int]:
    """Expert of each slot."""
    slots, counts = list(range(len(weights))), [1] * len(weights)
    for _ in range(num_slots - len(weights)):
        expert = max(range(len(weights)), key=lambda expert: weights[expert] / counts[expert])
        slots.append(expert)
        counts[expert] += 1
    return slots


def rank_loads(
    weights: Sequence[float], num_slots: int, num_ranks: int
) -> tuple[list[float], list[set[int]]]:
    """Load of each rank, and the experts that it holds."""
    slots = copies(weights, num_slots)
    each = [weights[expert] / slots.count(expert) for expert in slots]
    loads, held = [0.0] * num_ranks, [set[int]() for _ in range(num_ranks)]
    for expert, weight, rank in zip(slots, each, packed(each, num_ranks), strict=True):
        loads[rank] += weight
        held[rank].add(expert)
    return loads, held
