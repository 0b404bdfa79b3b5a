"""Waits for a word of shared memory, which leave the core to those that compute.

This module loads no torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

CHECK_SECONDS = 0.01
"""Seconds between checks of whether a wait still makes sense."""

_ALONE_SECONDS = 20e-6  # polling without a pause, before the core is offered to others
_SHORTEST_BUDGET, _LONGEST_BUDGET = 50e-6, 2e-3  # of polling, before sleep
_SHORTEST_SLEEP, _LONGEST_SLEEP = 50e-6, 1e-3


class SpinWait:
    """Adaptive polling: how long a waiting member polls before it sleeps.

    Waking a sleeping process costs more than most collectives, so a short wait should never sleep. A long
    one should do nothing else. Between polls the core is offered to any other thread that can run, which
    leaves a process that computes on the same core as fast as if it were alone (measured).
    """

    def __init__(self, crowded: bool) -> None:
        """``crowded``: there are more members than cores.

        A peer may need this very core to go on, then.
        """
        self.alone = 0.0 if crowded else _ALONE_SECONDS
        """Seconds of a wait before the core is offered to others."""
        self.budget = _LONGEST_BUDGET
        """Seconds of a wait before this member sleeps."""

    def learn(self, waited: float) -> None:
        """Set the budget by how long a wait has taken."""
        if waited <= _LONGEST_BUDGET:
            self.budget = min(_LONGEST_BUDGET, max(self.budget, 2 * waited))
        else:
            self.budget = max(_SHORTEST_BUDGET, self.budget / 2)

    def wait(self, word: memoryview, target: int, check: Callable[[], None]) -> None:
        """Return when ``word[0]`` is at least ``target``. ``check`` raises to give up."""
        began, waited, next_check = time.perf_counter(), 0.0, CHECK_SECONDS
        while word[0] < target:
            waited = time.perf_counter() - began
            if waited >= next_check:
                check()
                next_check = waited + CHECK_SECONDS
            if waited >= self.budget:
                time.sleep(min(max(waited / 8, _SHORTEST_SLEEP), _LONGEST_SLEEP))
            elif waited >= self.alone:
                os.sched_yield()
        self.learn(waited)
