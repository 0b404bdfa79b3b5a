"""Choice of the keys that each query attends to, by the scores of an indexer.

An indexer has small keys of its own, one per token, which are cached in the same blocks as the layer's keys
and values. Each query scores those of its context, and attends to the best keys, or to the best blocks of
keys. Of equal scores the lower position is better. So a query's keys depend on its own context alone.

Contexts of up to as many tokens as are chosen are seen whole: nothing is scored for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionPlan, KeyChoice, PackedRows

SCORES_AT_ONCE = 1 << 22
"""Most scores of one head that are held at once."""

Products = Callable[[int], torch.Tensor]
"""Products [queries, keys] of one head of an indexer."""


class ChoiceRule(Protocol):
    """Which keys of a context a query attends to."""

    @property
    def seen_whole(self) -> int:
        """Tokens of the longest context of which all keys are chosen."""
        ...

    def num_groups(self, heads: int) -> int:
        """Number of choices of a query: KV heads are grouped by them."""
        ...

    def choose(self, products: Products, weights: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
        """Keys that queries attend to: [groups of KV heads, queries, keys] of bool.

        Args:
            products: of the indexer's heads.
            weights: [queries, heads] of the heads.
            causal: [queries, keys], whether a key is not behind the query.
        """
        ...


@dataclass(frozen=True)
class BestKeys:
    """Choice of the keys with the highest scores: weighted sums over heads.

    Negative products count as 0 (DeepSeek-V3.2, GLM-5).
    """

    count: int

    @property
    def seen_whole(self) -> int:
        """See :class:`ChoiceRule`."""
        return self.count

    def num_groups(self, heads: int) -> int:
        """See :class:`ChoiceRule`."""
        return 1

    def choose(self, products: Products, weights: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
        """See :class:`ChoiceRule`."""
        scores = torch.zeros(causal.shape, dtype=torch.float32, device=causal.device)
        for head in range(weights.shape[1]):  # one order of sums, whatever the number of queries
            scores += F.relu(products(head)) * weights[:, head, None]
        scores.masked_fill_(~causal, float("-inf"))
        return (best(scores, self.count) & causal)[None]


@dataclass(frozen=True)
class BestBlocks:
    """Choice of blocks of keys, for each head by itself (MiniMax-M3).

    Those with the highest product of a key, and the last ones.
    """

    count: int
    size: int
    local: int
    """Blocks up to the query's own that are always chosen."""

    @property
    def seen_whole(self) -> int:
        """See :class:`ChoiceRule`."""
        return self.count * self.size

    def num_groups(self, heads: int) -> int:
        """See :class:`ChoiceRule`."""
        return heads

    def choose(self, products: Products, weights: torch.Tensor, causal: torch.Tensor) -> torch.Tensor:
        """See :class:`ChoiceRule`."""
        length = causal.shape[1]
        missing = -length % self.size
        own = (causal.sum(dim=1, keepdim=True) - 1) // self.size
        blocks = torch.cumsum(torch.ones_like(causal[:1, :: self.size], dtype=torch.int64), dim=1) - 1
        is_local = (blocks <= own) & (blocks > own - self.local)
        found = []
        for head in range(weights.shape[1]):
            scores = products(head).masked_fill(~causal, float("-inf"))
            scores = F.pad(scores, (0, missing), value=float("-inf")).unflatten(1, (-1, self.size))
            chosen = best(scores.amax(dim=2).masked_fill(is_local, float("inf")), self.count)
            found.append(chosen.repeat_interleave(self.size, dim=1)[:, :length] & causal)
        return torch.stack(found)


class Question(NamedTuple):
    """What an indexer asks for the tokens of a step."""

    queries: torch.Tensor
    """[tokens, heads, dim]"""
    weights: torch.Tensor
    """[tokens, heads] weights of the heads."""
    keys: torch.Tensor
    """[tokens, dim] the tokens' own keys, for later queries, too."""
    rule: ChoiceRule


class ChoosingPlan(AttentionPlan, Protocol):
    """Attention plan whose queries can attend to chosen keys."""

    def choose(self, layer: int, question: Question) -> KeyChoice:
        """Store the indexer's keys of this step, then choose for each query."""
        ...


class IndexCache(Protocol):
    """Cache of an indexer's keys."""

    def store_index(self, layer: int, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Store keys [tokens, dim]."""
        ...

    def index_context(self, layer: int, rows: PackedRows, row: int) -> torch.Tensor:
        """Keys [tokens, dim] in float32 of a row's context, up to its last token."""
        ...

    def index_products(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Products [queries, keys] of float32 numbers."""
        ...


def choose_keys(
    cache: IndexCache, layer: int, rows: PackedRows, slots: torch.Tensor, question: Question
) -> KeyChoice:
    """See :meth:`ChoosingPlan.choose`."""
    cache.store_index(layer, slots, question.keys)
    ends = rows.starts + rows.counts
    if int(ends.max(initial=0)) <= question.rule.seen_whole:
        return KeyChoice([])
    visible, token = [], 0
    for row, (start, count) in enumerate(zip(rows.starts.tolist(), rows.counts.tolist(), strict=True)):
        queries, weights, _, rule = question
        own = Question(queries[token : token + count], weights[token : token + count], question.keys, rule)
        keys = cache.index_context(layer, rows, row)
        visible.append(_choose_for_row(cache, own, keys, start))
        token += count
    return KeyChoice(visible)


def _choose_for_row(cache: IndexCache, own: Question, keys: torch.Tensor, start: int) -> torch.Tensor:
    """[groups, queries, keys] of a row that begins at a position."""
    count, length = len(own.queries), len(keys)
    places = torch.arange(length, device=keys.device)
    if length <= own.rule.seen_whole:
        groups = own.rule.num_groups(own.weights.shape[1])
        return (places <= places[start:, None]).expand(groups, -1, -1)
    found = []
    step = max(SCORES_AT_ONCE // length, 1)
    for begin in range(0, count, step):
        part = slice(begin, min(begin + step, count))
        queries = own.queries[part].float()
        causal = places <= places[start:][part, None]
        found.append(
            own.rule.choose(
                lambda head, queries=queries: cache.index_products(queries[:, head], keys),  # type: ignore[misc]
                own.weights[part].float(),
                causal,
            )
        )
    return torch.cat(found, dim=1)


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Which scores are the highest of their line; of equal ones the first are."""
    if scores.shape[-1] <= count:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(count, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    missing = count - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= missing))
