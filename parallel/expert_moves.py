"""Plan of expert weight transfers between members on several hosts (pure).

A member that lacks an expert reads it from the checkpoint, or gets it from a member of another host. It
chooses before the group forms (:func:`from_peers`), by what it knows of the group before. When the group has
formed all tell what they hold and what they still want (:func:`row_of`). What follows from that is the same
at all members (:func:`gifts`). So nobody asks, and nobody waits for an answer that does not come.

An expert is a number here: that of its layer times the experts of a layer, plus its own there.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

BITS = 62
"""Experts per integer in a bit set, so that it fits a signed one."""
LINK_RATE = 1.0e9
"""Assumed link rate to another host in bytes per second, until one is measured."""


Which = TypeVar("Which", bound=Hashable)


class Gift(NamedTuple):
    """One transfer of an expert's weights, from a member to one that lacks it."""

    expert: int
    source: int
    to: int


def from_peers(
    holders: Mapping[Which, Collection[str]],
    host: str,
    disk_rate: float,
    link_rate: float,
    *,
    always: bool = False,
) -> set[Which]:
    """Missing experts that arrive sooner from members of other hosts than from disk.

    What a member of this host holds was read here, so it is in the page cache: that is memory which all
    processes of a host share.

    Args:
        holders: by missing expert, the hosts of those who hold it and will be members.
        host: this member's.
        disk_rate: bytes per second of the last reading here; 0: none was measured.
        link_rate: bytes per second of the last experts from another host; 0: there were none.
        always: from members even if that is slower.
    """
    if not always and (not disk_rate or disk_rate >= (link_rate or LINK_RATE)):
        return set()
    return {expert for expert, hosts in holders.items() if hosts and host not in hosts}


def row_of(held: Collection[int], wanted: Collection[int], num_experts: int) -> list[int]:
    """Bit sets of a member's held and wanted experts, as integers to exchange."""
    return [*_words(held, num_experts), *_words(wanted, num_experts)]


def gifts(rows: Sequence[Sequence[int]], hosts: Sequence[str]) -> list[Gift]:
    """Expert transfers that follow from all members' bit sets; equal at every member.

    Members of the same host come first, then who has given least so far. What nobody holds is left out.
    """
    half = len(rows[0]) // 2
    held, wanted = [_experts(row[:half]) for row in rows], [_experts(row[half:]) for row in rows]
    given, found = [0] * len(rows), []
    for to, experts in enumerate(wanted):
        for expert in sorted(experts):
            sources = [rank for rank, has in enumerate(held) if expert in has and rank != to]
            if sources:
                source = min(sources, key=lambda rank: (hosts[rank] != hosts[to], given[rank], rank))
                given[source] += 1
                found.append(Gift(expert, source, to))
    return found


def _words(experts: Collection[int], num_experts: int) -> list[int]:
    bits = sum(1 << expert for expert in experts)
    return [bits >> begin & (1 << BITS) - 1 for begin in range(0, num_experts, BITS)]


def _experts(words: Sequence[int]) -> set[int]:
    return {
        BITS * number + bit for number, word in enumerate(words) for bit in range(BITS) if word >> bit & 1
    }
