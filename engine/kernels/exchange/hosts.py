"""Division of receiving work between hosts, for exchanges inside a step (pure).

A row, or a rank's sums, goes to each other host once: one member there receives it into memory that all
members of that host map. Who that is follows from the ranks alone, so that nobody asks.
"""

from __future__ import annotations

from collections.abc import Sequence

TAKES, POSTS, REMOTE = 1, 2, 4
"""Roles of a member for another one, as bits of ``linked.hpp``.

Its offers are taken from the link here; this member's offers are posted to it; it is on another host.
"""


class Hosts:
    """The hosts of a group's members, as one of them sees it."""

    def __init__(self, rank: int, hosts: Sequence[int]) -> None:
        """``hosts``: a number by rank, the same for those who share memory."""
        self.rank, self.numbers = rank, tuple(hosts)

    def __repr__(self) -> str:
        return f"<Hosts of rank {self.rank}: {self.numbers}>"

    def members(self, host: int) -> list[int]:
        """Ranks on a host."""
        return [rank for rank, number in enumerate(self.numbers) if number == host]

    @property
    def local(self) -> list[int]:
        """Ranks on this member's host, itself among them."""
        return self.members(self.numbers[self.rank])

    def receiver(self, source: int, host: int) -> int:
        """Rank that receives on a host what a member of another host has for it."""
        members = self.members(host)
        return members[source % len(members)]

    def received_by(self, rank: int) -> list[int]:
        """Ranks on other hosts whose offers a member receives, rising."""
        host = self.numbers[rank]
        return [
            source
            for source, number in enumerate(self.numbers)
            if number != host and self.receiver(source, host) == rank
        ]

    @property
    def num_mirrors(self) -> int:
        """Ranks that a member receives offers from, at most; the same number at all members."""
        return max(len(self.received_by(rank)) for rank in range(len(self.numbers)))

    def mirror_of(self, source: int) -> tuple[int, int]:
        """Rank that keeps the mirror of a remote member, and the mirror's number.

        It is the rank that receives them, and the number among its mirrors.
        """
        keeper = self.receiver(source, self.numbers[self.rank])
        return keeper, self.received_by(keeper).index(source)

    def roles(self) -> list[int]:
        """Roles of each member for this one, as bits."""
        return [self._role(rank) if rank not in self.local else 0 for rank in range(len(self.numbers))]

    def _role(self, rank: int) -> int:
        takes = self.receiver(rank, self.numbers[self.rank]) == self.rank
        posts = self.receiver(self.rank, self.numbers[rank]) == rank
        return REMOTE | TAKES * takes | POSTS * posts
