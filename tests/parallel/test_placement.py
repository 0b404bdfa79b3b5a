from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.placement import Placement, assign_experts, cover


@pytest.mark.parametrize("strategy", ["linear", "round_robin"])
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 1), (8, 2), (8, 4), (8, 3), (7, 3), (5, 5)])
def test_every_expert_has_one_owner_and_loads_differ_by_one_at_most(
    num_experts: int, num_ranks: int, strategy: str
) -> None:
    placement = assign_experts(num_experts, num_ranks, strategy)  # type: ignore[arg-type]
    held = [placement.experts_of(rank) for rank in range(num_ranks)]
    assert sorted(expert for experts in held for expert in experts) == list(range(num_experts))
    assert max(map(len, held)) - min(map(len, held)) <= 1
    for expert, owner in enumerate(placement.owners):
        assert held[owner][placement.numbers_at(owner)[expert]] == expert
        assert [placement.numbers_at(rank)[expert] >= 0 for rank in range(num_ranks)].count(True) == 1


def test_strategies() -> None:
    assert assign_experts(4, 2, "linear") == Placement((0, 0, 1, 1), 2)
    assert assign_experts(4, 2, "round_robin") == Placement((0, 1, 0, 1), 2)


def test_too_many_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="4 experts cannot be spread over 5 ranks"):
        assign_experts(4, 5)


def test_the_experts_of_a_lost_member_go_to_those_who_have_the_fewest() -> None:
    assert cover(8, [{0, 1, 2}, {6, 7}], [0, 0]).owners == (0, 0, 0, 1, 0, 1, 1, 1)
    assert cover(8, [{0, 1, 2, 3}, {}], [0, 0]).owners == (0, 0, 0, 0, 1, 1, 1, 1)
    assert cover(6, [{0, 1, 2}, {3, 4, 5}, {}], [0, 0, 0]).owners == (0, 0, 2, 1, 1, 2), (
        "a newcomer gets its share"
    )
    assert cover(5, [{}, {1, 2, 3, 4, 99}], [0, 0]).owners == (0, 1, 1, 1, 0), (
        "who holds more gets the odd one"
    )
    assert cover(4, [{}, {}], [0, 0]).owners == (0, 1, 0, 1)
    assert cover(4, [{0, 1, 2, 3}] * 2, [0, 0]).owners in {(0, 0, 1, 1), (1, 1, 0, 0)}


def test_room_is_a_limit() -> None:
    assert cover(8, [{0, 1, 2, 3}, {4, 5, 6, 7}, {}], [0, 2, 1]).owners.count(0) == 5
    with pytest.raises(ValueError, match=r"8 experts do not fit on instances that have room for \[5, 2\]"):
        cover(8, [{}, {}], [5, 2])


@st.composite
def meshes(draw: st.DrawFn) -> tuple[int, list[set[int]], list[int]]:
    num_experts, size = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    experts = st.sets(st.integers(0, num_experts - 1))
    held = draw(st.lists(experts, min_size=size, max_size=size))
    room = draw(st.lists(st.integers(0, num_experts), min_size=size, max_size=size))
    return num_experts, held, room


@given(meshes())
def test_cover_is_even_and_moves_little(mesh: tuple[int, list[set[int]], list[int]]) -> None:
    num_experts, held, room = mesh
    limits = [limit or num_experts for limit in room]
    if sum(limits) < num_experts:
        with pytest.raises(ValueError, match="do not fit"):
            cover(num_experts, held, room)
        return
    placement = cover(num_experts, held, room)
    assert placement == cover(num_experts, held, room)
    loads = [len(placement.experts_of(rank)) for rank in range(len(held))]
    assert sum(loads) == num_experts
    assert all(load <= limit for load, limit in zip(loads, limits, strict=True))
    for load, limit in zip(loads, limits, strict=True):
        assert load == limit or max(loads) - load <= 1, "only who has no room may have fewer"
    if sum(map(len, held)) == len(set().union(*held)):  # nothing twice: then it is the least possible
        best = max(
            sum(owner in range(len(held)) and expert in held[owner] for expert, owner in enumerate(owners))
            for owners in product(range(len(held)), repeat=num_experts)
            if sorted(map(owners.count, range(len(held)))) == sorted(loads)
            and all(owners.count(rank) <= limit for rank, limit in enumerate(limits))
        )
        assert sum(expert in held[owner] for expert, owner in enumerate(placement.owners)) == best
