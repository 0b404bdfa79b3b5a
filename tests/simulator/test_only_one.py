"""Larger prefill chunks in lockstep under random arrivals, and planted bugs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from parallel.lockstep import StepHeader, is_only_one

Rule = Callable[[Sequence[StepHeader], int], bool]
SMALL, LARGE = 5, 20


class Broken(Exception):
    """Raised where two chunks of a step are larger, or one beside known work."""


def walk(seed: int, rule: Rule, size: int = 3, steps: int = 60) -> int:
    """Steps of a group whose prompts arrive at random; returns the number of larger chunks."""
    chance, left, believes = random.Random(seed), [0] * size, [False] * size
    known = [0] * size
    """What each rank had at the last step's headers, as others know it."""
    larger = 0
    for step in range(steps):
        for rank in range(size):
            if chance.random() < 0.08:
                left[rank] += chance.choice([3, 40, 90])
        counts = [min(left[rank], LARGE if believes[rank] else SMALL) for rank in range(size)]
        if chance.random() < 0.1:  # it has no block for a row
            counts[chance.randrange(size)] = 0
        large = [rank for rank in range(size) if counts[rank] > SMALL]
        if len(large) > 1 or any(known[other] for rank in large for other in range(size) if other != rank):
            raise Broken
        larger += len(large)
        left = [have - count for have, count in zip(left, counts, strict=True)]
        headers = [StepHeader(1, step, counts[rank], queued_prefill=left[rank]) for rank in range(size)]
        believes = [rule(headers, rank) for rank in range(size)]
        known = [counts[rank] + left[rank] for rank in range(size)]
    return larger


def test_one_instance_at_most_takes_a_larger_chunk_and_none_beside_others() -> None:
    assert sum(walk(seed, is_only_one) for seed in range(300)) > 300


def only_others_are_idle(headers: Sequence[StepHeader], rank: int) -> bool:
    """Two that get a prompt in the same step after a pause both believe it."""
    return not any(each.num_tokens or each.queued_prefill for each in headers if each is not headers[rank])


def queues_do_not_count(headers: Sequence[StepHeader], rank: int) -> bool:
    return headers[rank].num_tokens > 0 and sum(each.num_tokens > 0 for each in headers) == 1


def only_its_own_header(headers: Sequence[StepHeader], rank: int) -> bool:
    return headers[rank].num_tokens > 0


@pytest.mark.parametrize("bug", [only_others_are_idle, queues_do_not_count, only_its_own_header])
def test_planted_bugs_are_found(bug: Rule) -> None:
    with pytest.raises(Broken):
        [walk(seed, bug) for seed in range(300)]
