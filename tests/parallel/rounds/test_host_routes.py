"""Routes between hosts: every byte crosses once, and everybody gets everything."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.rounds.host_routes import ChainLane, HostRoutes, RankSpan, Way
from tests.nightly import examples

hosts_of_members = st.lists(st.sampled_from("abcd"), min_size=1, max_size=9)
hosts_in_order = st.lists(st.integers(1, 4), min_size=2, max_size=4).map(
    lambda counts: [str(host) for host, count in enumerate(counts) for _ in range(count)]
)


def routes_of(hosts: list[str]) -> list[HostRoutes]:
    return [HostRoutes(hosts, rank) for rank in range(len(hosts))]


@settings(max_examples=examples(400))
@given(hosts_of_members)
def test_each_part_goes_once_to_each_other_host_and_everybody_gets_all_in_rank_order(
    hosts: list[str],
) -> None:
    routes = routes_of(hosts)
    sent = [(source, to) for source, each in enumerate(routes) for to in each.sends]
    received = [(source, to) for to, each in enumerate(routes) for source in each.receives]
    assert sorted(sent) == sorted(received)
    crossing = Counter((source, hosts[to]) for source, to in sent)
    assert crossing == Counter(
        (rank, host) for rank, own in enumerate(hosts) for host in set(hosts) if host != own
    )
    for rank, each in enumerate(routes):
        has = {source for source, to in sent if to == rank} | {rank}
        assert has == set(range(*each.span))
        together = [source for span in each.spans for source in range(*span)]  # after the host's all-gather
        assert together == list(range(len(hosts)))


@settings(max_examples=examples(200))
@given(hosts_of_members, st.data())
def test_sizes_of_spans_are_those_of_their_ranks(hosts: list[str], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=len(hosts), max_size=len(hosts)))
    for rank, each in enumerate(routes_of(hosts)):
        assert sum(each.span_sizes(sizes)) == sum(sizes)
        assert each.span_sizes(sizes)[each.local_rank] == sizes[rank] + sum(sizes[r] for r in each.receives)
        assert each.local_sizes(sizes) == [
            size for size, host in zip(sizes, hosts, strict=True) if host == hosts[rank]
        ]


@settings(max_examples=examples(200))
@given(hosts_of_members, st.data())
def test_a_broadcast_enters_each_host_where_its_members_expect_it(
    hosts: list[str], data: st.DataObject
) -> None:
    source = data.draw(st.integers(0, len(hosts) - 1))
    routes = routes_of(hosts)
    for each in routes:
        first = each.local[each.broadcast_source(source)]
        assert first == source if source in each.local else first in routes[source].sends
    assert len(routes[source].sends) == len(set(hosts)) - 1


@settings(max_examples=examples(200))
@given(hosts_in_order, st.integers(0, 50))
def test_lanes_add_every_term_in_rank_order_once(hosts: list[str], total: int) -> None:
    routes = routes_of(hosts)
    for host in set(hosts):
        members = [each for each in routes if hosts[each.rank] == host]
        for each in members:
            sizes = each.lane_sizes(total)
            assert sum(sizes) == total
            assert len(sizes) == len(each.local)
            assert each.lane is not None or sizes[each.local_rank] == 0
    for index in range(routes[0].num_lanes):
        lanes = {each.rank: each.lane for each in routes if each.lane and each.lane.piece == index}
        (first,) = [rank for rank, lane in lanes.items() if lane.before is None]
        added: list[int] = []
        at: int | None = first
        while at is not None:
            added += routes[at].local
            last = at
            at = lanes[at].after
            assert at is None or lanes[at].before == last
        assert added == list(range(len(hosts)))
        assert lanes[last].ends == tuple(rank for rank in lanes if rank != last)
        assert {lane.last for lane in lanes.values()} == {last}


def counted(routes: list[HostRoutes], way: Way, num_bytes: int, widening: int) -> float:
    """Bytes of the busiest host, from the messages that members send one another."""
    out: Counter[int] = Counter()
    into: Counter[int] = Counter()

    def send(source: int, to: int, length: float) -> None:
        out[routes[source].host] += length
        into[routes[to].host] += length

    for each in routes:
        if way == "chain":
            if lane := each.lane:
                piece = each.lane_sizes(num_bytes)[each.local_rank]
                if lane.after is not None:
                    send(each.rank, lane.after, widening * piece)
                for to in lane.ends:
                    send(each.rank, to, piece)
            continue
        for to in each.sends:
            send(each.rank, to, num_bytes if way == "gather" else num_bytes / each.size)
        if way == "scatter":
            for to in each.remote:
                send(each.rank, to, num_bytes / each.size)
    return max([*out.values(), *into.values()])


@settings(max_examples=examples(200))
@given(hosts_in_order, st.sampled_from(["gather", "scatter", "chain"]), st.sampled_from([1, 2]))
def test_the_busiest_host_has_as_many_bytes_as_its_members_send(
    hosts: list[str], way: Way, widening: int
) -> None:
    routes = routes_of(hosts)
    expected = counted(routes, way, 1 << 20, widening)
    assert routes[0].busiest_bytes(way, 1 << 20, widening) == pytest.approx(expected)


def test_an_all_reduce_takes_the_shortest_time() -> None:
    def way(hosts: str, num_bytes: int = 1 << 20, widening: int = 1) -> Way:
        return HostRoutes(list(hosts), 0).way(num_bytes, widening, latency=50e-6, bandwidth=1.25e9)

    assert way("aabb", 32 << 10) == "gather"  # one hop
    assert way("abcdefgh", 16 << 10) == "scatter"  # seven times the bytes
    assert way("aabb") == "chain"
    assert way("aabb", widening=2) == "scatter"  # 2 forward; pieces and sums take 1.5
    assert way("aaaabbbb", widening=2) == "chain"
    assert way("abab") == "scatter"  # terms in rank order would go back and forth
    assert way("ab") == "gather"  # pieces there and sums back are no fewer bytes
    assert way("aaaa") == "gather"


def test_routes_of_one_member() -> None:
    each = HostRoutes(["a", "b", "a", "c", "b"], 2)
    assert (each.local, each.local_rank, each.remote) == ((0, 2), 1, (1, 3, 4))
    assert (each.spans, each.sends, each.receives) == ((RankSpan(0, 1), RankSpan(1, 5)), (1, 3), (1, 3, 4))
    assert not each.follow_one_another
    assert repr(each) == "<HostRoutes rank 2 of [(0, 2), (1, 4), (3,)]>"
    assert HostRoutes(["a", "a", "b", "b", "b"], 3).lane == ChainLane(1, 2, 1, None, (1,), 3)
    assert HostRoutes(["a", "a", "b", "b", "b"], 4).lane is None
    with pytest.raises(ValueError, match="rank 2 is not in a group of 2"):
        HostRoutes(["a", "b"], 2)
