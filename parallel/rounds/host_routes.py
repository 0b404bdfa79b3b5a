"""Routes of collectives between members on several hosts (pure).

This module loads no torch, and knows neither sockets nor memory.

Members of one host exchange by shared memory, so what another host needs is sent there once, and passed on
inside. For each host, its members cut the line of all ranks between them: each stands for a *span*, ranks
that follow one another, itself among them. A member receives what comes from other hosts' ranks of its span,
and gives the whole span to the members of its host. So the spans of a host's members, one after another, are
in the order of all ranks, however ranks lie on hosts, and nothing must be sorted.

What differs from receiver to receiver (all-to-all, pieces of a reduce-scatter) goes straight from its giver
to its receiver.

A sum whose bits do not depend on routes adds its terms in rank order. Where the ranks of each host follow one
another, it can be made on the way: each host adds its own terms to the sum of the hosts before (*chain*).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

Way = Literal["gather", "scatter", "chain"]
"""How an all-reduce is made.

Gather: everybody gets all terms. Scatter: each member sums a piece of all terms, and all pieces are gathered.
Chain: sums go from host to host.
"""


class RankSpan(NamedTuple):
    """Ranks from ``low`` up to and without ``high``."""

    low: int
    high: int

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self.low <= rank < self.high


class ChainLane(NamedTuple):
    """One member's part in a chain: it adds up one piece for its host."""

    piece: int
    num_pieces: int
    before: int | None
    """The rank on the host before, which sends the sum of the terms so far.

    None on the first host.
    """
    after: int | None
    """The rank on the next host; None on the last one."""
    ends: tuple[int, ...]
    """On the last host: ranks of all others, to which it sends the total."""
    last: int
    """The rank on the last host."""


class HostRoutes:
    """Routes of one member's collectives, from the hosts of all members.

    All members make them from the same hosts, so that all agree.
    """

    def __init__(self, hosts: Sequence[str], rank: int) -> None:
        """``hosts``: the names of the members' hosts, by rank."""
        if not 0 <= rank < len(hosts):
            raise ValueError(f"rank {rank} is not in a group of {len(hosts)}")
        numbers = {name: number for number, name in enumerate(dict.fromkeys(hosts))}
        self.rank, self.size = rank, len(hosts)
        self.hosts = tuple(numbers[name] for name in hosts)
        """Numbers of hosts by rank, in the order in which they first come."""
        self.members = tuple(
            tuple(member for member, host in enumerate(self.hosts) if host == number)
            for number in numbers.values()
        )
        """Ranks of each host."""
        self.host = self.hosts[rank]
        self.local = self.members[self.host]
        """Ranks on this member's host."""
        self.local_rank = self.local.index(rank)
        self.remote = tuple(member for member in range(self.size) if self.hosts[member] != self.host)
        """Ranks on other hosts."""
        self.spans = self._spans(self.host)
        """Spans of the members of this host."""
        self.span = self.spans[self.local_rank]
        self.receives = tuple(member for member in self.remote if member in self.span)
        """Ranks on other hosts whose parts come to this member."""
        self.sends = tuple(
            self.receiver(rank, host) for host in range(len(self.members)) if host != self.host
        )
        """The ranks that this member's part goes to: one on each other host."""
        self.follow_one_another = list(self.hosts) == sorted(self.hosts)
        """Whether the ranks of each host follow one another."""

    def __repr__(self) -> str:
        return f"<HostRoutes rank {self.rank} of {list(self.members)}>"

    def _spans(self, host: int) -> tuple[RankSpan, ...]:
        members = self.members[host]
        cuts = [0, *((low + high + 1) // 2 for low, high in pairwise(members)), self.size]
        return tuple(RankSpan(*cut) for cut in pairwise(cuts))

    def receiver(self, source: int, host: int) -> int:
        """The rank on a host that gets what ``source`` has for all of that host.

        On its own host that is ``source``.
        """
        spans = self._spans(host)
        return next(member for member, span in zip(self.members[host], spans, strict=True) if source in span)

    # ---- sizes of what members of this host give one another

    def span_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Rows of each span, for the all-gather inside this host; ``sizes`` are rows by rank."""
        return [sum(sizes[span.low : span.high]) for span in self.spans]

    def local_sizes(self, sizes: Sequence[int]) -> list[int]:
        """Rows of the members of this host."""
        return [sizes[member] for member in self.local]

    def broadcast_source(self, source: int) -> int:
        """Index, among this host's members, of the one that has the data of ``source`` first."""
        return self.local.index(self.receiver(source, self.host))

    # ---- sums

    @property
    def num_lanes(self) -> int:
        """Pieces of a sum that travel at once: members of the smallest host."""
        return min(map(len, self.members))

    @property
    def lane(self) -> ChainLane | None:
        """This member's lane; None if its host has more members than there are lanes."""
        index = self.local_rank
        if index >= self.num_lanes:
            return None
        along = [members[index] for members in self.members]
        is_last = self.host == len(along) - 1
        return ChainLane(
            index,
            self.num_lanes,
            along[self.host - 1] if self.host else None,
            None if is_last else along[self.host + 1],
            tuple(along[:-1]) if is_last else (),
            along[-1],
        )

    def lane_sizes(self, total: int) -> list[int]:
        """Elements of ``total`` that each member of this host adds up in a chain.

        Members without a lane have none.
        """
        lanes = self.num_lanes
        sizes = [total // lanes + (index < total % lanes) for index in range(lanes)]
        return sizes + [0] * (len(self.local) - lanes)

    def busiest_bytes(self, way: Way, num_bytes: int, widening: int = 1) -> float:
        """Bytes that the busiest host sends or receives in an all-reduce of so many bytes.

        ``widening``: how many times as long an element is while it is added up.
        """
        counts = [len(members) for members in self.members]
        if way == "gather":
            return max(num_bytes * max(count * (len(counts) - 1), self.size - count) for count in counts)
        if way == "scatter":
            piece = num_bytes / self.size
            # Its terms for all others' pieces, then its own sums to each host; in come theirs.
            return max(
                piece * (count * (self.size - count) + max(count * (len(counts) - 1), self.size - count))
                for count in counts
            )
        forward, total = widening * num_bytes, num_bytes
        others = len(counts) - 1
        # The last host sends the total to all others; those in the middle receive it beside the sum so far.
        return max(forward, others * total, forward + total if others > 1 else 0)

    def hops(self, way: Way) -> int:
        """Hops between hosts, one after the other, of an all-reduce."""
        return {"gather": 1, "scatter": 2, "chain": len(self.members)}[way]

    def way(self, num_bytes: int, widening: int = 1, *, latency: float, bandwidth: float) -> Way:
        """Fastest way of an all-reduce of so many bytes.

        ``latency``: seconds of a hop with hardly any bytes; ``bandwidth``: bytes that a host sends per
        second. All members give the same.
        """
        if len(self.members) == 1:
            return "gather"
        ways: list[Way] = ["gather", "scatter"]
        if self.follow_one_another:
            ways.append("chain")
        return min(
            ways,
            key=lambda way: (
                self.hops(way) * latency + self.busiest_bytes(way, num_bytes, widening) / bandwidth
            ),
        )
