from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from parallel.expert_moves import Gift, from_peers, gifts, row_of

FAST, SLOW = 3e9, 2e8
"""Bytes per second from the page cache, and from a disk."""


def test_experts_come_from_another_host_where_that_is_faster() -> None:
    holders = {1: {"b"}, 2: {"a", "b"}, 3: set[str](), 4: {"b", "c"}}
    assert from_peers(holders, "a", SLOW, 0.0) == {1, 4}, "not what this host has read, nor what nobody holds"
    assert from_peers(holders, "a", SLOW, 1e8) == set(), "the link was slower"
    assert from_peers(holders, "a", FAST, 0.0) == set(), "the page cache is faster than most links"
    assert from_peers(holders, "a", FAST, 1e10) == {1, 4}
    assert from_peers(holders, "a", 0.0, 1e10) == set(), "nothing is known of the disk"
    assert from_peers(holders, "a", FAST, 0.0, always=True) == {1, 4}


def test_gifts_come_from_the_same_host_then_from_those_that_gave_least() -> None:
    rows = [
        row_of({0, 1, 2, 3}, set(), 100),
        row_of({2, 3, 99}, {0, 1}, 100),
        row_of({0, 1, 99}, {2, 3}, 100),
        row_of(set(), {0, 1, 3, 50, 99}, 100),
    ]
    assert gifts(rows, ["a", "b", "c", "b"]) == [
        Gift(0, 0, 1), Gift(1, 2, 1), Gift(2, 1, 2), Gift(3, 0, 2),
        Gift(0, 2, 3), Gift(1, 0, 3), Gift(3, 1, 3), Gift(99, 1, 3),
    ]  # fmt: skip


def test_a_member_of_the_same_host_gives_all_though_others_gave_less() -> None:
    rows = [row_of({0, 1, 2}, set(), 10), row_of({0, 1, 2}, set(), 10), row_of(set(), {0, 1, 2}, 10)]
    assert [gift.source for gift in gifts(rows, ["a", "b", "b"])] == [1, 1, 1]


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 129)), st.sets(st.integers(0, 129))), min_size=1, max_size=5)
)
def test_all_that_somebody_holds_is_given_once(members: list[tuple[set[int], set[int]]]) -> None:
    rows = [row_of(held, wanted, 130) for held, wanted in members]
    assert all(0 <= word < 1 << 63 for row in rows for word in row)
    found = gifts(rows, ["a"] * len(rows))
    assert all(gift.expert in members[gift.source][0] and gift.source != gift.to for gift in found)
    for to, (_, wanted) in enumerate(members):
        others = {expert for rank, (held, _) in enumerate(members) if rank != to for expert in held}
        assert sorted(gift.expert for gift in found if gift.to == to) == sorted(wanted & others)
