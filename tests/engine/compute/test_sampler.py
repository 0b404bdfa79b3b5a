"""Sampling parameters against plain definitions, and chance by seed and position."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch

from engine.compute import torch_logits
from engine.compute.logits_backend import NEVER, SampleRow
from engine.compute.sampler import Sampler, read_logprobs
from engine.compute.token_rules import TokenRules
from engine.compute.torch_logits import NUCLEUS_WIDTH
from engine.kernels.core import library
from engine.sampling import SamplingParams, ThinkingBudget

VOCAB = 64
HISTORY = [3, 5, 5, 9, 3, 3, 9]
NUM_PROMPT = 3


@pytest.fixture(autouse=True, params=["torch", "kernels"])
def _computed_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of this holds for torch and for the kernels."""
    kernels = library.load()
    if request.param == "kernels" and kernels is None:
        pytest.skip("no AVX2, or no C++ compiler, here")
    monkeypatch.setattr(library, "loaded", lambda: kernels if request.param == "kernels" else None)


def sampler() -> Sampler:
    return Sampler(torch.device("cpu"))


def make_row(
    params: SamplingParams, *, seed: int = 1, position: int = 7, stop_ids: tuple[int, ...] = ()
) -> SampleRow:
    return SampleRow(params, seed, position, np.array(HISTORY), NUM_PROMPT, TokenRules(params, stop_ids))


def many_rows(params: SamplingParams, draws: Iterable[tuple[int, int]]) -> list[SampleRow]:
    """A row for each (seed, position).

    They share what a request would have of its own.
    """
    one = make_row(params)
    return [
        SampleRow(params, seed, position, one.token_ids, NUM_PROMPT, one.rules) for seed, position in draws
    ]


def make_logits(rows: int, vocab: int = VOCAB, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """Counts of each token in draws from one row of logits at many positions."""
    rows = many_rows(params, ((1, position) for position in range(count)))
    chosen = sampler().sample(logits.expand(count, -1), rows)
    return torch.bincount(chosen, minlength=logits.shape[-1])


def check_frequencies(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Check counts by chi-square, with cells of at least five expected.

    Impossible tokens must never come.
    """
    assert counts[expected == 0].sum() == 0
    total = counts.sum()
    usual = expected * total >= 5
    observed = torch.cat([counts[usual], counts[~usual].sum()[None]]).double()
    wanted = torch.cat([expected[usual], expected[~usual].sum()[None]]).double() * total
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = max(len(wanted) - 1, 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = make_logits(5)
    logits[2, 17] = logits[2, 40] = 50.0
    chosen = sampler().sample(logits, [make_row(SamplingParams(temperature=0.0))] * 5)
    assert chosen.tolist() == logits.argmax(dim=-1).tolist()
    assert chosen[2] == 17


@pytest.mark.parametrize("vocab", [2, 5, 300])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_frequencies_follow_the_temperature(vocab: int, temperature: float) -> None:
    logits = make_logits(1, vocab)
    counts = draw_many(logits, SamplingParams(temperature=temperature), 40_000)
    check_frequencies(counts, torch.softmax(logits[0].double() / temperature, dim=-1))


def test_frequencies_over_seeds() -> None:
    logits = make_logits(1)
    rows = many_rows(SamplingParams(), ((seed, 7) for seed in range(-20_000, 20_000)))
    counts = torch.bincount(sampler().sample(logits.expand(len(rows), -1), rows), minlength=VOCAB)
    check_frequencies(counts, torch.softmax(logits[0].double(), dim=-1))


def test_neighbouring_draws_are_independent() -> None:
    """Pairs of draws (next position, next seed) fill the square evenly."""
    flat = torch.zeros(1, 8)
    rows = many_rows(SamplingParams(), itertools.product(range(2), range(20_000)))
    chosen = sampler().sample(flat.expand(len(rows), -1), rows).view(2, -1)
    even = torch.full((64,), 1 / 64)
    check_frequencies(torch.bincount(chosen[0, :-1] * 8 + chosen[0, 1:], minlength=64), even)
    check_frequencies(torch.bincount(chosen[0] * 8 + chosen[1], minlength=64), even)


def test_a_token_that_is_alone_comes_even_with_the_slowest_clock() -> None:
    """The hash of these three is the largest possible, to the precision of float32."""
    row = make_row(SamplingParams(allowed_token_ids=(19144,)), seed=797, position=100)
    assert sampler().sample(make_logits(1, 20_000), [row]).item() == 19144


def test_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = make_logits(3) * 1e4
    rows = [make_row(SamplingParams(temperature=temperature)) for temperature in (1e-3, 1e-20, 1e-45)]
    assert sampler().sample(logits, rows).tolist() == logits.argmax(dim=-1).tolist()


def kept_by_definition(logits: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Probabilities after min-p, top-k and top-p, one token at a time."""
    probabilities = torch.softmax(logits.double(), dim=-1)
    probabilities[probabilities < min_p * probabilities.max()] = 0.0
    order = probabilities.argsort(descending=True).tolist()
    if top_k > 0:
        probabilities[order[top_k:]] = 0.0
    probabilities = probabilities / probabilities.sum()
    mass = 0.0
    for place, token in enumerate(order):
        if place > 0 and mass >= top_p:
            probabilities[token] = 0.0
        else:
            mass += float(probabilities[token])
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.05),
        (8, 0.6, 0.0),
        (6, 0.9, 0.1),
        (1, 1.0, 0.0),
        (0, 1e-6, 0.0),
        (1000, 0.5, 0.0),
        (0, 0.999999, 0.0),
    ],
)
def test_truncation(top_k: int, top_p: float, min_p: float) -> None:
    logits = make_logits(1, seed=3)
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p, min_p=min_p)
    check_frequencies(draw_many(logits, params, 20_000), kept_by_definition(logits[0], top_k, top_p, min_p))


