"""Log-probabilities of the texts of an answer (pure).

Parsers hold text back until they know what it is, and take some for reasoning or calls. So tokens wait here
until their text comes out as an item.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.messages import TokenLogprobs
from router.api.items import Closed, ItemEvent, ItemKind, TextAdded
from router.text.output_stream import TextPiece


def by_token(piece: TextPiece) -> Iterator[tuple[tuple[str, int], list[TokenLogprobs]]]:
    """Texts of a piece with their numbers of tokens (``piece.parts``) and log-probabilities."""
    parts = piece.parts
    if len(parts) == 1:
        yield parts[0], piece.logprobs
        return
    for position, part in enumerate(parts):
        yield part, piece.logprobs[position : position + 1]


class TextLogprobs:
    """Log-probabilities of tokens whose text has not come out yet."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, TokenLogprobs]] = []
        """Tokens, each with the number of characters that it made certain."""

    def __repr__(self) -> str:
        return f"<TextLogprobs of {len(self._waiting)} tokens that wait>"

    def of(
        self, text: str, logprobs: Sequence[TokenLogprobs], events: Sequence[ItemEvent]
    ) -> list[list[TokenLogprobs]]:
        """Log-probabilities for each event, given the next text and its tokens' values."""
        self._waiting += [(len(text), entry) for entry in logprobs]
        found = [self._taken(event) for event in events]
        if events:
            self._waiting.clear()
        return found

    def _taken(self, event: ItemEvent) -> list[TokenLogprobs]:
        match event:
            case TextAdded(item, text) if item.kind is ItemKind.TEXT:
                return self._last(len(text))
            case Closed(item) if item.kind is ItemKind.TEXT:
                return self._last(0)  # of the token that ended it, which has no text
        return []

    def _last(self, num_characters: int) -> list[TokenLogprobs]:
        """Log-probabilities of the last ``num_characters``, with tokens of their parts.

        A token without text is a part of a character that a later one completes.
        """
        begin = len(self._waiting)
        while begin and (num_characters > 0 or not self._waiting[begin - 1][0]):
            begin -= 1
            num_characters -= self._waiting[begin][0]
        taken = [entry for _, entry in self._waiting[begin:]]
        del self._waiting[begin:]
        return taken
