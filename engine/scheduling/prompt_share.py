"""Limit of prompt tokens in a step while requests decode (pure)."""

from __future__ import annotations


class PromptShare:
    """Limit of prompt tokens by which prefill adds about a given time to a step.

    It follows from how long steps with prompts took. From a few dozen on, products take nearly the same time
    for each token of a step. So smaller prefill chunks cost little, and with a large model everybody's next
    token waits for less. Sarathi-Serve calls this stall-free batching, with a number of tokens that is chosen
    by hand.
    """

    LEAST, MULTIPLE = 32, 16
    """Least tokens, and the number of which all are multiples.

    With fewer, the weights of a step are read for too little.
    """
    DOWN, UP = 0.5, 0.05
    """Part of the way that the estimate moves to a shorter, or longer, time.

    The reason why one step was slow, such as a neighbour or first touched memory, does not last.
    """

    def __init__(self, most: int, seconds: float | None) -> None:
        """``most``: tokens, however fast they are. ``seconds``: of all; None: however slow they are."""
        self._most = self.tokens = most
        self._seconds = seconds
        self._each = 0.0

    def __repr__(self) -> str:
        return f"<PromptShare of {self.tokens} tokens, {1e3 * self._each:.2f} ms each>"

    def took(self, tokens: int, seconds: float, largest: int = 0, own: float = 0.0) -> None:
        """Take in a step with some prompt tokens, of ``tokens`` in all.

        ``largest``: tokens of a step beside it. Either may have waited for the other, so a token takes
        something between the times by either number; an estimate between them is kept.
        ``own``: seconds in which nobody was waited for, such as those of attention. They are known to be for
        these tokens, however large the others' steps are.
        """
        larger = max(tokens, largest)
        if self._seconds is None or larger < self.LEAST:
            return
        each = min(max(self._each, seconds / larger, own / tokens), seconds / tokens)
        change = each - self._each
        self._each = self._each + change * (self.UP if change > 0 else self.DOWN) if self._each else each
        fits = int(self._seconds / self._each) if self._each else self._most
        self.tokens = min(self._most, max(self.LEAST, fits // self.MULTIPLE * self.MULTIPLE))
