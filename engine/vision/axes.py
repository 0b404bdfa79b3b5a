"""Positions of tokens on three axes: time, height and width (pure).

Text moves along all three at once. The rows of an image stand still in time and spread over the other two.
The text behind it goes on after the image's longer side, so it is behind its place in the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.prompt_images import PromptImage

Int64s = npt.NDArray[np.int64]
NUM_AXES = 3


@dataclass(frozen=True)
class _Placed:
    """An image among a request's tokens."""

    first: int
    end: int
    begin: int
    """Position of its first row on each axis."""
    width: int
    """Rows beside each other."""


class RequestAxes:
    """Positions of a request's tokens."""

    def __init__(self, images: Sequence[PromptImage], merge: int) -> None:
        """``merge``: patches along each side of what becomes a row."""
        self._placed: list[_Placed] = []
        behind = 0
        for each in images:
            _, height, width = each.grid
            self._placed.append(_Placed(each.first, each.end, each.first - behind, width // merge))
            behind += (each.end - each.first) - max(height, width) // merge
        self.behind = behind
        """How far text behind the last image is behind its place."""
        self._end = images[-1].end if images else 0

    def __repr__(self) -> str:
        return f"<RequestAxes, {len(self._placed)} images, {self.behind} behind>"

    def write(self, start: int, into: Int64s) -> None:
        """Change places [3, tokens] from ``start`` on into positions on the axes."""
        if start >= self._end:
            into -= self.behind
            return
        stop, behind = start + into.shape[1], 0
        for index, each in enumerate(self._placed):
            begin = max(each.first, start)
            if begin < min(each.end, stop):
                row = np.arange(begin - each.first, min(each.end, stop) - each.first)
                here = into[:, begin - start : begin - start + len(row)]
                here[0], here[1], here[2] = (
                    each.begin,
                    each.begin + row // each.width,
                    each.begin + row % each.width,
                )
            following = self._placed[index + 1] if index + 1 < len(self._placed) else None
            behind = self.behind if following is None else following.first - following.begin
            text = max(each.end, start), stop if following is None else min(following.first, stop)
            if text[0] < text[1]:
                into[:, text[0] - start : text[1] - start] -= behind
