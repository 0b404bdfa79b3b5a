"""Index of the earlier occurrences of a growing text's last tokens (pure)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MOST_COMPARED = 8
"""Earlier occurrences that are compared, the newest first."""


class NgramIndex:
    """Index of the n-grams of a growing text, by their newest position.

    They are chains of earlier positions, as LZ77 compressors keep them. A token costs a number and an entry
    of a dictionary at most.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._newest: dict[int, int] = {}
        """By hash of a run: the last position at which such a run ends."""
        self._before = array("i")
        """By position: the one before it with the same hash, -1 if there is none."""
        self._last_run: int | None = None
        """Hash of the run searched last, which ends at the next position to index."""

    def __repr__(self) -> str:
        return f"<NgramIndex of {len(self._before)} tokens>"

    def __len__(self) -> int:
        """Indexed tokens: all but the text's last one, if there was time for them."""
        return len(self._before)

    def find(self, tokens: Sequence[int], allowance: int) -> int | None:
        """Position of the last token of an earlier occurrence of the end of these tokens.

        It is the occurrence before which most tokens agree, and the newest of several such. None also as long
        as not all tokens are indexed; ``allowance`` limits how many of them are indexed now.
        """
        last, run, self._last_run = len(tokens) - 1, self._last_run, None
        if run is not None and len(self._before) == last - 1:
            self._add(run)
        elif not self._take_in(tokens, last, allowance):
            return None
        if last < self._shortest:
            return None
        self._last_run = hash(tuple(tokens[-self._shortest :]))
        position = self._newest.get(self._last_run, -1)
        return None if position < 0 else self._best(tokens, last, position)

    def _add(self, run: int) -> None:
        position = len(self._before)
        self._before.append(self._newest.get(run, -1))
        self._newest[run] = position

    def _take_in(self, tokens: Sequence[int], end: int, allowance: int) -> bool:
        """Index all tokens before ``end``; False if there are too many for now."""
        begin = len(self._before)
        for position in range(begin, min(end, begin + allowance)):
            if position + 1 < self._shortest:
                self._before.append(-1)
            else:
                self._add(hash(tuple(tokens[position + 1 - self._shortest : position + 1])))
        return len(self._before) >= end

    def _best(self, tokens: Sequence[int], last: int, position: int) -> int | None:
        best, most = None, self._shortest - 1
        for _ in range(MOST_COMPARED):
            if position < 0:
                break
            agreeing = 0
            while agreeing < self._longest and agreeing <= position:
                if tokens[position - agreeing] != tokens[last - agreeing]:
                    break
                agreeing += 1
            if agreeing > most:
                best, most = position, agreeing
                if agreeing == self._longest:
                    break
            position = self._before[position]
        return best
