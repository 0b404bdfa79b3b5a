"""Drafts for tests: a model's future output, but for some tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from engine.config.speculation import SpeculativeConfig
from engine.speculation.speculation import Speculation, Text


class Oracle(Speculation):
    """Drafter that knows what follows a text.

    It drafts by chance, not by cost.
    """

    def __init__(
        self, follows: Callable[[list[int], int], list[int]], right: float, most: int = 5, seed: int = 0
    ) -> None:
        """``follows`` gives the next tokens of a text, so many.

        Each is drafted as it is with the probability ``right``, else another one.
        """
        super().__init__(SpeculativeConfig(num_speculative_tokens=most))
        self._follows = follows
        self._most = most
        self._right = right
        self._random = random.Random(seed)

    def is_off(self, running: int) -> bool:
        return False

    def draft(self, texts: Sequence[Text], rows: int, room: int) -> list[list[int]]:
        drafts = []
        for _, tokens, most in texts:
            found = self._follows(list(tokens), self._random.randrange(min(most, self._most, room) + 1))
            room -= len(found)
            drafts.append(
                [token if self._random.random() < self._right else abs(token - 1) for token in found]
            )
        return drafts


def knowing(texts: Sequence[Sequence[int]]) -> Callable[[list[int], int], list[int]]:
    """An oracle for these texts, which begin differently."""

    def follows(tokens: list[int], count: int) -> list[int]:
        for text in texts:
            if list(text[: len(tokens)]) == tokens:
                return list(text[len(tokens) : len(tokens) + count])
        raise AssertionError(f"nobody says {tokens}")

    return follows
