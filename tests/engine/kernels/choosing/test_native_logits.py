"""Logits by the kernels: the same tokens as torch, but for rounding, in any batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.compute.logits_backend import SampleRow
from engine.compute.native_logits import NativeLogits
from engine.compute.sampler import Sampler, backend_on
from engine.compute.token_rules import TokenRules
from engine.compute.torch_logits import TorchLogits, _exponentials
from engine.kernels.choosing import logits as native
from engine.kernels.core import library
from engine.sampling import SamplingParams

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

CPU = torch.device("cpu")
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-30},
    {"temperature": 1e300},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
    {"top_k": 1},
    {"top_k": 300},
    {"top_k": 5000, "top_p": 0.5},
    {"min_p": 0.1},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.05},
    {"top_p": 1e-9},
]


def row_of(params: SamplingParams, number: int = 0) -> SampleRow:
    history = np.zeros(1, dtype=np.int64)
    return SampleRow(params, 7919 * number + 3, number + 5, history, 0, TokenRules(params))


def both(monkeypatch: pytest.MonkeyPatch, compute: Any) -> tuple[Any, Any]:
    """Results of the kernels and of torch."""
    with monkeypatch.context() as patch:
        patch.setattr(library, "loaded", lambda: KERNELS)
        found = compute()
        patch.setattr(library, "loaded", lambda: None)
        return found, compute()


def test_the_kernels_are_chosen_once_and_on_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "loaded", lambda: KERNELS)
    sampler = Sampler(CPU)
    assert isinstance(backend_on(torch.device("cuda")), TorchLogits)
    monkeypatch.setattr(library, "loaded", lambda: None)
    assert isinstance(sampler.backend, NativeLogits)
    assert isinstance(backend_on(CPU), TorchLogits)


def random(rows: int, columns: int, spread: float) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)) * spread


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("spread", [0.1, 3.0, 60.0])
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 300, 8192])
def test_the_same_tokens_are_drawn(
    columns: int, spread: float, kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random(200, columns, spread)
    rows = [row_of(SamplingParams(**kind), number) for number in range(len(logits))]
    found, expected = both(monkeypatch, lambda: Sampler(CPU).sample(logits, rows))
    assert found.tolist() == expected.tolist()


def test_a_large_vocabulary_with_all_kinds_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random(len(KINDS), 151_936, 2.0)
    rows = [row_of(SamplingParams(**kind), number) for number, kind in enumerate(KINDS)]
    found, expected = both(monkeypatch, lambda: Sampler(CPU).sample(logits, rows))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    "kind", [{}, {"temperature": 0.0}, {"temperature": 0.3}, {"temperature": 1e-30}], ids=str
)
@pytest.mark.parametrize("sizes", [[150, 150], [1, 299], [75, 74, 76, 75]], ids=str)
def test_the_best_of_the_ranks_is_that_of_one(
    sizes: list[int], kind: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = random(200, sum(sizes), 3.0)
    rows = [row_of(SamplingParams(**kind), number) for number in range(len(logits))]

    def best() -> list[int]:
        begins = np.cumsum([0, *sizes])
        parts = [
            backend_on(CPU).contestants(part, rows, int(first))
            for part, first in zip(logits.split(sizes, dim=1), begins, strict=False)
        ]
        scores, tokens = (torch.stack(each, dim=1) for each in zip(*parts, strict=True))
        found: list[int] = tokens.gather(1, scores.argmax(dim=1, keepdim=True))[:, 0].tolist()
        return found

    for row in range(0, len(logits), 4):  # as grammars do: few tokens may come, and of most ranks none
        allowed = logits[row, row % 3 :: 37].clone()
        logits[row] = -np.inf
        logits[row, row % 3 :: 37] = allowed
    for row in range(1, len(logits), 4):  # one alone, as where reasoning has to end
        logits[row, torch.arange(logits.shape[1]) != row % logits.shape[1]] = -np.inf
    expected = Sampler(CPU).sample(logits, rows).tolist()
    assert both(monkeypatch, best) == (expected, expected)


def test_the_best_of_the_ranks_is_that_of_one_also_if_all_are_as_fast() -> None:
    """Nothing but rounding tells these tokens apart: none may depend on the tokens beside it."""
    assert KERNELS is not None
    columns, seeds, positions = 3000, list(range(60)), np.arange(60)
    logits = (
        _exponentials(torch.arange(columns, dtype=torch.int32)[None], seeds, positions.tolist()).log().float()
    )
    how = native.draws([native.draw_of(SamplingParams(), seed) for seed in seeds])
    expected = native.draw(KERNELS, logits, how, positions).tolist()
    for sizes in ([1500, 1500], [1, 2999], [751, 749, 750, 750]):
        begins = np.cumsum([0, *sizes])
        parts = [
            native.contestants(KERNELS, part.contiguous(), how, positions, int(first))
            for part, first in zip(logits.split(sizes, dim=1), begins, strict=False)
        ]
        scores, tokens = (np.stack(each, axis=1) for each in zip(*parts, strict=True))
        assert tokens[positions, scores.argmax(axis=1)].tolist() == expected


@pytest.mark.parametrize(
    ("kind", "left"),
    [
        ({"top_k": 5}, 5),
        ({"top_p": 0.5}, 64),
        ({"top_k": 32, "top_p": 0.25}, 8),
        ({"top_k": 400}, 128),
        ({}, 128),
    ],
)
def test_of_equal_ones_the_first_are_left(kind: dict[str, Any], left: int) -> None:
    assert KERNELS is not None
    how = native.draws([native.draw_of(SamplingParams(**kind), 1)] * 4000)
    found = native.draw(KERNELS, torch.full((4000, 128), 1.5), how, np.arange(4000))
    assert set(found.tolist()) == set(range(left))


def test_a_row_alone_and_any_number_of_threads_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KERNELS is not None
    logits = random(64, 5000, 1.0)
    kinds = [native.draw_of(SamplingParams(**KINDS[row % len(KINDS)]), row) for row in range(64)]
    positions = np.arange(64)
    expected = native.draw(KERNELS, logits, native.draws(kinds), positions)
    alone = [
        int(
            native.draw(
                KERNELS, logits[row : row + 1], native.draws(kinds[row : row + 1]), positions[row : row + 1]
            )[0]
        )
        for row in range(64)
    ]
    assert alone == expected.tolist()
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert native.draw(KERNELS, logits, native.draws(kinds), positions).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_cannot_be_is_not_chosen(kind: dict[str, Any]) -> None:
    assert KERNELS is not None
    logits = random(50, 100, 200.0)
    logits[:, ::2] = -torch.inf
    logits[:25, 10:] = -torch.inf
    how = native.draws([native.draw_of(SamplingParams(**kind), row) for row in range(50)])
    chosen = native.draw(KERNELS, logits, how, np.arange(50))
    assert all(token % 2 == 1 for token in chosen)
    assert all(token < 10 for token in chosen[:25])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_that_are_no_numbers_end(kind: dict[str, Any]) -> None:
    """With the first that is none, as greedy rows do."""
    assert KERNELS is not None
    logits = random(6, 400, 1.0)
    logits[0] = torch.nan
    logits[1, 33] = torch.nan
    logits[2, 44] = torch.inf
    logits[3] = -torch.inf
    logits[4, 5:] = torch.nan
    logits[5, 100:] = -torch.inf
    how = native.draws([native.draw_of(SamplingParams(**kind), 1)] * 6)
    found = native.draw(KERNELS, logits, how, np.arange(6)).tolist()
    assert found[:5] == [0, 33, 44, 0, 5]
    assert found[5] < 100
    table = native.logprobs(KERNELS, logits, np.arange(6), 20)
    assert table.shape == (6, 43)
    assert all(len(set(line[3:23])) == 20 for line in table)


@pytest.mark.parametrize("first", [0, 3, 100])
def test_penalties_and_masks_are_those_of_torch(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random(4, 150, 2.0)
    histories = [np.random.default_rng(row).integers(0, 300, 40 * row) for row in range(4)]
    masks = [np.random.default_rng(row).integers(0, 256, 38, dtype=np.uint8) for row in range(4)]
    kinds = [
        {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
        {"repetition_penalty": 0.5},
        {},
        {"frequency_penalty": -2.0},
    ]
    rows = [
        SampleRow(
            params, 1, len(histories[row]), histories[row], len(histories[row]) // 2, TokenRules(params), mask
        )
        for row, params, mask in zip(
            (1, 2, 3, 0),
            [SamplingParams(**kind) for kind in kinds],
            [masks[0], None, masks[2], masks[3]],
            strict=True,
        )
    ]
    before = logits.clone()
    for _ in range(2):  # nothing of the first time is left
        found, expected = both(monkeypatch, lambda: Sampler(CPU).shape(logits, rows, first))
        assert torch.equal(found == -torch.inf, expected == -torch.inf)
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6)
    assert not torch.equal(found, before)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, 100, 400])
def test_log_probabilities_are_those_of_torch(num_top: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = random(9, 300, 3.0)
    logits[1, 50:] = -torch.inf
    logits[2] *= 100  # most are impossible
    logits[0] = -3e38  # as of broken weights: further from the best one than a float can say
    logits[0, [5, 8, 9]] = torch.tensor([3e38, 1.0, 2.0])
    targets = torch.arange(9) * 30
    found, expected = both(monkeypatch, lambda: Sampler(CPU).logprob_table(logits, targets, num_top))
    assert torch.equal(found[:, 0], expected[:, 0])
    assert torch.allclose(found[:, 1], expected[:, 1], rtol=1e-5)
    assert torch.equal(found[3:, 2], expected[3:, 2]), "where nothing is equal"
    made = min(num_top, 300)
    assert torch.allclose(found[:, 3 + made :], expected[:, 3 + made :], rtol=1e-5)
    assert torch.equal(found[3:, 3 : 3 + made], expected[3:, 3 : 3 + made])
    assert all(len(set(line.tolist())) == made for line in found[:, 3 : 3 + made])
