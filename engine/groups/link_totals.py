"""Link traffic of an instance with each other one, over all its groups (pure).

A group counts by its members, and ends. Totals are by ranks of instances, and go on from group to group. They
are those of the newest group's members: an instance that leaves takes its totals along, so there are never
more than a group has members.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.links.counts import LinkCount

_NOTHING = LinkCount()


class LinkTotals:
    """Totals of link traffic by rank of the other instance."""

    def __init__(self) -> None:
        self._ranks: Sequence[int] = ()
        self._before: dict[int, LinkCount] = {}
        """Totals of groups that have ended."""
        self._now: dict[int, LinkCount] = {}

    def __repr__(self) -> str:
        return f"<LinkTotals {self.totals}>"

    def entered(self, ranks: Sequence[int]) -> None:
        """Begin with another group, whose counts start at zero; ``ranks``: by member."""
        totals = self.totals
        self._ranks = ranks
        self._before = {rank: totals[rank] for rank in ranks if rank in totals}
        self._now = {}

    def counted(self, counts: Sequence[LinkCount]) -> None:
        """Take the newest counts of the group, by member.

        Counts that are lower than before are old ones.
        """
        for rank, count in zip(self._ranks, counts, strict=False):
            if count >= self._now.get(rank, _NOTHING) and count != _NOTHING:
                self._now[rank] = count

    @property
    def totals(self) -> dict[int, LinkCount]:
        """Totals by rank of the other instance; ranks without a link are missing."""
        return {
            rank: self._before.get(rank, _NOTHING).plus(self._now.get(rank, _NOTHING))
            for rank in self._ranks
            if rank in self._before or rank in self._now
        }
