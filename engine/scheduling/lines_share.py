"""Limit of a step of batch lines alone, while other requests come (pure)."""

from __future__ import annotations


class LinesShare:
    """Limit of tokens by which a step of batch lines lasts about :data:`SECONDS`.

    A request that comes waits for the step that runs. So steps of lines are short from any other request on,
    until they have taken :data:`LASTS` in all: by then nobody seems to come.
    """

    SECONDS, LASTS = 0.005, 10.0
    LEAST, FIRST = 4, 16
    """Tokens at least, and at first: of a large model, fewer would hardly be faster."""
    SLOWER, FASTER = 4, 8
    """Parts of the tokens: taken off after a long step, added after a short one."""

    def __init__(self, most: int) -> None:
        """``most``: tokens of a step while no other requests come."""
        self._most = most
        self._short = min(self.FIRST, most)
        self._left = 0.0

    def __repr__(self) -> str:
        return f"<LinesShare of {self.tokens} tokens, {self._left:.1f} s left>"

    @property
    def are_short(self) -> bool:
        """Whether other requests came lately; else nothing is limited."""
        return self._left > 0

    @property
    def tokens(self) -> int:
        """Most tokens of the next step of lines alone."""
        return self._short if self.are_short else self._most

    def others_run(self) -> None:
        """Note that another request runs."""
        self._left = self.LASTS

    def took(self, tokens: int, seconds: float, largest: int = 0) -> None:
        """Take in a step of lines alone.

        ``largest``: tokens of the largest step beside it, in lockstep. A larger one was waited for: if that
        took long, fewer tokens here would not help.
        """
        if self._left <= 0:
            return
        self._left -= seconds
        if seconds > self.SECONDS and largest > tokens:
            return
        if seconds > self.SECONDS:
            self._short = max(min(self.LEAST, self._most), self._short - -(-self._short // self.SLOWER))
        elif tokens >= self._short:
            self._short = min(self._most, self._short + -(-self._short // self.FASTER))
