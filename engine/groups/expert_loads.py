"""Windows of steps over which an instance counts the rows of its experts (pure).

All members of a group pass through the same steps, so their windows are the same: no message begins one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.messages import ExpertLoads


class LoadWindows:
    """Turns row counts of experts, which only rise, into loads by window of steps."""

    def __init__(self, window_size: int) -> None:
        self._size = window_size
        self._epoch = 0
        self._steps = 0
        self._before: Sequence[Sequence[int]] = ()

    def __repr__(self) -> str:
        return f"<LoadWindows of {self._size} steps, {self._steps} in epoch {self._epoch}>"

    def entered(self, epoch: int, counts: Sequence[Sequence[int]]) -> None:
        """Start over for a new group, with the row counts [layers, experts] so far."""
        self._epoch, self._steps, self._before = epoch, 0, counts

    def stepped(self, counts: Callable[[], Sequence[Sequence[int]]]) -> ExpertLoads | None:
        """Count a step that begins; returns the loads of a window that has ended."""
        self._steps += 1
        if self._steps == 1 or (self._steps - 1) % self._size:
            return None
        now, before = counts(), self._before
        self._before = now
        if len(now) != len(before):
            return None
        rows = tuple(
            tuple(max(0, after - earlier) for after, earlier in zip(layer, old, strict=True))
            for layer, old in zip(now, before, strict=True)
        )
        return ExpertLoads(self._epoch, (self._steps - 1) // self._size, rows)
