"""Counts of a router's cache of pooled answers."""

from __future__ import annotations

from collections import Counter

CACHE_EVENTS = ("hit", "miss", "evicted", "cleared")
"""Events that are counted.

Inputs found and not found, then answers let go: for want of room, or because the weights have changed.
"""


class PoolingCounts:
    """Events of one router's cache, and the bytes that it holds."""

    def __init__(self) -> None:
        self.events: Counter[str] = Counter()
        """By the names of :data:`CACHE_EVENTS`."""
        self.num_bytes: int | None = None
        """None where answers are not kept."""

    def __repr__(self) -> str:
        return f"<PoolingCounts {dict(self.events)}, {self.num_bytes} bytes>"
