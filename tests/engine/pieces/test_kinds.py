from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.pieces.kinds import BoundarySlots, PieceKinds, kept_positions
from engine.pieces.pool import hash_block
from tests.engine.pieces.toy import toy_kind


def chain(count: int) -> list[bytes]:
    found: list[bytes] = []
    for number in range(count):
        found.append(hash_block(found[-1] if found else None, [number] * 4))
    return found


def kinds(*grids: int) -> PieceKinds:
    slots = [BoundarySlots(toy_kind(grid, f"toy{index}"), 4 + index) for index, grid in enumerate(grids)]
    return PieceKinds(10, slots, 4)


def test_names_differ_by_kind_grid_and_position() -> None:
    first, second = chain(2)
    names = {
        kind.name(link)
        for kind in (toy_kind(8), toy_kind(16), toy_kind(8, "other"))
        for link in (first, second)
    }
    assert len(names | {first, second}) == 8
    assert all(len(name) == len(first) for name in names)


def test_slots_have_one_numbering() -> None:
    found = kinds(8, 16)
    assert [found.slots_of(kind) for kind in range(3)] == [range(10), range(10, 14), range(14, 19)]
    assert found.num_slots == 19
    assert found.step == 16, "positions that can have both"


def test_without_boundary_kinds_all_known_blocks_are_usable() -> None:
    links = chain(5)
    assert kinds().usable(links, set(links[:3]).__contains__) == 3
    assert kinds().names_behind(links[:3]) == links[:3]
    assert kinds().boundary_names(links[0]) == []


def test_a_context_goes_on_behind_the_last_position_that_has_everything() -> None:
    links, found = chain(7), kinds(8)
    states = [toy_kind(8, "toy0").name(link) for link in links]
    blocks = set(links)
    assert found.usable(links, (blocks | {states[1], states[3]}).__contains__) == 4
    assert found.usable(links, (blocks | {states[1]}).__contains__) == 2
    assert found.usable(links, blocks.__contains__) == 0
    assert found.usable(links, (blocks - {links[2]} | {states[1], states[3]}).__contains__) == 2
    assert found.usable(links, (blocks | {states[2]}).__contains__) == 0, "no position of the grid"
    assert found.names_behind(links[:4]) == [*links[:4], states[3]]
    assert found.names_behind([]) == []


def test_all_kinds_must_be_there() -> None:
    links, found = chain(8), kinds(8, 16)
    first, second = toy_kind(8, "toy0"), toy_kind(16, "toy1")
    has = {*links, first.name(links[7]), first.name(links[3]), second.name(links[3])}
    assert found.usable(links, has.__contains__) == 4


@pytest.mark.parametrize(
    ("grid", "count", "block_size", "error"),
    [(8, 1, 4, "needs 2 slots for toy, not 1"), (24, 4, 16, "no multiple of the 16 tokens.*--block-size 8")],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    grid: int, count: int, block_size: int, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        PieceKinds(10, [BoundarySlots(toy_kind(grid), count)], block_size)


def test_kept_positions_are_the_end_doubling_distances_and_the_parting() -> None:
    assert kept_positions(6_005, 64) == [1856, 3904, 4928, 5440, 5696, 5824, 5888, 5952]
    assert kept_positions(130, 64, parted_at=70) == [64, 128]
    assert kept_positions(63, 64) == []
    assert kept_positions(64, 64) == [64]


@given(st.integers(0, 100_000), st.sampled_from([16, 64]), st.integers(0, 100_000))
def test_kept_positions_are_few_and_on_the_grid(num_tokens: int, step: int, parted_at: int) -> None:
    found = kept_positions(num_tokens, step, min(parted_at, num_tokens))
    assert len(found) <= 2 + 17
    assert all(0 < position <= num_tokens and position % step == 0 for position in found)
