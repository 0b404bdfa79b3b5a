"""Whether an instance that failed may be chosen again (pure).

An instance that failed gets nothing for a while, longer each time in a row. Then it is on trial: now and
then it gets one request, which loses nothing, since another instance can finish it. The first tokens prove
it.
"""

from __future__ import annotations

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
"""Seconds without requests after the first failure, and at most.

Doubled in between.
"""
TRIAL_INTERVAL = 1.0
"""Seconds between two requests to an instance on trial."""
FORGOTTEN_AFTER = 600.0
"""Seconds after which the failures of an absent rank are forgotten."""


class CircuitBreaker:
    """Failures of one rank, and whether it may be tried again.

    Times are in seconds, of any one clock.
    """

    def __init__(self) -> None:
        self.failures = 0
        """Failures in a row, without tokens in between."""
        self._next_try = 0.0

    def __repr__(self) -> str:
        return f"<CircuitBreaker {self.failures} failures in a row>"

    def failed(self, now: float) -> None:
        """Record that it died, or that the connection to it broke."""
        self._next_try = now + min(FIRST_PAUSE * 2.0 ** min(self.failures, 10), LONGEST_PAUSE)
        self.failures += 1

    def dispatched(self, now: float) -> None:
        """Record that a request was sent to it."""
        if self.failures:
            self._next_try = max(self._next_try, now + TRIAL_INTERVAL)

    def proved(self) -> None:
        """Record that tokens came from it, which ends a trial."""
        self.failures = 0

    def admits(self, now: float) -> bool:
        """Whether it may get a request, as long as there are others to choose from."""
        return not self.failures or now >= self._next_try

    def is_forgotten(self, now: float) -> bool:
        return not self.failures or now > self._next_try + FORGOTTEN_AFTER
