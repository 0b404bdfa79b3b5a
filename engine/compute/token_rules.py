"""Rules of one request for single tokens: allowed, forbidden, biased or barred ones.

A worker keeps them with the request's slot. Made of lists in every step they could cost more than the model:
as many tokens may be allowed as the vocabulary has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.transfer import upload
from engine.sampling import SamplingParams


@dataclass(frozen=True)
class Columns:
    """Columns of logits: tokens from ``first`` on, all or a tensor-parallel rank's."""

    first: int
    count: int
    device: torch.device

    def of(self, tokens: Iterable[int]) -> npt.NDArray[np.int64]:
        """Columns of these tokens, without tokens that have none here."""
        found = np.fromiter(tokens, dtype=np.int64) - self.first
        return found[(found >= 0) & (found < self.count)]


@dataclass(frozen=True)
class RuleTensors:
    """The rules of a request for some columns, as tensors."""

    forbidden: torch.Tensor
    """[columns], whether a token can never come."""
    biased: torch.Tensor
    """Columns with a bias."""
    biases: torch.Tensor
    barred: torch.Tensor
    """Columns of tokens that end a request."""


class TokenRules:
    """Token rules of one request, cached as tensors per worker."""

    def __init__(self, params: SamplingParams, barred_ids: Sequence[int] = ()) -> None:
        """``barred_ids`` may not come before ``params.min_tokens``."""
        allowed = params.allowed_token_ids
        can_bar = bool(barred_ids) and (allowed is None or any(token not in barred_ids for token in allowed))
        self._params = params
        self._barred_ids = barred_ids
        self._never = [word[0] for word in params.bad_words if len(word) == 1]
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
        """Last tokens of bad words, by all tokens before."""
        for word in params.bad_words:
            if len(word) > 1:
                self._ends[word[:-1]].append(word[-1])
        self._lengths = sorted({len(beginning) for beginning in self._ends})
        self.forbids = allowed is not None or bool(self._never)
        """Whether some tokens can never come."""
        self.biases = bool(params.logit_bias)
        self.min_tokens = params.min_tokens if can_bar else 0
        """Output tokens before which some are barred; 0 if nothing else would be possible."""
        self._made: tuple[Columns, RuleTensors] | None = None

    def __repr__(self) -> str:
        return f"<TokenRules forbids={self.forbids} biases={self.biases} min_tokens={self.min_tokens}>"

    @property
    def has_bad_words(self) -> bool:
        """Whether there are bad words of several tokens, which depend on the output."""
        return bool(self._ends)

    def ends_of_bad_words(self, output: npt.NDArray[np.int64]) -> list[int]:
        """Tokens that would complete a bad word whose other tokens end the output."""
        return [
            token
            for length in self._lengths
            if length <= len(output)
            for token in self._ends.get(tuple(output[-length:].tolist()), ())
        ]

    def tensors(self, columns: Columns) -> RuleTensors:
        """The rules for these columns, which are always the same in one worker."""
        if self._made is None or self._made[0] != columns:
            self._made = columns, self._make(columns)
        return self._made[1]

    def _make(self, columns: Columns) -> RuleTensors:
        allowed, device = self._params.allowed_token_ids, columns.device
        forbidden = np.full(columns.count, allowed is not None)
        forbidden[columns.of(allowed or ())] = False
        forbidden[columns.of(self._never)] = True
        biased = columns.of(self._params.logit_bias)
        biases = [self._params.logit_bias[token] for token in (biased + columns.first).tolist()]
        return RuleTensors(
            upload(forbidden, device),
            upload(biased, device),
            upload(np.array(biases, dtype=np.float32), device),
            upload(columns.of(self._barred_ids), device),
        )
