"""Prompt tokens that a step takes while requests decode (pure)."""

from __future__ import annotations


class PromptShare:
    """Bound on prompt tokens such that prefill adds about ``SECONDS`` to a step.

    It follows from how long steps with prompts took. From a few dozen on, products take nearly the same time
    for each token of a step. So smaller prefill chunks cost little, and with a large model everybody's next
    token waits for less. Sarathi-Serve calls this stall-free batching, with a number of tokens that is chosen
    by hand.
    """

    SECONDS = 0.15
    LEAST, MULTIPLE = 32, 16
    """Least tokens, and the number of which all are multiples.

    With fewer, the weights of a step are read for too little.
    """
    DOWN, UP = 0.5, 0.05
    """Part of the way that the estimate moves to a shorter, or longer, time.

    The reason why one step was slow, such as a neighbour or first touched memory, does not last.
    """

    def __init__(self, most: int, *, is_bound: bool = True) -> None:
        """``most``: tokens, however fast they are. ``is_bound``: whether time limits them, too."""
        self._most = self.tokens = most
        self._is_bound = is_bound
        self._each = 0.0

    def __repr__(self) -> str:
        return f"<PromptShare of {self.tokens} tokens, {1e3 * self._each:.2f} ms each>"

    def took(self, tokens: int, seconds: float) -> None:
        """Take in a step with some prompt tokens, of ``tokens`` in all."""
        if not self._is_bound or tokens < self.LEAST:
            return
        each = seconds / tokens
        change = each - self._each
        self._each = self._each + change * (self.UP if change > 0 else self.DOWN) if self._each else each
        wanted = int(self.SECONDS / self._each) // self.MULTIPLE * self.MULTIPLE if self._each else self._most
        self.tokens = min(self._most, max(self.LEAST, wanted))
