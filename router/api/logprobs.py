"""Log-probabilities as clients want them: three shapes of the same numbers (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

import msgspec

from engine.messages import TokenLogprobs
from engine.sampling import ALL_LOGPROBS
from router.openai_api import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from router.text.tokens import Tokenizer

Shape = TypeVar("Shape")

LOWEST = -9999.0
"""Value for minus infinity, which JSON does not have."""


class LogprobShapes:
    """Converter of log-probabilities to the shapes that one request asks for."""

    def __init__(self, tokenizer: Tokenizer, num_top: int, *, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._as_token_ids = as_token_ids

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
    ) -> CompletionLogprobs:
        """Shape of completions: parallel lists, None for unknown values as of a first token."""
        return CompletionLogprobs(
            tokens=[self._name(token_id) for token_id in token_ids],
            token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in logprobs],
            top_logprobs=[None if entry is None else encoded(self._top_by_text(entry)) for entry in logprobs],
            text_offset=list(offsets),
        )

    def chat(self, logprobs: Sequence[TokenLogprobs]) -> ChatLogprobs:
        return ChatLogprobs([self._chat_entry(entry) for entry in logprobs])

    def prompt(self, logprobs: Sequence[TokenLogprobs | None], num_top: int) -> PromptLogprobs:
        """vLLM's ``prompt_logprobs``: by token id, the prompt's own token first."""
        return [None if entry is None else self._by_id(entry, num_top) for entry in logprobs]

    def prompt_encoded(self, logprobs: Sequence[TokenLogprobs | None], num_top: int) -> PromptLogprobs:
        """The shape of :meth:`prompt`, its entries encoded as JSON."""
        return [None if entry is None else encoded(self._by_id(entry, num_top)) for entry in logprobs]

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._tokenizer.token_bytes(token_id))

    def _top(self, entry: TokenLogprobs) -> list[tuple[int, float]]:
        top = zip(_first(entry.top_ids, self._num_top), entry.top_logprobs, strict=False)
        return [(token_id, _finite(logprob)) for token_id, logprob in top]

    def _top_by_text(self, entry: TokenLogprobs) -> dict[str, float]:
        """Log-probabilities of the most likely tokens and of the one sampled, by text.

        Among tokens with the same text, the likeliest counts.
        """
        found: dict[str, float] = {}
        for token_id, logprob in [*self._top(entry), (entry.token_id, _finite(entry.logprob))]:
            found.setdefault(self._name(token_id), logprob)
        return found

    def _chat_entry(self, entry: TokenLogprobs) -> TokenLogprob:
        return TokenLogprob(
            token=self._name(entry.token_id),
            logprob=_finite(entry.logprob),
            bytes=self._bytes(entry.token_id),
            top_logprobs=[
                TopLogprob(self._name(token_id), logprob, self._bytes(token_id))
                for token_id, logprob in self._top(entry)
            ],
        )

    def _by_id(self, entry: TokenLogprobs, num_top: int) -> dict[int, PromptLogprob]:
        text = self._tokenizer.token_text
        own = PromptLogprob(_finite(entry.logprob), entry.rank, text(entry.token_id))
        found = {entry.token_id: own}
        top = zip(_first(entry.top_ids, num_top), entry.top_logprobs, strict=False)
        for rank, (token_id, logprob) in enumerate(top, start=1):
            found.setdefault(token_id, PromptLogprob(_finite(logprob), rank, text(token_id)))
        return found


def _first(ids: Sequence[int], count: int) -> Sequence[int]:
    return ids if count == ALL_LOGPROBS else ids[:count]


def encoded(value: Shape) -> Shape:
    """A shape with its parts encoded as JSON.

    Encoding all of a large answer at once would hold up the other threads. As objects it is several times as
    large.
    """
    return cast(Shape, msgspec.Raw(msgspec.json.encode(value)))


def offsets_of(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Where in their text, with all special tokens, each of these tokens begins."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    offsets = []
    length = 0
    for token_id in token_ids:
        offsets.append(length)
        length += len(detokenizer.step(token_id))
    return offsets


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # NaN ends up there too