@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_top_p_on_a_flat_distribution_sorts_it_all(top_p: float) -> None:
    """The top p needs more tokens than the sampler looks at first."""
    vocab = 3 * NUCLEUS_WIDTH
    logits = make_logits(1, vocab, spread=0.1)
    counts = draw_many(logits, SamplingParams(top_p=top_p), 4000)
    allowed = kept_by_definition(logits[0], 0, top_p, 0.0) > 0
    assert counts[~allowed].sum() == 0
    assert (counts > 0).sum() > 0.5 * min(4000, int(allowed.sum()))


def test_a_large_top_k_is_the_same_beside_a_row_without_one() -> None:
    logits = make_logits(1, 5000, spread=0.1)
    rows = [make_row(SamplingParams(top_k=4000), position=position) for position in range(60)]
    alone = sampler().sample(logits.expand(len(rows), -1), rows).tolist()
    ranks = logits[0].argsort(descending=True).argsort()
    assert max(ranks[token] for token in alone) > NUCLEUS_WIDTH
    beside = make_row(SamplingParams(top_p=0.1), position=1)
    mixed = [row for each in rows for row in (each, beside)]
    assert sampler().sample(logits.expand(len(mixed), -1), mixed)[::2].tolist() == alone


def test_the_same_race_with_and_without_truncation() -> None:
    """Keeping all tokens, or more than there are, chooses what no truncation would have chosen."""
    logits = make_logits(200)
    for params in (SamplingParams(top_k=VOCAB), SamplingParams(top_k=5000), SamplingParams(top_p=1 - 1e-12)):
        plain = sampler().sample(logits, [make_row(SamplingParams(), position=i) for i in range(200)])
        assert (
            sampler().sample(logits, [make_row(params, position=i) for i in range(200)]).tolist()
            == plain.tolist()
        )


def mixed_rows() -> list[SampleRow]:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(temperature=0.6, top_k=10),
        SamplingParams(temperature=1.4, top_p=0.9, min_p=0.01),
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(presence_penalty=1.0, logit_bias={4: 3.0}),
        SamplingParams(allowed_token_ids=(1, 2, 3, 4, 5)),
        SamplingParams(min_tokens=9, top_p=0.5),
    ]
    return [make_row(params, seed=index * 77, stop_ids=(0, 1)) for index, params in enumerate(kinds * 4)]


