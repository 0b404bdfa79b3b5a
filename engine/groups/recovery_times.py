"""Durations of group changes, part by part, for logs and reports (no torch)."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from itertools import pairwise

import msgspec

logger = logging.getLogger(__name__)

PARTS = ("form", "experts", "group", "step")
"""Parts of a change, from the loss noticed on; each lasts until its event.

The events are the plan received, experts read, the group formed and the first step.
"""


class Change(msgspec.Struct):
    """One change of the group on its way.

    Times are those of one monotonic clock, 0 until they come.
    """

    epoch: int
    form_at: float
    noticed_at: float = 0.0
    """When the group before was found broken; 0: it is not, all change by agreement."""
    noticed_by: str = ""
    num_read: int = 0
    read_at: float = 0.0
    formed_at: float = 0.0


USUAL = 8
"""Steps before a change that its own are compared with."""
BUSY = 1.0
"""Seconds of a step at most; a longer one has waited for work."""


class StepLengths:
    """Lengths of the steps around a change by agreement, where all were busy.

    The step before the change ends with it: all of the change but its preparation is in that one. The first
    one in the new group finds everything cold.
    """

    def __init__(self) -> None:
        self._began = 0.0
        self._before: deque[float] = deque(maxlen=USUAL)
        self._around: list[float] | None = None
        self.num_steps = self.num_long = 0
        """Other steps, and those that took over twice as long as usual."""

    def changed(self) -> None:
        """The group is another one now."""
        self._around = [] if len(self._before) == USUAL and max(self._before) < BUSY else None

    def began(self, now: float) -> tuple[float, float, float] | None:
        """A step with tokens begins.

        Returns the usual length, that of the step with the change, and that of the first one behind it, once
        they are known.
        """
        length, self._began = now - self._began, now
        if self._around is None:
            if len(self._before) == USUAL and length < BUSY:
                self.num_steps += 1
                self.num_long += length > 2 * statistics.median(self._before)
            self._before.append(length)
            return None
        self._around.append(length)
        if len(self._around) < 2:
            return None
        (with_change, first), self._around = self._around, None
        usual = statistics.median(self._before)
        self._before.clear()
        return (usual, with_change, first) if max(with_change, first) < BUSY else None


class RecoveryTimes:
    """Follows the changes of one instance's group, one at a time."""

    def __init__(self) -> None:
        self._lengths = StepLengths()
        self.epoch = self.recoveries = self.changes = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._noticed_at = 0.0
        self._noticed_by = ""
        self._entered: Change | None = None

    def noticed(self, by: str, now: float) -> None:
        """The group is broken; ``by``: how that was found out. Only the first counts."""
        if not self._noticed_at:
            self._noticed_at, self._noticed_by = now, by

    def entered(self, change: Change) -> None:
        """The group has been replaced; :meth:`stepped` ends the change."""
        change.noticed_at, change.noticed_by = self._noticed_at, self._noticed_by
        self._noticed_at, self._noticed_by = 0.0, ""
        self._entered = change
        first = self.epoch == 0
        self.epoch = change.epoch
        by_agreement = not first and not change.noticed_at
        self.changes += by_agreement
        if by_agreement:
            self._lengths.changed()

    def stepped(self, now: float, *, runs: bool = False) -> None:
        """A step has been decided in the current group; ``runs``: somebody has tokens."""
        if runs and (lengths := self._lengths.began(now)) is not None:
            usual, with_change, first = (1000 * seconds for seconds in lengths)
            logger.info(
                "epoch %d began in a step of %.1f ms, the next one took %.1f ms, usual are %.1f ms; "
                "of %d other steps %d took more than twice as long as those before",
                self.epoch, with_change, first, usual, self._lengths.num_steps, self._lengths.num_long,
            )  # fmt: skip
        change, self._entered = self._entered, None
        if change is None or not change.noticed_at:
            return
        times = [change.noticed_at]
        for time in (change.form_at, change.read_at, change.formed_at, now):
            times.append(max(time, times[-1]))  # a plan may come before the loss is noticed here
        parts = dict(zip(PARTS, (b - a for a, b in pairwise(times)), strict=True))
        self.recoveries += 1
        for part, seconds in parts.items():
            self.seconds[part] += seconds
        logger.info(
            "recovered in epoch %d after %.0f ms (noticed by %s): form %.0f ms, %d experts read %.0f ms, "
            "group %.0f ms, first step %.0f ms",
            change.epoch, 1000 * (now - change.noticed_at), change.noticed_by, 1000 * parts["form"],
            change.num_read, 1000 * parts["experts"], 1000 * parts["group"], 1000 * parts["step"],
        )  # fmt: skip
