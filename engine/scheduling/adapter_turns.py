"""Turns of waiting requests, so that no adapter's queue holds up another's (pure).

Start-time fair queueing (Goyal et al. 1996), with each request as one unit: one more request of an adapter
takes its turn one later than the one before, but not before the request that was admitted last. So of many
requests of one adapter and few of another, both go on in alternation. The model itself is one of them.
"""

from __future__ import annotations

MOST_KNOWN = 64
"""Adapters whose turns are remembered."""


class AdapterTurns:
    """Turns of requests by their adapter's digest; empty for the model itself."""

    def __init__(self) -> None:
        self._now = 0
        """Turn of the request that was admitted last."""
        self._next: dict[str, int] = {}
        """Turn of the next request of each adapter."""

    def __repr__(self) -> str:
        return f"<AdapterTurns at {self._now}, {len(self._next)} adapters>"

    def take(self, digest: str) -> int:
        """Turn of one more request of this adapter."""
        if len(self._next) > MOST_KNOWN:
            self._next = {each: turn for each, turn in self._next.items() if turn > self._now}
        turn = max(self._now, self._next.get(digest, 0))
        self._next[digest] = turn + 1
        return turn

    def admitted(self, turn: int) -> None:
        """Note that a request with this turn was admitted."""
        self._now = max(self._now, turn)