def test_any_batch_chooses_as_alone() -> None:
    rows = mixed_rows()
    logits = make_logits(len(rows))
    before = logits.clone()
    together = sampler().sample(logits, rows).tolist()
    assert torch.equal(logits, before)
    assert together == [int(sampler().sample(logits[i : i + 1], [row])) for i, row in enumerate(rows)]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1)).tolist()
    assert sampler().sample(logits[order], [rows[i] for i in order]).tolist() == [together[i] for i in order]


def test_rounding_hardly_changes_a_draw() -> None:
    """Noise as between two kernels in float32 changes none of many draws, of bfloat16 few."""
    vocab, count = 1000, 2000
    logits = make_logits(count, vocab)
    noise = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=40)):
        rows = many_rows(params, ((1, position) for position in range(count)))
        chosen = sampler().sample(logits, rows)
        assert (sampler().sample(logits + 1e-6 * noise, rows) != chosen).sum() <= 1
        assert (sampler().sample(logits + 1e-2 * noise, rows) != chosen).sum() <= 0.03 * count


def test_penalties() -> None:
    logits = make_logits(4)
    kinds = [
        SamplingParams(repetition_penalty=1.7),
        SamplingParams(presence_penalty=0.4),
        SamplingParams(frequency_penalty=-0.3),
        SamplingParams(repetition_penalty=0.8, presence_penalty=0.5, frequency_penalty=0.25),
    ]
    shaped = sampler().shape(logits, [make_row(params) for params in kinds])
    output = HISTORY[NUM_PROMPT:]
    for line, params, original in zip(shaped.tolist(), kinds, logits.tolist(), strict=True):
        for token, value in enumerate(original):
            expected = value
            if token in HISTORY:
                factor = params.repetition_penalty
                expected = value / factor if value > 0 else value * factor
            expected -= params.frequency_penalty * output.count(token)
            expected -= params.presence_penalty * (token in output)
            assert line[token] == pytest.approx(expected, abs=1e-5)


def test_a_temperature_beyond_float32_is_just_very_high() -> None:
    logits = make_logits(2)
    rows = [make_row(SamplingParams(temperature=1e308), seed=seed) for seed in range(2)]
    assert (
        len(sampler().sample(logits, rows)) == 2
    )  # and numpy warns of nothing, which would be an error here


def test_allowed_bias_and_minimum_length() -> None:
    logits = make_logits(5)
    rows = [
        make_row(SamplingParams(allowed_token_ids=(7, 2))),
        make_row(SamplingParams(logit_bias={7: 5.0, 2: -100.0})),
        make_row(SamplingParams(min_tokens=5), stop_ids=(0, 9)),
        make_row(SamplingParams(min_tokens=4), stop_ids=(0, 9)),  # four tokens are there already
        make_row(SamplingParams(min_tokens=5, allowed_token_ids=(0, 9)), stop_ids=(0, 9)),
    ]
    shaped = sampler().shape(logits, rows)
    assert shaped[0].isfinite().nonzero().flatten().tolist() == [2, 7]
    assert torch.equal(shaped[0, [2, 7]], logits[0, [2, 7]])
    difference = shaped[1] - logits[1]
    assert difference.nonzero().flatten().tolist() == [2, 7]
    assert difference[[2, 7]].tolist() == pytest.approx([-100.0, 5.0], abs=1e-4)
    assert (~shaped[2].isfinite()).nonzero().flatten().tolist() == [0, 9]
    assert torch.equal(shaped[3], logits[3])
    assert shaped[4].isfinite().nonzero().flatten().tolist() == [0, 9]


def test_nothing_asked_changes_nothing() -> None:
    logits = make_logits(2)
    assert sampler().shape(logits, [make_row(SamplingParams(), stop_ids=(1,))] * 2) is logits


