"""Price of a fetched token, in tokens to compute (pure).

Both speeds are learnt from what happens: how long steps with prompts take, and how long transfers take, from
the question to the last byte. What has not been tried for a while is taken for better than it was: else a
source that was slow once would never be asked again.
"""

from __future__ import annotations

UNKNOWN = 0.25
"""Price before anything was measured."""
WORTH = 0.6
"""Highest price at which a fetch is worth it: computing needs no other instance."""
WORST = 4.0
"""Highest price that is remembered."""
FADES = 60.0
"""Seconds after which half of what a measured price lies above :data:`UNKNOWN` is forgotten."""
FEWEST = 64
"""Fewest tokens that are fetched, and of a step that says something about computing."""
COMMON = 1024
"""Tokens of a fetch that routers' prices are for."""
GAIN = 0.3
"""Part of the way that an estimate moves to what was measured."""


class FetchPrice:
    """Price by the measured speeds of computing and of one kind of source."""

    def __init__(self, token_bytes: float, end_bytes: int = 0) -> None:
        """``token_bytes``: of one token in the cache; ``end_bytes``: of boundary pieces, once a context."""
        self.token_bytes = token_bytes
        self.end_bytes = end_bytes
        self._byte_seconds = 0.0
        self._token_seconds = 0.0
        self._fetched_at = 0.0

    def __repr__(self) -> str:
        speed = 1 / self._token_seconds if self._token_seconds else 0
        rate = 1e-6 / self._byte_seconds if self._byte_seconds else 0
        return f"<FetchPrice: computes {speed:.0f} tokens/s, fetches {rate:.0f} MB/s>"

    def computed(self, tokens: int, seconds: float) -> None:
        """Take in how long a step with prompt tokens took."""
        if tokens >= FEWEST:
            self._token_seconds = _towards(self._token_seconds, seconds / tokens)

    def fetched(self, num_bytes: int, seconds: float, now: float) -> None:
        """Take in a transfer; without any bytes it counts as one of a token."""
        self._byte_seconds = _towards(self._byte_seconds, seconds / max(num_bytes, self.token_bytes, 1))
        self._fetched_at = now

    def at(self, now: float, tokens: int = COMMON) -> float:
        """Cost of one of so many fetched tokens, in tokens to compute."""
        if not self._byte_seconds or not self._token_seconds:
            return UNKNOWN
        num_bytes = self.token_bytes + self.end_bytes / max(tokens, 1)
        price = num_bytes * self._byte_seconds / self._token_seconds
        price = min(price, WORST)
        kept = float(0.5 ** ((now - self._fetched_at) / FADES))
        return min(price, UNKNOWN + (price - UNKNOWN) * kept)

    def pays(self, tokens: int, now: float) -> bool:
        """Whether so many tokens are fetched rather than computed."""
        return tokens >= FEWEST and self.at(now, tokens) <= WORTH

    def seconds_to_compute(self, tokens: int) -> float | None:
        """How long computing so many tokens takes; None if that is not known."""
        return tokens * self._token_seconds if self._token_seconds else None


def _towards(estimate: float, measured: float) -> float:
    return estimate + GAIN * (measured - estimate) if estimate else measured
