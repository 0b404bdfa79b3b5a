"""How many tokens of prompts a step takes while requests decode (pure)."""

from __future__ import annotations


class PromptShare:
    """So many that those who decode wait about ``SECONDS`` for them, by how long steps with prompts took.

    From a few dozen on, products take nearly the same time for each token of a step. So smaller pieces of a
    prompt cost little, and with a large model everybody's next token waits for less. Sarathi-Serve calls
    this stall-free batching, with a number of tokens that is chosen by hand."""

    SECONDS = 0.15
    LEAST, MULTIPLE = 32, 16
    """Tokens. With fewer a step's weights are read for too little."""
    DOWN, UP = 0.5, 0.05
    """Of the way to a step's time per token the estimate goes, if that is shorter or longer: what made one
    step slow, a neighbour or memory that it was the first to touch, does not last."""

    def __init__(self, most: int, *, is_bound: bool = True) -> None:
        """``most``: tokens, however fast they are. ``is_bound``: by time, too."""
        self._most = self.tokens = most
        self._is_bound = is_bound
        self._each = 0.0

    def __repr__(self) -> str:
        return f"<PromptShare of {self.tokens} tokens, {1e3 * self._each:.2f} ms each>"

    def took(self, tokens: int, seconds: float) -> None:
        """A step with some prompt in it, of so many tokens in all."""
        if not self._is_bound or tokens < self.LEAST:
            return
        each = seconds / tokens
        change = each - self._each
        self._each = self._each + change * (self.UP if change > 0 else self.DOWN) if self._each else each
        wanted = int(self.SECONDS / self._each) // self.MULTIPLE * self.MULTIPLE if self._each else self._most
        self.tokens = min(self._most, max(self.LEAST, wanted))
