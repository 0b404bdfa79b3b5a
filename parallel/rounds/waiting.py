"""Waiting for a word of shared memory without burning a core that others need.

This module loads no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

CHECK_SECONDS = 0.01
"""Seconds between checks of whether a wait still makes sense."""

_ALONE_SECONDS = 20e-6  # looking again at once, before the core is offered to others
_SHORTEST_BUDGET, _LONGEST_BUDGET = 50e-6, 2e-3  # of looking, before sleep
_SHORTEST_SLEEP, _LONGEST_SLEEP = 50e-6, 1e-3


class SpinWait:
    """Time for which a waiting member looks again and again before it sleeps.

    Learns from how long the last waits took.

    Waking a sleeping process costs more than most collectives, so a short wait should never sleep. A long
    one should do nothing else. Between looks the core is offered to any other thread that can run, which
    leaves a process that computes on the same core as fast as if it were alone (measured).
    """

    def __init__(self, crowded: bool) -> None:
        """A patience to start with.

        ``crowded``: there are more members than cores, so a peer may need this very core to go on.
        """
        self._alone = 0.0 if crowded else _ALONE_SECONDS
        self._budget = _LONGEST_BUDGET

    def wait(self, word: memoryview, target: int, check: Callable[[], None]) -> None:
        """Return when ``word[0]`` is at least ``target``. ``check`` raises to give up."""
        began, waited, next_check = time.perf_counter(), 0.0, CHECK_SECONDS
        while word[0] < target:
            waited = time.perf_counter() - began
            if waited >= next_check:
                check()
                next_check = waited + CHECK_SECONDS
            if waited >= self._budget:
                time.sleep(min(max(waited / 8, _SHORTEST_SLEEP), _LONGEST_SLEEP))
            elif waited >= self._alone:
                os.sched_yield()
        if waited <= _LONGEST_BUDGET:
            self._budget = min(_LONGEST_BUDGET, max(self._budget, 2 * waited))
        else:
            self._budget = max(_SHORTEST_BUDGET, self._budget / 2)
