"""Sources of drafted tokens: the text of a request, or a model (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.config.speculation import SpeculativeConfig
from engine.speculation.ngram_index import NgramIndex

NOTHING: list[int] = []


class Proposer(Protocol):
    """Source of the tokens that may come next in one request."""

    def __len__(self) -> int:
        """Number of tokens of the text that are indexed."""
        ...

    def look(self, tokens: Sequence[int], allowance: int) -> int | None:
        """Most tokens that can be proposed behind these; None: any number.

        ``allowance``: tokens that may be indexed for it now.
        """
        ...

    def take(self, tokens: Sequence[int], length: int) -> list[int]:
        """So many tokens behind these, for which :meth:`look` was called last."""
        ...

    def offer(self, length: int, proposal: list[int]) -> None:
        """Take in what a model proposes behind the first ``length`` tokens."""
        ...

    @property
    def is_paid(self) -> bool:
        """Whether proposing has cost its time already, so that only checking is to be paid."""
        ...


class NgramProposer:
    """Proposes what followed the last tokens where they stood before."""

    is_paid = False

    def __init__(self, config: SpeculativeConfig) -> None:
        self._ngrams = NgramIndex(config.prompt_lookup_min, config.prompt_lookup_max)
        self._position = 0

    def __repr__(self) -> str:
        return f"<NgramProposer {self._ngrams!r}>"

    def __len__(self) -> int:
        return len(self._ngrams)

    def look(self, tokens: Sequence[int], allowance: int) -> int | None:
        """See :meth:`Proposer.look`."""
        position = self._ngrams.find(tokens, allowance)
        if position is None:
            return 0
        self._position = position
        return None

    def take(self, tokens: Sequence[int], length: int) -> list[int]:
        """See :meth:`Proposer.take`."""
        position, end = self._position, len(tokens)
        found = list(tokens[position + 1 : position + 1 + length])
        while len(found) < length:  # what follows there is the end of the text, which goes on with the draft
            found.append(found[position + 1 + len(found) - end])
        return found

    def offer(self, length: int, proposal: list[int]) -> None:
        """Does nothing: no model proposes."""


class ModelProposer:
    """Proposes what a model gave in the step before."""

    is_paid = True

    def __init__(self) -> None:
        self._length = 0
        """Number of tokens behind which the proposal stands."""
        self._proposal = NOTHING

    def __repr__(self) -> str:
        return f"<ModelProposer of {len(self._proposal)} tokens>"

    def __len__(self) -> int:
        return 0

    def look(self, tokens: Sequence[int], allowance: int) -> int | None:
        """See :meth:`Proposer.look`."""
        return len(self._proposal) if len(tokens) == self._length else 0

    def take(self, tokens: Sequence[int], length: int) -> list[int]:
        """See :meth:`Proposer.take`."""
        return self._proposal[:length]

    def offer(self, length: int, proposal: list[int]) -> None:
        """See :meth:`Proposer.offer`."""
        self._length, self._proposal = length, proposal


class CombinedProposer:
    """Proposes what followed the last tokens before, else what a model gave."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._lookup, self._model = NgramProposer(config), ModelProposer()
        self._source: Proposer = self._model

    def __repr__(self) -> str:
        return f"<CombinedProposer {self._lookup!r} {self._model!r}>"

    def __len__(self) -> int:
        return len(self._lookup)

    @property
    def is_paid(self) -> bool:
        """See :attr:`Proposer.is_paid`."""
        return self._source.is_paid

    def look(self, tokens: Sequence[int], allowance: int) -> int | None:
        """See :meth:`Proposer.look`."""
        self._source = self._lookup
        return None if self._lookup.look(tokens, allowance) is None else self.look_at_model(tokens)

    def look_at_model(self, tokens: Sequence[int]) -> int | None:
        """The same of the model alone."""
        self._source = self._model
        return self._model.look(tokens, 0)

    def take(self, tokens: Sequence[int], length: int) -> list[int]:
        """See :meth:`Proposer.take`."""
        return self._source.take(tokens, length)

    def offer(self, length: int, proposal: list[int]) -> None:
        """See :meth:`Proposer.offer`."""
        self._model.offer(length, proposal)


def proposer_of(config: SpeculativeConfig) -> Proposer:
    """The proposer that the settings ask for."""
    if config.combines:
        return CombinedProposer(config)
    return ModelProposer() if config.by_model else NgramProposer(config)
