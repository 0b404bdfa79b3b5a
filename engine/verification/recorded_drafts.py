"""Drafts that are the recorded tokens, for drawing an answer again in few steps (pure).

A drafted token counts only if the token that is drawn at its position equals it
(:mod:`engine.speculation.speculation`). So an answer is drawn as it would be without drafts, whatever was
recorded. Where all is as recorded, a step draws hundreds of its tokens at once, and the answer costs little
more than a prompt of its length.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.config.speculation import SpeculativeConfig
from engine.speculation.speculation import Drafter, Speculation, Text
from engine.step import Step

LONGEST = 1024
"""Most tokens of a draft."""
MOST_LOGITS = 1 << 25
"""Most logits of a draft, each 4 bytes: its tokens times the vocabulary."""
SHORTEST = 4
"""Tokens of the draft after a refused one.

They double as long as all are accepted.
"""
FORECAST = SpeculativeConfig()


class RecordedDrafter(Drafter):
    """Drafts of one request: what was recorded at the same positions."""

    def __init__(self, num_prompt: int, answer: Sequence[int], most: int) -> None:
        """``most``: tokens of the longest draft."""
        super().__init__(FORECAST, 1.0)
        self._num_prompt = num_prompt
        self._answer = answer
        self._most = self._longest = most

    def __repr__(self) -> str:
        return f"<RecordedDrafter of {len(self._answer)} tokens>"

    def following(self, tokens: Sequence[int], most: int) -> list[int]:
        """Recorded tokens behind these, which are prompt and output so far."""
        begin = len(tokens) - self._num_prompt
        return list(self._answer[begin : begin + max(0, min(most, self._longest))])

    def accepted(self, drafted: int, accepted: int) -> None:
        """Take in how many tokens of the last draft equal those that were drawn."""
        self._longest = min(self._most, 2 * self._longest) if accepted == drafted else SHORTEST


class RecordedDrafts(Speculation):
    """Drafter of an engine whose requests all have a recorded answer."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(FORECAST)
        self._most = max(SHORTEST, min(LONGEST, MOST_LOGITS // vocab_size))
        self._next: tuple[int, Sequence[int]] = (0, ())

    def __repr__(self) -> str:
        return "<RecordedDrafts>"

    def expect(self, num_prompt: int, answer: Sequence[int]) -> None:
        """The next request has so many prompt tokens, and this answer."""
        self._next = num_prompt, answer

    def drafter(self) -> Drafter:
        return RecordedDrafter(*self._next, self._most)

    def draft(self, texts: Sequence[Text], rows: int, room: int) -> list[list[int]]:
        drafts = []
        for drafter, tokens, most in texts:
            assert isinstance(drafter, RecordedDrafter)
            drafts.append(drafter.following(tokens, min(most, room)))
            room -= len(drafts[-1])
        return drafts

    def learn(self, drafter: Drafter, drafted: int, accepted: int) -> None:
        assert isinstance(drafter, RecordedDrafter)
        drafter.accepted(drafted, accepted)

    def is_off(self, running: int) -> bool:
        return False

    def took(self, step: Step, seconds: float, proposing: float, others: int = 0) -> None:
        """Durations decide nothing here."""