@pytest.mark.parametrize("rows", [1, 3, 2000])
def test_logprobs(rows: int) -> None:
    logits = make_logits(rows).bfloat16()
    targets = torch.arange(rows) % VOCAB
    table = sampler().logprob_table(logits, targets, 4)
    logprobs = logits.float().log_softmax(dim=-1)
    for index in {0, rows // 2, rows - 1}:
        entry = read_logprobs(table[index].tolist(), 2)
        best = logprobs[index].topk(2)
        target = int(targets[index])
        assert entry.token_id == target
        assert entry.logprob == pytest.approx(logprobs[index, target].item())
        assert entry.rank == int((logprobs[index] > logprobs[index, target]).sum()) + 1
        assert entry.top_logprobs == pytest.approx(best.values.tolist())
        assert len(entry.top_ids) == 2
    assert read_logprobs(table[0].tolist(), 0).top_ids == []
    assert read_logprobs(sampler().logprob_table(logits[:1], targets[:1], 200)[0].tolist(), 200).top_ids != []


def test_bad_words_do_not_come() -> None:
    """The output is 9, 3, 3, 9 after a prompt of 3, 5, 5."""
    words = ((7,), (3, 9, 11), (9, 12), (5, 9, 3, 3, 9, 13), (3, 14), (9, 3, 3, 9, 15))
    row = make_row(SamplingParams(bad_words=words))
    logits = make_logits(2)
    shaped = sampler().shape(logits, [make_row(SamplingParams()), row])
    assert torch.equal(shaped[0], logits[0])
    never = [token for token in range(VOCAB) if shaped[1, token] == NEVER]
    assert never == [7, 11, 12, 15], "not what the prompt would be part of"
    assert torch.equal(
        sampler().shape(logits[:, 10:20], [row, row], first=10)[0] == NEVER, shaped[1, 10:20] == NEVER
    )
    greedy = SamplingParams(temperature=0.0, bad_words=((int(logits[0].argmax()),),))
    assert not greedy.is_plain
    assert sampler().sample(logits[:1], [make_row(greedy)]).item() == logits[0].topk(2).indices[1]


def test_a_budget_of_reasoning_leaves_one_token() -> None:
    """The output so far has four tokens."""
    logits = make_logits(3)
    spent = SamplingParams(thinking=ThinkingBudget(4, (), (33,)), logit_bias={33: -100.0})
    rows = [make_row(SamplingParams(thinking=ThinkingBudget(5, (), (33,)))), make_row(spent), make_row(spent)]
    shaped = sampler().shape(logits, rows)
    assert torch.equal(shaped[0], logits[0])
    assert sampler().sample(logits, rows).tolist()[1:] == [33, 33]
    mask = np.full(VOCAB // 8, 255, dtype=np.uint8)
    allowed = dataclasses.replace(rows[1], mask=mask)
    assert sampler().sample(logits[:1], [allowed]).item() == 33
    mask = mask.copy()
    mask[33 // 8] -= 1 << 33 % 8
    assert sampler().sample(logits[:1], [dataclasses.replace(rows[1], mask=mask)]).item() != 33, "not yet"
    for first in (0, 32):  # each rank of two has half of the vocabulary
        half = sampler().shape(logits[:, first : first + 32], rows, first=first)[1]
        assert [first + token for token in range(32) if half[token] != NEVER] == ([33] if first else [])


def test_a_rehearsal_does_what_takes_the_most_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With every row: masks, penalties, the whole vocabulary in order, log-probabilities. (On a GPU.)"""
    monkeypatch.setattr(library, "loaded", lambda: None)
    done: dict[str, int] = {}
    for name in ("_forbidden", "_penalise", "_truncate", "_logprob_lines"):
        original = getattr(torch_logits, name)

        def note(first: Any, *rest: Any, name: str = name, original: Any = original) -> Any:
            done[name] = done.get(name, 0) + len(first)
            if name == "_truncate":
                assert rest[-1] == first.shape[1], "not only the most likely ones"
            return original(first, *rest)

        monkeypatch.setattr(torch_logits, name, note)
    sampler().rehearse(make_logits(5, 61))
    assert done == {"_forbidden": 5, "_penalise": 5, "_truncate": 5, "_logprob_lines": 5}
