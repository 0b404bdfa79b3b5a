"""Reasoning budgets: the moment at which the end of reasoning is forced."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from engine.compute.reasoning_budget import forced_token
from engine.sampling import SamplingParams, ThinkingBudget

BEGIN, END = 90, 91
INSIDE = ThinkingBudget(3, (), (END,))
OUTSIDE = ThinkingBudget(2, ((BEGIN,), (80, 81)), (END,))
WORDS = ThinkingBudget(2, (), (91, 92, 93))


@pytest.mark.parametrize(
    ("output", "thinking", "expected"),
    [
        ([], INSIDE, None),
        ([1, 2], INSIDE, None),
        ([1, 2, 3], INSIDE, END),
        ([1, 2, END], INSIDE, None),
        ([1, 2, 3, END], INSIDE, None),
        ([1, 2, 3, END, 4, 5, 6, 7], INSIDE, None),
        ([], ThinkingBudget(0, (), (END,)), END),
        ([END], ThinkingBudget(0, (), (END,)), None),
        # reasoning that the answer has to begin itself
        ([], OUTSIDE, None),
        ([1, 2, 3, 4], OUTSIDE, None),
        ([BEGIN, 1], OUTSIDE, None),
        ([BEGIN, 1, 2], OUTSIDE, END),
        ([80, 81, 1, 2], OUTSIDE, END),
        ([80, 1, 2, 3], OUTSIDE, None),
        ([BEGIN, 1, END, BEGIN, 1, 2, 3], OUTSIDE, None),
        # an end of several tokens
        ([1, 2], WORDS, 91),
        ([1, 2, 91], WORDS, 92),
        ([1, 2, 91, 92], WORDS, 93),
        ([1, 2, 91, 92, 93], WORDS, None),
        ([1, 91], WORDS, 91),
        ([1, 91, 91], WORDS, 92),
        ([1, 2, 91, 5], WORDS, 91),
    ],
)
def test_what_must_come(output: Sequence[int], thinking: ThinkingBudget, expected: int | None) -> None:
    assert forced_token(np.array(output, dtype=np.int64), thinking) == expected


@pytest.mark.parametrize("seed", range(50))
def test_reasoning_always_ends(seed: int) -> None:
    """The end comes whatever the model wants, also if that is parts of the end."""
    rng = random.Random(seed)
    output: list[int] = []
    for _ in range(40):
        must = forced_token(np.array(output, dtype=np.int64), WORDS)
        output.append(rng.choice([1, 91, 92, 93]) if must is None else must)
    ends = [at for at in range(len(output)) if tuple(output[at : at + 3]) == WORDS.end]
    assert ends
    assert ends[0] <= WORDS.tokens


def test_the_fast_way_of_choosing_is_not_taken() -> None:
    assert not SamplingParams(temperature=0.0, thinking=INSIDE).is_plain
