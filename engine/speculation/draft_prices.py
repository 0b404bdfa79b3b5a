"""Expected gain and cost of drafted tokens (pure)."""

from __future__ import annotations

import math

import numpy as np


def moved(chance: float, drafted: int, accepted: int, memory: int) -> float:
    """Acceptance chance, updated by a draft of which ``accepted`` tokens were taken.

    About the last ``memory`` drafted tokens count.
    """
    for taken in [1.0] * accepted + [0.0] * (accepted < drafted):
        chance += (taken - chance) / memory
    return chance


class DraftTrust:
    """Acceptance chance of a request's next drafted token, if all before it were taken."""

    MEMORY = 10
    """About how many of the last drafted tokens count."""
    LONGEST_PAUSE = 64
    """Longest pause, in tokens of a request, after drafts of which nothing was taken."""

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self._pause = 0
        self._waits = 0

    def __repr__(self) -> str:
        return f"<DraftTrust {self.chance:.2f}, waits {self._waits}>"

    def length(self, most: int, price: float) -> tuple[int, float]:
        """Length of the next draft, and its expected gain beyond ``price`` a token.

        Where not even one token pays, one is drafted now and then all the same, since texts change.
        """
        if self._waits > 0:
            self._waits -= 1
            return 0, 0.0
        if self.chance <= price:
            return min(most, 1), self.chance - price
        length, gain, chance = 0, 0.0, self.chance
        while length < most and chance > price:
            length += 1
            gain += chance - price
            chance *= self.chance
        return length, gain

    def learn(self, drafted: int, accepted: int, price: float) -> None:
        """Take in that ``accepted`` of ``drafted`` tokens were taken."""
        self.chance = moved(self.chance, drafted, accepted, self.MEMORY)
        if accepted:
            self._pause = 0
        elif self.chance <= price:
            self._pause = min(self.LONGEST_PAUSE, max(1, 2 * self._pause))
            self._waits = self._pause


class FixedTrust(DraftTrust):
    """Trust that never changes, for drafts that are as long as they may be."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def length(self, most: int, price: float) -> tuple[int, float]:
        """All that may be drafted, at any price."""
        return most, math.inf if most > 0 else 0.0

    def learn(self, drafted: int, accepted: int, price: float) -> None:
        """Does nothing."""


class StepCost:
    """Model of step seconds: fixed + each * tokens + extra where drafts are.

    It is fitted by least squares over the steps so far, of which newer ones count more. It begins from a
    guess.

    Where memory sets the pace a further token adds little, and drafts are nearly free. Where products do, a
    drafted token costs as much as any, and only what is the same for a whole step can be spared. A step with
    drafts takes longer besides. So does the step after it, which cannot take the fast path of consecutive
    decode steps and has to be packed.
    """

    FORGETTING = 0.995
    GUESSED_SHARE, GUESSED_EXTRA = 0.3, 0.05
    """First guess, as parts of a plain step: its tokens' cost, and that of drafting."""
    BELIEF = 0.5
    """Steps that the guess weighs as much as."""
    STEPS_PER_FIT = 16
    LOWEST, HIGHEST = 0.05, 0.95
    """Bounds of a drafted token's price."""

    def __init__(self) -> None:
        self._sums = [0.0] * 8
        """Weighted sums over steps, for the fit.

        They are of 1, tokens, drafts, tokens squared, tokens with drafts; then of seconds alone, times
        tokens, and with drafts.
        """
        self._fixed = self._each = self._extra = 0.0
        self._steps = 0

    def __repr__(self) -> str:
        return f"<StepCost of {self._steps} steps>"

    def took(self, tokens: int, drafts: bool, seconds: float) -> None:
        """Take in a step without prompt tokens, which has drafts or follows one that had."""
        if self._fixed:  # one that took much longer shared the cores with something else
            seconds = min(seconds, 1.5 * (self._fixed + self._each * tokens + self._extra * drafts))
        parts = (1.0, tokens, 0.0, tokens * tokens, 0.0, seconds, seconds * tokens, 0.0)
        if drafts:
            parts = (1.0, tokens, 1.0, tokens * tokens, tokens, seconds, seconds * tokens, seconds)
        keep = self.FORGETTING
        self._sums = [keep * old + new for old, new in zip(self._sums, parts, strict=True)]
        self._steps += 1
        if self._steps % self.STEPS_PER_FIT == 0:
            self._fit()

    def seconds(self, rows: int) -> float:
        """Seconds of a step of so many rows without drafts; 0.0: not known."""
        return self._fixed + self._each * rows

    def prices(self, rows: int) -> tuple[float, float]:
        """Price of a drafted token, and of drafting at all, in a step of ``rows``.

        The unit is what a token costs in a step of these rows without drafts. Each taken token saves that
        much.
        """
        if not self._fixed:
            return self.GUESSED_SHARE, self.GUESSED_EXTRA * rows
        token = (self._fixed + self._each * rows) / rows
        return min(self.HIGHEST, max(self.LOWEST, self._each / token)), self._extra / token

    def _fit(self) -> None:
        steps, tokens, drafts, squares, both, seconds, by_tokens, by_drafts = self._sums
        mean, duration = tokens / steps, seconds / steps
        share, extra = self.GUESSED_SHARE, self.GUESSED_EXTRA
        guess = np.array([(1 - share) * duration, share * duration / mean, extra * duration])
        belief = self.BELIEF * np.diag([1.0, mean * mean, 1.0])
        products = np.array([[steps, tokens, drafts], [tokens, squares, both], [drafts, both, drafts]])
        found = np.linalg.solve(
            products + belief, np.array([seconds, by_tokens, by_drafts]) + belief @ guess
        ).tolist()
        self._fixed = max(found[0], 0.01 * duration)
        self._each, self._extra = max(found[1], 0.0), max(found[2], 0.0)


class PassCost:
    """Seconds of one pass of a model that proposes, by the size of its batch."""

    MEMORY = 20
    """About how many of the last passes count."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Seconds of a pass, by the number of bits of the number of rows."""

    def __repr__(self) -> str:
        return f"<PassCost of {len(self._seconds)} sizes>"

    def took(self, rows: int, passes: int, seconds: float) -> None:
        """Take in that so many passes over ``rows`` took so long."""
        size, each = rows.bit_length(), seconds / passes
        known = self._seconds.get(size)
        if known is not None:
            each = known + (min(each, 2 * known) - known) / self.MEMORY
        self._seconds[size] = each

    def price(self, asked: int, rows: int, step_seconds: float) -> float:
        """Price of a proposed token for ``asked`` of the ``rows`` of a step.

        The unit is what a token costs in a step of these rows without drafts. 0.0 until it is known, so that
        it is tried.
        """
        size = asked.bit_length()
        if not self._seconds or not step_seconds:
            return 0.0
        nearest = min(self._seconds, key=lambda known: abs(known - size))
        return self._seconds[nearest] / step_seconds * rows / asked
