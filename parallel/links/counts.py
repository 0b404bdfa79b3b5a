"""Counts of what a member's links have carried, by peer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple, Protocol


class LinkCount(NamedTuple):
    """Traffic and wait time of a member with one peer, since their group formed."""

    bytes_sent: int = 0
    bytes_received: int = 0
    seconds_waited: float = 0.0
    """Time for which calls of this member have waited for the peer."""

    def plus(self, other: LinkCount) -> LinkCount:
        return LinkCount(
            self.bytes_sent + other.bytes_sent,
            self.bytes_received + other.bytes_received,
            self.seconds_waited + other.seconds_waited,
        )


class CountedLinks(Protocol):
    """Protocol of communicators whose links count traffic, by rank."""

    @property
    def bytes_sent(self) -> Sequence[int]: ...
    @property
    def bytes_received(self) -> Sequence[int]: ...
    @property
    def seconds_waited(self) -> Sequence[float]: ...


def counts_of(links: CountedLinks) -> list[LinkCount]:
    """The counts of links by rank."""
    return list(map(LinkCount, links.bytes_sent, links.bytes_received, links.seconds_waited))


def link_counts(group: object) -> list[LinkCount]:
    """The counts of a communicator by rank; none if it has no links."""
    counts = getattr(group, "link_counts", None)
    return counts() if counts is not None else []


def added(*counts: Sequence[LinkCount]) -> list[LinkCount]:
    """Sums of counts by rank; one that is missing counts as nothing."""
    nothing = LinkCount()
    total: list[LinkCount] = []
    for each in counts:
        total = [one.plus(other) for one, other in zip_longest(total, each, fillvalue=nothing)]
    return total
