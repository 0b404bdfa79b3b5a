"""Limit of a step of batch lines alone, for other requests that may come (pure)."""

from __future__ import annotations


class LinesShare:
    """Limit of tokens by which a step of batch lines is short.

    A request that comes waits for the step that runs. Steps of lines last about :data:`SECONDS` from any
    other request on, until they have taken :data:`LASTS` in all: by then nobody seems to come. Later ones
    last about :data:`SECONDS_ALONE`, or longer where that would waste much: what any step costs, however few
    its tokens, is at most one part in :data:`PARTS` of it. That part is not known below twice :data:`FIRST`
    tokens, so these later steps may have so many.
    """

    SECONDS, LASTS = 0.005, 10.0
    SECONDS_ALONE, PARTS = 0.025, 16
    AGAIN, RISING = 256, 32
    """Steps between two measured ones, and the part that a slower one counts."""
    LEAST, FIRST = 4, 16
    """Tokens at least, and at first: of a large model, fewer would hardly be faster."""
    SLOWER, FASTER = 4, 8
    """Parts of the tokens: taken off after a long step, added after a short one."""

    def __init__(self, most: int) -> None:
        """``most``: tokens of the largest step."""
        self._most = most
        self._short = self._alone = min(self.FIRST, most)
        self._small: tuple[float, float] | None = None
        """Tokens and seconds of the fastest small step lately; None: of none yet."""
        self._num_alone = 1
        """Number of the next step alone; of :data:`AGAIN` one is small, to be measured."""
        self._left = 0.0

    def __repr__(self) -> str:
        return f"<LinesShare of {self.tokens} tokens, {self._left:.1f} s left>"

    @property
    def are_short(self) -> bool:
        """Whether other requests came lately."""
        return self._left > 0

    @property
    def tokens(self) -> int:
        """Most tokens of the next step of lines alone."""
        if self.are_short:
            return self._short
        return min(self.FIRST, self._alone) if self._num_alone % self.AGAIN == 0 else self._alone

    def others_run(self) -> None:
        """Note that another request runs."""
        self._left = self.LASTS

    def took(self, tokens: int, seconds: float, largest: int = 0) -> None:
        """Take in a step of lines alone.

        ``largest``: tokens of the largest step beside it, in lockstep. A larger one was waited for: if that
        took long, fewer tokens here would not help.
        """
        was_waited_for = largest > tokens
        if not was_waited_for and tokens <= 2 * self.FIRST:
            self._measure(tokens, seconds)
        if self.are_short:
            self._left -= seconds
            self._short = self._changed(self._short, tokens, seconds, self.SECONDS, was_waited_for)
        else:
            self._num_alone += 1
            most = max(self.SECONDS_ALONE, self.PARTS * self._fixed(tokens, seconds))
            self._alone = self._changed(self._alone, tokens, seconds, most, was_waited_for)

    def _changed(self, limit: int, tokens: int, seconds: float, most: float, was_waited_for: bool) -> int:
        """Limit of tokens after a step that is to take ``most`` seconds."""
        if seconds > most:
            shorter = max(min(self.LEAST, self._most), limit - -(-limit // self.SLOWER))
            return limit if was_waited_for else shorter
        return min(self._most, limit + -(-limit // self.FASTER)) if tokens >= limit else limit

    def _measure(self, tokens: int, seconds: float) -> None:
        if self._small is None or seconds < self._small[1]:
            self._small = tokens, seconds
        elif tokens <= max(self._small[0], self.FIRST):  # a model's steps may have become slower
            few, short = self._small
            self._small = few + (tokens - few) / self.RISING, short + (seconds - short) / self.RISING

    def _fixed(self, tokens: int, seconds: float) -> float:
        """Seconds of a step besides its tokens; 0 where not known."""
        if tokens <= 2 * self.FIRST:
            return seconds  # let them grow
        if self._small is None:
            return 0.0
        few, short = self._small
        return max(0.0, short - few * (seconds - short) / (tokens - few))
