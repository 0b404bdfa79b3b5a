"""How many instances a load needs, and when to change their number (pure).

Up at once, down late: too few instances cost clients time, too many cost only machines. The number wanted is
the largest that any target asks for. It is followed upwards after a cool-down. It is followed downwards once
nothing larger was wanted for a whole window, as the Kubernetes HorizontalPodAutoscaler does. While instances
start or leave, nothing is changed: what they will bring is not seen yet.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

MOST_GROWTH = 2.0
"""Most growth in one change.

A queue shows that there are too few instances, not how many are missing."""
CALM_TTFT = 0.5
"""Share of the target time to first token below which fewer instances may do."""


class Goals(msgspec.Struct, frozen=True, kw_only=True):
    """Targets and bounds of an operator; times in seconds."""

    min_instances: int = 1
    max_instances: int
    target_running: float = 16.0
    """Requests per instance, running and waiting."""
    target_queue: float = 2.0
    """Waiting requests per instance that are no reason to grow."""
    target_ttft: float | None = None
    """Mean seconds to the first token."""
    cool_down_up: float = 30.0
    """Least time from a change to the next one upwards."""
    cool_down_down: float = 120.0
    """Least time from a change to the next one downwards."""
    stabilization_window: float = 300.0
    """Time for which nothing larger was wanted, before a change downwards."""


class MeshSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Load and instances of the mesh at one moment."""

    staying: int
    """Instances that serve or will."""
    ready: int
    leaving: int = 0
    running: int = 0
    waiting: int = 0
    ttft: float | None = None
    """Mean seconds to the first token since the last look; None without any."""


class SizeDecision(msgspec.Struct, frozen=True):
    """The number of instances to have, and why."""

    size: int
    why: str


class Autoscaler:
    """Decides on the number of instances, from the load now and lately."""

    def __init__(self, goals: Goals) -> None:
        self._goals = goals
        self._wanted: deque[tuple[float, int]] = deque()
        """Numbers wanted in the window; larger older ones only."""
        self._began = self._changed_at = -math.inf

    def __repr__(self) -> str:
        return f"<Autoscaler {self._goals.min_instances} to {self._goals.max_instances}>"

    def look(self, seen: MeshSnapshot, now: float) -> SizeDecision:
        """Decision for this moment; the size is the present one if nothing changes."""
        goals, size = self._goals, seen.staying
        wanted, why = self._need(seen)
        self._remember(wanted, now)
        if size < goals.min_instances:
            return self._change(goals.min_instances, "fewer than the least", now)
        if size > goals.max_instances:
            return self._change(goals.max_instances, "more than the most", now)
        if seen.ready < size or seen.leaving:
            return SizeDecision(size, "instances start or leave")
        if wanted > size:
            if now - self._changed_at < goals.cool_down_up:
                return SizeDecision(size, f"cools down: {why}")
            return self._change(wanted, why, now)
        most = max(number for _, number in self._wanted)
        if most >= size:
            return SizeDecision(size, why)
        if now - self._began < goals.stabilization_window:
            return SizeDecision(size, f"{most} would do, for less than the window")
        if now - self._changed_at < goals.cool_down_down:
            return SizeDecision(size, f"cools down: {most} would do")
        return self._change(most, f"{most} were enough for {goals.stabilization_window:g} s", now)

    def _need(self, seen: MeshSnapshot) -> tuple[int, str]:
        """The number that the load asks for, within the bounds, and the target that asks."""
        goals, ready = self._goals, max(1, seen.ready)
        load = seen.running + seen.waiting
        found = [(math.ceil(load / goals.target_running), f"{load} requests")]
        if seen.waiting > goals.target_queue * ready:
            growth = _grown(ready, seen.waiting / (goals.target_queue * ready))
            found.append((growth, f"{seen.waiting} requests wait"))
        if goals.target_ttft is not None and seen.ttft is not None:
            ratio = seen.ttft / goals.target_ttft
            if ratio > CALM_TTFT:
                number = _grown(ready, ratio) if ratio > 1.0 else ready
                found.append((number, f"{seen.ttft:.2f} s to the first token"))
        wanted, why = max(found)
        return min(max(wanted, goals.min_instances), goals.max_instances), why

    def _remember(self, wanted: int, now: float) -> None:
        if self._began == -math.inf:
            self._began = now
        while self._wanted and self._wanted[-1][1] <= wanted:
            self._wanted.pop()
        self._wanted.append((now, wanted))
        while now - self._wanted[0][0] > self._goals.stabilization_window:
            self._wanted.popleft()

    def _change(self, size: int, why: str, now: float) -> SizeDecision:
        self._changed_at = now
        return SizeDecision(size, why)


def _grown(ready: int, ratio: float) -> int:
    return max(ready + 1, math.ceil(ready * min(MOST_GROWTH, ratio)))
