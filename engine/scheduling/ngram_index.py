"""Where the end of a growing text stood before (pure)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

MOST_COMPARED = 8
"""Earlier places of the same last tokens, the newest first."""


class NgramIndex:
    """Where the short runs of tokens of a growing text stand: chains of earlier places as LZ77 compressors
    keep them, of which each token costs a number and a dictionary's entry at most."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest
        self._newest: dict[int, int] = {}
        """By hash of a run: the last place where such a run ends."""
        self._before = array("i")
        """By place: the one before it with the same hash, -1 if there is none."""
        self._last_run: int | None = None
        """Hash of the run that was looked for last, which ends at the place that is taken in next."""

    def __repr__(self) -> str:
        return f"<NgramIndex of {len(self._before)} tokens>"

    def __len__(self) -> int:
        """Tokens that were taken in: all but the last one of the text, if there was time for them."""
        return len(self._before)

    def find(self, tokens: Sequence[int], allowance: int) -> int | None:
        """Where the end of these tokens stood before: the place of its last token.

        Of several the one before which most tokens agree, of those the newest. None as well as long as not
        all tokens are taken in, of which ``allowance`` says how many may be now.
        """
        last, run, self._last_run = len(tokens) - 1, self._last_run, None
        if run is not None and len(self._before) == last - 1:
            self._add(run)
        elif not self._take_in(tokens, last, allowance):
            return None
        if last < self._shortest:
            return None
        self._last_run = hash(tuple(tokens[-self._shortest :]))
        place = self._newest.get(self._last_run, -1)
        return None if place < 0 else self._best(tokens, last, place)

    def _add(self, run: int) -> None:
        place = len(self._before)
        self._before.append(self._newest.get(run, -1))
        self._newest[run] = place

    def _take_in(self, tokens: Sequence[int], end: int, allowance: int) -> bool:
        """All tokens before ``end``; False if there are too many for now."""
        begin = len(self._before)
        for place in range(begin, min(end, begin + allowance)):
            if place + 1 < self._shortest:
                self._before.append(-1)
            else:
                self._add(hash(tuple(tokens[place + 1 - self._shortest : place + 1])))
        return len(self._before) >= end

    def _best(self, tokens: Sequence[int], last: int, place: int) -> int | None:
        best, most = None, self._shortest - 1
        for _ in range(MOST_COMPARED):
            if place < 0:
                break
            agreeing = 0
            while agreeing < self._longest and agreeing <= place:
                if tokens[place - agreeing] != tokens[last - agreeing]:
                    break
                agreeing += 1
            if agreeing > most:
                best, most = place, agreeing
                if agreeing == self._longest:
                    break
            place = self._before[place]
        return best
