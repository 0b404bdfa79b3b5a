"""Durations of group changes, part by part, for logs and reports (no torch)."""

from __future__ import annotations

import enum
import logging
import statistics
from collections import deque
from itertools import pairwise

import msgspec

logger = logging.getLogger(__name__)

PARTS = ("form", "experts", "group", "step")
"""Phases of a group change since the loss was noticed, by their final event.

The events are the plan received, experts read, the group formed and the first step.
"""


class GroupChange(msgspec.Struct):
    """Times of one group change in progress.

    Times are those of one monotonic clock, 0 until they come.
    """

    epoch: int
    form_at: float
    noticed_at: float = 0.0
    """Time when the old group was found broken; 0: a planned change."""
    noticed_by: str = ""
    num_read: int = 0
    read_at: float = 0.0
    formed_at: float = 0.0


AROUND = 4
"""Number of neighbouring steps on either side that a step's length is compared with."""
BUSY = 1.0
"""Maximum seconds of a step that counts; a longer one waited for work."""


class _Kind(enum.Enum):
    USUAL = enum.auto()
    CHANGE = enum.auto()
    NEXT = enum.auto()


class StepLengths:
    """Compares step lengths around a planned group change with neighbouring steps.

    The step before the change ends with it: all of the change but its preparation is in that one. The first
    one in the new group finds everything cold. What lies around a pause without tokens is left out.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        """When the step under way began, if the one before had tokens."""
        self._kind = _Kind.USUAL
        """Kind of the step under way."""
        self._steps: deque[tuple[_Kind, float]] = deque(maxlen=2 * AROUND + 1)
        self._change: tuple[float, float] | None = None
        """Usual length around the last change, and that of its own step."""
        self.num_steps = self.num_long = 0
        """Other steps, and those that took over twice as long as their neighbours."""

    def changed(self) -> None:
        """Note that the group has changed."""
        self._kind = _Kind.CHANGE

    def paused(self) -> None:
        """Note a pause: no instance has tokens."""
        self._began, self._kind, self._change = None, _Kind.USUAL, None
        self._steps.clear()

    def began(self, now: float) -> tuple[float, float, float] | None:
        """Note the begin of a step with tokens.

        Returns the usual length, that of the step with the change, and that of the first one behind it, once
        their neighbours are known.
        """
        began, self._began = self._began, now
        if began is None or now - began >= BUSY:
            self.paused()
            self._began = now
            return None
        kind = self._kind
        self._kind = _Kind.NEXT if kind is _Kind.CHANGE else _Kind.USUAL
        self._steps.append((kind, now - began))
        return self._judge() if len(self._steps) == 2 * AROUND + 1 else None

    def _judge(self) -> tuple[float, float, float] | None:
        """Compare the step in the middle with its neighbours."""
        kind, length = self._steps[AROUND]
        sides = [*self._steps][:AROUND], [*self._steps][AROUND + 1 :]
        lengths = [[other for its_kind, other in side if its_kind is _Kind.USUAL] for side in sides]
        if not all(lengths):  # changes follow each other closely
            return None
        usual = statistics.fmean(map(statistics.median, lengths))
        change, self._change = self._change, None
        match kind:
            case _Kind.USUAL:
                self.num_steps += 1
                self.num_long += length > 2 * usual
            case _Kind.CHANGE:
                self._change = usual, length
            case _Kind.NEXT:
                return None if change is None else (*change, length)
        return None


class RecoveryTimes:
    """Follows the changes of one instance's group, one at a time."""

    def __init__(self) -> None:
        self._lengths = StepLengths()
        self.epoch = self.recoveries = self.changes = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._noticed_at = 0.0
        self._noticed_by = ""
        self._entered: GroupChange | None = None

    def noticed(self, by: str, now: float) -> None:
        """Note that the group is broken, and what noticed it; only the first counts."""
        if not self._noticed_at:
            self._noticed_at, self._noticed_by = now, by

    def entered(self, change: GroupChange) -> None:
        """Note that the group has been replaced; :meth:`stepped` ends the change."""
        change.noticed_at, change.noticed_by = self._noticed_at, self._noticed_by
        self._noticed_at, self._noticed_by = 0.0, ""
        self._entered = change
        first = self.epoch == 0
        self.epoch = change.epoch
        by_agreement = not first and not change.noticed_at
        self.changes += by_agreement
        if by_agreement:
            self._lengths.changed()

    def stepped(self, now: float, *, runs: bool = False, pauses: bool = False) -> None:
        """Note that a step has been agreed on in the current group.

        ``runs``: somebody has tokens. ``pauses``: nobody has, though no change is due now.
        """
        if pauses:
            self._lengths.paused()
        if runs and (lengths := self._lengths.began(now)) is not None:
            usual, with_change, first = (1000 * seconds for seconds in lengths)
            logger.info(
                "epoch %d began in a step of %.1f ms, the next one took %.1f ms, usual are %.1f ms; "
                "of %d other steps %d took more than twice as long as their neighbours",
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
