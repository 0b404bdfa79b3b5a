"""Whether drafts pay at a batch size, measured in steps with and without them (pure).

What a draft of a request may bring is guessed from prices (:mod:`engine.speculation.draft_prices`). Here is
what counts in the end: seconds for a token of the whole step, all that drafting costs included, against those
of steps without. Where drafts lose they are off. They are tried again when the steps since have made up for
what the last try lost: a hundredth of their time is for that, and half as much after each further try that
loses.

In lockstep a step lasts as long for all. So tokens of the other instances count, too: a draft that delays
them must bring more than they lose.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SHARE = 0.01
"""Part of the time of steps without drafts that tries of drafts may lose."""
MOST_HALVED = 3
"""Times that this part is halved, by tries that lost in a row."""
FIRST = 8
"""Steps with drafts before the first ones without are measured."""
PLAIN = 4
"""Steps without drafts that are measured in a row."""
LONGEST = 512
"""Most steps with drafts between two such measurements."""
MEMORY = 32
"""Steps with drafts that a verdict looks at."""
TRIED = 8
"""Steps between two verdicts."""
MOST_LOST = 6.0
"""Loss that ends a try, in steps without drafts."""
FORGETTING = 16
"""About how many of the last steps without drafts count, of one number of rows."""


class _Drafted(NamedTuple):
    """A step with drafts, or that asked for some."""

    rows: int
    others: int
    """Tokens of the other instances' steps."""
    tokens: int
    """Tokens that its requests got."""
    seconds: float


class PlainSteps:
    """Seconds of steps without drafts, by their number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, tuple[int, float]] = {}
        """Steps, and their mean, of which the last ones count most."""

    def __repr__(self) -> str:
        return f"<PlainSteps of {len(self._seconds)} sizes>"

    def took(self, rows: int, seconds: float) -> None:
        """Take in a step; one that took very long shared the cores with something else."""
        count, mean = self._seconds.get(rows, (0, seconds))
        count = min(count + 1, FORGETTING)
        self._seconds[rows] = count, mean + (min(seconds, 2 * mean) - mean) / count

    def seconds(self, rows: int) -> float | None:
        """Seconds of a step; None: none is known.

        Those of other sizes are between those of known ones, or the least that they can be.
        """
        if rows in self._seconds:
            return self._seconds[rows][1]
        below = max((known for known in self._seconds if known < rows), default=0)
        above = min((known for known in self._seconds if known > rows), default=0)
        if not below or not above:
            known = below or above
            return self._seconds[known][1] * min(1.0, rows / known) if known else None
        low, high = self._seconds[below][1], self._seconds[above][1]
        return low + (high - low) * (rows - below) / (above - below)


class _Size:
    """Drafts at batches of about one size."""

    def __init__(self) -> None:
        self.is_on = True
        self.is_first = False
        """Whether the next step without drafts is the first one of its kind."""
        self.plain_left = 0
        """Steps without drafts to be measured, while drafts are on."""
        self.steps: deque[_Drafted] = deque(maxlen=MEMORY)
        self.since = self.checked = 0
        """Steps that might draft since those without were measured, and those of them with drafts."""
        self.next_plain = FIRST
        """Steps with drafts between measurements without."""
        self.credit = self.lost = 0.0
        """Seconds that a try may lose by now, and that the last one lost."""
        self.num_lost = 0
        """Tries that lost in a row."""


class DraftTrials:
    """Drafts on or off by size of the batch, as steps brought and took."""

    def __init__(self) -> None:
        self._plain = PlainSteps()
        self._sizes: dict[int, _Size] = {}

    def __repr__(self) -> str:
        on = [1 << size >> 1 for size, each in sorted(self._sizes.items()) if each.is_on]
        return f"<DraftTrials on from {on} rows>"

    def are_on(self, rows: int) -> bool:
        """Whether the next step of so many rows may draft, and ask for drafts."""
        size = self._sizes.get(rows.bit_length())
        return size is None or (size.is_on and not size.plain_left)

    def rest(self, rows: int) -> bool:
        """Whether drafts are off until steps have made up for the last try."""
        return not self._size(rows).is_on

    def took(
        self,
        rows: int,
        *,
        tokens: int,
        seconds: float,
        drafted: bool,
        was_on: bool,
        others: int = 0,
        stands_for: int = 1,
    ) -> None:
        """Take in a step of decode rows.

        ``tokens``: that its requests got. ``drafted``: whether it checked some. ``was_on``: whether it might
        draft. ``others``: tokens of the other instances in lockstep. ``stands_for``: steps like this one,
        where drafts are off.
        """
        size = self._size(rows)
        if not was_on:
            if size.is_first:
                size.is_first = False
                return
            self._plain.took(rows, seconds)
            if size.is_on:
                size.plain_left = max(0, size.plain_left - 1)
                if not size.plain_left:
                    self._judge(size, rows)
            else:
                self._wait(size, seconds * stands_for)
            return
        size.steps.append(_Drafted(rows, others, tokens, seconds))
        size.since += 1
        size.checked += drafted
        if size.plain_left or not size.is_on:
            return  # it had begun before
        if size.since >= size.next_plain:
            size.plain_left, size.since, size.is_first = PLAIN, 0, True
            size.next_plain = min(LONGEST, 2 * size.next_plain)
        elif (plain := self._plain.seconds(rows)) is not None:
            loses = self._loss(size)
            is_due = size.since % TRIED == 0 and (size.checked > 0 or size.since >= MEMORY)
            if loses > MOST_LOST * plain or (is_due and loses > 0):
                self._end(size, loses, plain)

    def paid(self, rows: int, seconds: float) -> None:
        """Take in the time of proposing beside prompts, in no step of decode rows alone."""
        size = self._size(rows)
        if size.is_on and size.steps:
            last = size.steps.pop()
            size.steps.append(last._replace(seconds=last.seconds + seconds))

    def _size(self, rows: int) -> _Size:
        return self._sizes.setdefault(rows.bit_length(), _Size())

    def _loss(self, size: _Size) -> float:
        """Seconds that the last steps with drafts took beyond those of their tokens without."""
        lost = 0.0
        for rows, others, tokens, seconds in size.steps:
            plain = self._plain.seconds(rows)
            assert plain is not None
            lost += seconds - plain * (tokens + others) / (rows + others)
        return lost

    def _judge(self, size: _Size, rows: int) -> None:
        plain = self._plain.seconds(rows)
        assert plain is not None
        if (loses := self._loss(size)) > 0:
            self._end(size, loses, plain)
        elif size.checked:
            size.num_lost = 0

    def _end(self, size: _Size, loses: float, plain: float) -> None:
        """Turn drafts off, until what was lost is made up for."""
        size.is_on, size.plain_left, size.is_first = False, 0, True
        size.lost, size.credit = max(loses, plain), 0.0
        size.num_lost += 1

    def _wait(self, size: _Size, seconds: float) -> None:
        """One more step without drafts; turn them on when a try is paid."""
        size.credit += SHARE * seconds / (1 << min(size.num_lost - 1, MOST_HALVED))
        if size.credit >= size.lost:
            size.is_on, size.since, size.checked, size.next_plain = True, 0, 0, MEMORY
            size.steps.clear()
