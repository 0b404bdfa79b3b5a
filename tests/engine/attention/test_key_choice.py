"""Choice of keys by an indexer's scores, against the definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention import make_attention
from engine.attention.base import LayerShape, PackedRows, Scoring
from engine.attention.key_choice import BestBlocks, BestKeys, ChoiceRule, Question, best
from engine.attention.kv_codes import KVCodes
from engine.attention.torch_paged import TorchPagedAttention

BLOCK_SIZE = 4
LENGTH = 37
HEADS, DIM = 2, 8
SHAPE = LayerShape(2, 16, 12, None, index_dim=DIM)
CHUNKS = {
    "whole": [(0, LENGTH)],
    "in chunks": [(0, 5), (5, 20), (20, LENGTH)],
    "one by one": [(position, position + 1) for position in range(LENGTH)],
}


def test_of_equal_scores_the_first_are_chosen() -> None:
    scores = torch.tensor([[1.0, 3, 1, 2, 1, 1], [0, 0, 0, 0, 0, 0], [5, 4, 3, 2, 1, 0]])
    expected = [[0, 1, 3], [0, 1, 2], [0, 1, 2]]
    assert [line.nonzero().flatten().tolist() for line in best(scores, 3)] == expected
    assert best(scores, 6).all()
    numbers = torch.randint(0, 4, (200, 50), generator=torch.Generator().manual_seed(1)).float()
    for count in (1, 7, 49):
        order = numbers.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert torch.equal(
            best(numbers, count), torch.zeros(200, 50, dtype=torch.bool).scatter(1, order, True)
        )


def by_definition(
    rule: ChoiceRule, queries: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """[groups, queries, keys], one query at a time."""
    groups = 1 if isinstance(rule, BestKeys) else HEADS
    found = torch.zeros(groups, LENGTH, LENGTH, dtype=torch.bool)
    for at in range(LENGTH):
        products = torch.stack([keys[: at + 1] @ queries[at, head] for head in range(HEADS)])
        if isinstance(rule, BestKeys):
            scores = sum(weights[at, head] * products[head].relu() for head in range(HEADS))
            found[0, at, sorted(range(at + 1), key=lambda k: (-float(scores[k]), k))[: rule.count]] = True
            continue
        assert isinstance(rule, BestBlocks)
        for head in range(HEADS):
            blocks = products[head].split(rule.size)
            own = len(blocks) - 1
            order = sorted(
                range(own + 1), key=lambda b: (not own - rule.local < b, -float(blocks[b].max()), b)
            )
            for block in order[: rule.count]:
                found[head, at, block * rule.size : min((block + 1) * rule.size, at + 1)] = True
    return found


@pytest.mark.parametrize("backend", ["TORCH_SDPA", "TORCH_FIXED"])
@pytest.mark.parametrize(
    "rule", [BestKeys(6), BestKeys(1), BestBlocks(3, 4, 1), BestBlocks(2, 5, 2)], ids=str
)
@pytest.mark.parametrize("chunks", CHUNKS)
def test_queries_attend_to_what_the_definition_says(chunks: str, rule: ChoiceRule, backend: str) -> None:
    generator = torch.Generator().manual_seed(3)
    queries, weights = (torch.randn(LENGTH, HEADS, *more, generator=generator) for more in ((DIM,), ()))
    index_keys = torch.randn(LENGTH, DIM, generator=generator).round()
    query, key, value = (
        torch.randn(heads, LENGTH, dim, generator=generator)
        for heads, dim in ((4, SHAPE.key_dim), (2, SHAPE.key_dim), (2, SHAPE.value_dim))
    )
    cache = make_attention(
        [SHAPE],
        num_blocks=16,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=backend,  # type: ignore[arg-type]
    )
    tables = np.random.default_rng(2).permutation(16)[:10].astype(np.int32)[None]
    found = []
    for begin, end in CHUNKS[chunks]:
        rows = PackedRows(
            np.array([begin]), np.array([end - begin]), tables, np.arange(begin, end), int(end == begin + 1)
        )
        plan = cache.plan(rows)
        part = slice(begin, end)
        question = Question(queries[part], weights[part], index_keys[part], rule)
        chosen = plan.choose(0, question)  # type: ignore[attr-defined]
        scoring = Scoring(0.3, chosen=chosen if chosen.visible else None)
        found.append(plan.attend(0, query[:, part], key[:, part], value[:, part], scoring))
    visible = by_definition(rule, queries, weights, index_keys)
    scores = query @ key.repeat_interleave(2, dim=0).transpose(1, 2) * 0.3
    scores = scores.masked_fill(~visible.repeat_interleave(4 // len(visible), dim=0), float("-inf"))
    expected = (scores.softmax(dim=-1) @ value.repeat_interleave(2, dim=0)).transpose(0, 1)
    torch.testing.assert_close(torch.cat(found), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("codes", [None, "int8"])
def test_an_indexers_keys_are_counted_and_stored_with_the_block(codes: KVCodes | None) -> None:
    cache = TorchPagedAttention(
        [SHAPE, LayerShape(2, 16, 12, None)],
        num_blocks=3,
        block_size=BLOCK_SIZE,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        codes=codes,
    )
    per_token = sum(layer.bytes_per_token(torch.bfloat16, codes) for layer in cache.layers)
    assert sum(each.nbytes for each in cache.stored) == per_token * 3 * BLOCK_SIZE
    assert all(len(each) == 3 * BLOCK_SIZE for each in cache.stored)
