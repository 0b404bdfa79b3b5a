"""Instances of a launcher that ended for good though nobody asked them to (pure)."""

from __future__ import annotations

from collections import deque

MOST_REMEMBERED = 64
"""Latest losses of which the text is kept."""
MOST_NAMED = 3
"""Losses that one text names."""


class Losses:
    """Counter of lost instances, so that a command can report losses since it began."""

    def __init__(self) -> None:
        self.count = 0
        self._latest: deque[str] = deque(maxlen=MOST_REMEMBERED)

    def __repr__(self) -> str:
        return f"<Losses {self.count}>"

    def note(self, text: str) -> None:
        """Record an instance that ended and is not restarted; ``text`` names it and how."""
        self.count += 1
        self._latest.append(text)

    def since(self, count: int) -> str:
        """The latest losses beyond the first ``count``, for people; empty if there are none."""
        new = self.count - count
        if new <= 0:
            return ""
        named = list(self._latest)[-min(new, MOST_NAMED) :]
        more = [f"and {new - len(named)} before"] if new > len(named) else []
        return "; ".join([*named, *more])
