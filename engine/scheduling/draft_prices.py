"""What drafted tokens bring, and what they cost (pure)."""

from __future__ import annotations

import numpy as np


def moved(chance: float, drafted: int, accepted: int, memory: int) -> float:
    """A chance after a draft of which so many tokens were taken."""
    for taken in [1.0] * accepted + [0.0] * (accepted < drafted):
        chance += (taken - chance) / memory
    return chance


class DraftTrust:
    """How likely the next token of a draft is to be taken, given that all before it were."""

    MEMORY = 10
    """Of drafted tokens, about so many of the last ones count."""
    LONGEST_PAUSE = 64
    """Tokens of a request that nothing is drafted for, after drafts that brought nothing."""

    def __init__(self, chance: float) -> None:
        self.chance = chance
        self._pause = 0
        self._waits = 0

    def __repr__(self) -> str:
        return f"<DraftTrust {self.chance:.2f}, waits {self._waits}>"

    def length(self, most: int, price: float) -> tuple[int, float]:
        """Tokens to draft at the price of each, and how many more than that they will probably bring.
        Where not even one pays, one is tried now and then all the same: texts change."""
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
        """Of a draft so many tokens were taken."""
        self.chance = moved(self.chance, drafted, accepted, self.MEMORY)
        if accepted:
            self._pause = 0
        elif self.chance <= price:
            self._pause = min(self.LONGEST_PAUSE, max(1, 2 * self._pause))
            self._waits = self._pause


class StepCost:
    """What a step takes, as seconds = fixed + each * tokens + extra where drafts are: least squares
    over the steps so far, of which newer ones count more, beginning from a guess.

    Where memory sets the pace a further token adds little, and drafts are nearly free; where products do, a
    drafted token costs as much as any, and only what is the same for a whole step can be spared. A step with
    drafts takes longer besides, and so does the one after it: one that only takes the rows of the step before
    on needs no packing."""

    FORGETTING = 0.995
    GUESSED_SHARE, GUESSED_EXTRA = 0.3, 0.05
    """Of a step without drafts: what its tokens cost, and what drafting adds."""
    BELIEF = 0.5
    """Steps that the guess counts as."""
    STEPS_PER_FIT = 16
    LOWEST, HIGHEST = 0.05, 0.95
    """Prices."""

    def __init__(self) -> None:
        self._sums = [0.0] * 8
        """Of the steps: 1, tokens, drafts, tokens squared, tokens with drafts; and seconds alone, times
        tokens, and with drafts."""
        self._fixed = self._each = self._extra = 0.0
        self._steps = 0

    def __repr__(self) -> str:
        return f"<StepCost of {self._steps} steps>"

    def took(self, tokens: int, drafts: bool, seconds: float) -> None:
        """A step of so many tokens, none of prompts, that has drafts or follows one that had."""
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

    def prices(self, rows: int) -> tuple[float, float]:
        """Of a drafted token, and of drafting at all, beside so many rows.

        The unit is what a token costs in a step of these rows without drafts: that is what each token saves
        that is taken.
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
