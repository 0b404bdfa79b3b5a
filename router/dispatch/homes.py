"""Homes of sessions among many instances (pure): the ranks that come first, remembered by session."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from router.dispatch import policy

HOMES_KEPT = 8
"""Candidates for the home of a session that are remembered."""
MAX_SESSIONS = 10_000
MAX_JOINED = 1024
"""Instances that joined lately, in which remembered sessions look for a new home."""


class Homes:
    """The first homes of each session, as :func:`router.dispatch.policy.affinity` ranks them.

    To rank 1,024 instances takes a millisecond, so the best few are remembered.
    """

    def __init__(self) -> None:
        self._first: OrderedDict[str, tuple[int, list[tuple[bytes, int]]]] = OrderedDict()
        """By session: number of the last instance that was looked at, and the best ranks."""
        self._joined: list[int] = []
        self._before = 0
        """Instances that joined before those."""

    def joined(self, rank: int) -> None:
        """Note that an instance with this rank has come."""
        self._joined.append(rank)
        if len(self._joined) > MAX_JOINED:
            self._before += len(self._joined) // 2
            del self._joined[: len(self._joined) // 2]

    def of(self, key: str, ranks: Iterable[int]) -> list[int]:
        """The best ranks of a session, best first; others of ``ranks`` come after them."""
        at, first = self._first.pop(key, (-1, []))
        newest = self._before + len(self._joined)
        if at < self._before:
            found = sorted((policy.affinity(key, rank), rank) for rank in set(ranks))
        else:
            new = set(self._joined[at - self._before :])
            found = sorted({*first, *((policy.affinity(key, rank), rank) for rank in new)})
        self._first[key] = newest, found[:HOMES_KEPT]
        if len(self._first) > MAX_SESSIONS:
            self._first.popitem(last=False)
        return [rank for _, rank in found[:HOMES_KEPT]]

    def forget(self, key: str) -> None:
        """Forget all homes, so that the next request looks at all instances."""
        self._first.pop(key, None)
