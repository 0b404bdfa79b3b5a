"""Load and token rate of an instance, for its heartbeats."""

from __future__ import annotations

import time

from coordinator.messages import Load
from coordinator.process.day_window import DayWindow
from engine.scheduling.report_policy import LoadSnapshot

RATE_WINDOW = 2.0
"""Seconds over which the token rate is measured."""


class LoadMeter:
    """Load and token rate, written by the step loop and read by the membership thread."""

    def __init__(self, blocks_total: int) -> None:
        self._blocks_total = blocks_total
        self._stepped_at = self._rested_at = time.monotonic()
        self._window: list[tuple[float, int]] = [(self._stepped_at, 0)]
        self._snapshot: LoadSnapshot | None = None
        self._checked, self._wrong = DayWindow(), DayWindow()

    def __repr__(self) -> str:
        return f"<LoadMeter {self._snapshot}>"

    def stepped(self, snapshot: LoadSnapshot) -> None:
        """Note a step, or that work arrives at an idle instance."""
        idle_for = time.monotonic() - self._stepped_at
        self._stepped_at = time.monotonic()
        if idle_for > RATE_WINDOW:  # a pause is no part of the rate
            self._window = [(self._stepped_at, self._window[-1][1])]
        self._snapshot = snapshot
        self._window.append((self._stepped_at, snapshot.generation_tokens))
        while len(self._window) > 2 and self._window[1][0] < self._stepped_at - RATE_WINDOW:
            self._window.pop(0)

    def rested(self, snapshot: LoadSnapshot) -> None:
        """Note that there is nothing to step.

        Requests may have been aborted since the last step, and those that wait for a grammar are not late.
        """
        self._rested_at = time.monotonic()
        self._snapshot = snapshot

    def load(self) -> Load:
        """Load for a heartbeat to the coordinator."""
        snapshot, now = self._snapshot, time.monotonic()
        if snapshot is None:
            return Load(blocks_total=self._blocks_total)
        busy = snapshot.running + snapshot.waiting > 0
        (began, before), (ended, after) = self._window[0], self._window[-1]
        fresh = now - ended < RATE_WINDOW and after > before
        return Load(
            running=snapshot.running,
            waiting=snapshot.waiting,
            blocks_used=snapshot.blocks_used,
            blocks_total=self._blocks_total,
            tokens_per_second=(after - before) / max(now - began, 1e-3) if fresh else 0.0,
            steps=snapshot.steps,
            stalled_for=now - max(self._stepped_at, self._rested_at) if busy else 0.0,
            cache_checked=self._checked.count(snapshot.cache_checked, now),
            cache_wrong=self._wrong.count(snapshot.cache_wrong, now),
        )
