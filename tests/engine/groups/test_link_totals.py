"""Totals of links from group to group."""

from __future__ import annotations

from engine.groups.link_totals import LinkTotals
from parallel.links.counts import LinkCount, added

NONE = LinkCount()


def test_totals_go_on_from_group_to_group_and_end_with_members_that_leave() -> None:
    links = LinkTotals()
    assert links.totals == {}
    links.entered([0, 1, 4])  # ranks may have gaps
    links.counted([NONE, LinkCount(10, 20, 0.5), LinkCount(1, 2, 0.25)])
    links.counted([NONE, LinkCount(11, 22, 0.75), LinkCount(1, 2, 0.25)])
    assert links.totals == {1: LinkCount(11, 22, 0.75), 4: LinkCount(1, 2, 0.25)}

    links.entered([0, 4])
    assert links.totals == {4: LinkCount(1, 2, 0.25)}
    links.counted([NONE, LinkCount(5, 5, 1.0)])
    assert links.totals == {4: LinkCount(6, 7, 1.25)}

    links.entered([0, 1, 4])
    links.counted([NONE, LinkCount(3, 3, 0.0), NONE])
    assert links.totals == {1: LinkCount(3, 3, 0.0), 4: LinkCount(6, 7, 1.25)}


def test_totals_never_fall() -> None:
    links = LinkTotals()
    links.entered([0, 1])
    links.counted([NONE, LinkCount(10, 20, 0.5)])
    links.counted([])
    links.counted([NONE, LinkCount(9, 20, 0.5)])  # an older answer of a worker
    assert links.totals == {1: LinkCount(10, 20, 0.5)}


def test_members_without_a_link_have_no_total() -> None:
    links = LinkTotals()
    links.entered([0, 1, 2])
    links.counted([NONE, NONE, LinkCount(1, 1, 0.0)])
    assert list(links.totals) == [2]


def test_counts_of_several_groups_are_added_by_member() -> None:
    one, two = LinkCount(1, 2, 0.5), LinkCount(10, 20, 1.0)
    assert added([one, two], [two]) == [LinkCount(11, 22, 1.5), two]
    assert added() == []
