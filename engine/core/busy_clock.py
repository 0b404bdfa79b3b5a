"""Clock of steps' time, by which drafts are priced."""

from __future__ import annotations

import time


class BusyClock:
    """CPU time of the step loop's thread, where that computes the steps.

    Other programs on the same cores do not change it. Where others compute, or are waited for in lockstep,
    their time counts: it is the wall's then.
    """

    def __init__(self, *, by_thread: bool) -> None:
        """``by_thread``: whether this thread computes the steps."""
        self._by_thread = by_thread
        self._last = time.thread_time()

    def __repr__(self) -> str:
        return f"<BusyClock by {'thread' if self._by_thread else 'wall'}>"

    def step(self, seconds: float, *, is_alone: bool) -> float:
        """Seconds of the step that ends now; ``seconds``: by the clock on the wall."""
        if not self._by_thread:
            return seconds
        last, self._last = self._last, time.thread_time()
        return self._last - last if is_alone else seconds
