from __future__ import annotations

import pytest

from parallel.placement import Placement, place


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 1), (8, 2), (8, 4), (8, 3), (7, 3), (5, 5)])
def test_every_expert_has_one_owner_and_loads_differ_by_one_at_most(
    num_experts: int, num_ranks: int, strategy: str
) -> None:
    placement = place(num_experts, num_ranks, strategy)  # type: ignore[arg-type]
    held = [placement.experts_of(rank) for rank in range(num_ranks)]
    assert sorted(expert for experts in held for expert in experts) == list(range(num_experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for expert, (owner, local) in enumerate(zip(placement.owners, placement.local_numbers(), strict=True)):
        assert held[owner][local] == expert


def test_strategies() -> None:
    assert place(4, 2, "linear") == Placement((0, 0, 1, 1), 2)
    assert place(4, 2, "round_robin") == Placement((0, 1, 0, 1), 2)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="4 experts cannot be spread over 5 ranks"):
        place(4, 5)
