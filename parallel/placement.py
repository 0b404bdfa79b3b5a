"""Which instance holds which expert (pure).

Strategies have vLLM's names: ``linear`` gives each rank a run of neighbours, ``round_robin`` deals them
out like cards. Numbers that do not divide give the first ranks one expert more.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Strategy = Literal["linear", "round_robin"]


class Placement(msgspec.Struct, frozen=True):
    """Owners of the experts of one layer."""

    owners: tuple[int, ...]
    """Rank that holds each expert."""
    num_ranks: int

    def experts_of(self, rank: int) -> list[int]:
        """The experts of a rank, ascending: expert ``experts_of(rank)[i]`` is its local number i."""
        return [expert for expert, owner in enumerate(self.owners) if owner == rank]

    def local_numbers(self) -> list[int]:
        """Each expert's number among those of its owner."""
        counts = [0] * self.num_ranks
        numbers = []
        for owner in self.owners:
            numbers.append(counts[owner])
            counts[owner] += 1
        return numbers


def place(num_experts: int, num_ranks: int, strategy: Strategy = "linear") -> Placement:
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
