"""Length of prefill chunks while an instance has one request only (pure)."""

from __future__ import annotations


class LoneChunk:
    """Length of the next prefill chunk of a lone request, by how long chunks took.

    Each chunk reads all keys before it again, so with larger ones the first token comes sooner. A request
    that arrives meanwhile waits for the rest of one. So a chunk beyond the usual budget should take no more
    than ``seconds``. The time of a token rises with its position, as it attends to all tokens before it. It
    is estimated as ``each + more * position`` from the steps of such requests.
    """

    MULTIPLE = 16
    """Number of tokens of which larger chunks are multiples."""
    LEAST = 256
    """Fewest tokens of a step that says something about the time of more tokens."""
    SCALE = 1024.0
    """Position at which both terms learn alike: before it ``each``, behind it ``more``."""
    GAIN = 0.5
    """Part of an error that one step corrects."""
    BEYOND = 2
    """Multiple of the measured tokens and positions up to which the estimate is trusted."""

    def __init__(self, usual: int, most: int, seconds: float) -> None:
        """``usual``: tokens that a step may have in any case. ``most``: no more, however fast."""
        self._usual, self._most, self._seconds = usual, most, seconds
        self._each = self._more = 0.0
        self._furthest = self._largest = 0
        """Position and tokens of what was measured."""

    def __repr__(self) -> str:
        return f"<LoneChunk {1e6 * self._each:.1f} us a token, {1e9 * self._more:.1f} ns more per position>"

    def took(self, start: int, tokens: int, seconds: float) -> None:
        """Take in a step that had nothing but ``tokens`` of one prompt from ``start`` on."""
        if self._most <= self._usual or tokens < self.LEAST:
            return
        position, measured = start + tokens / 2, seconds / tokens
        if self._largest == 0:
            self._each = measured
        error = measured - self._each - self._more * position
        share = position / self.SCALE
        correction = self.GAIN * error / (1 + share * share)
        self._each = max(0.0, self._each + correction)
        self._more = max(0.0, self._more + correction * share / self.SCALE)
        self._furthest = max(self._furthest, start + tokens)
        self._largest = max(self._largest, tokens)

    def tokens(self, start: int) -> int:
        """Most tokens of the chunk that begins at ``start``."""
        if start > self.BEYOND * self._furthest:
            return self._usual
        most = min(self._most, self.BEYOND * self._largest)
        first = self._each + self._more * start
        # tokens * (first + more * tokens / 2) = seconds, solved without the division by a vanishing ``more``
        root = (first * first + 2 * self._more * self._seconds) ** 0.5
        bound = 2 * self._seconds / (first + root) if first + root else most
        return max(self._usual, int(min(most, bound)) // self.MULTIPLE * self.MULTIPLE)
