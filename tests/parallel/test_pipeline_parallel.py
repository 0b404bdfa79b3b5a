from __future__ import annotations

import itertools
import random

import pytest

from parallel.pipeline_parallel import balanced_split, check_split, layers_of, parse_split
from parallel.topology import CannotCut, cores_of_worker, kv_heads_of


def test_a_split_as_it_is_written() -> None:
    assert parse_split("10,12,10") == (10, 12, 10)
    for bad in ("", "a", "1,,2", "1,0", "-1,3"):
        with pytest.raises(ValueError, match="no list of layers per stage"):
            parse_split(bad)


def test_layers_are_neighbours() -> None:
    assert [list(layers_of((1, 3, 2), stage)) for stage in range(3)] == [[0], [1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("split", "layers", "stages", "said"),
    [
        (None, 3, 4, "use at most 3"),
        ((1, 2), 3, 3, "is for 2 stages"),
        ((1, 1), 3, 2, "adds up to 2 layers, but the model has 3"),
    ],
)
def test_splits_that_do_not_fit(split: tuple[int, ...] | None, layers: int, stages: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_split(split, layers, stages)


def largest(layers: list[int], first: int, last: int, split: tuple[int, ...]) -> int:
    sizes = [sum(layers[index] for index in layers_of(split, stage)) for stage in range(len(split))]
    sizes[0] += first
    sizes[-1] += last
    return max(sizes)


def test_balanced_is_as_small_as_can_be() -> None:
    assert balanced_split([1] * 32, 0, 0, 4) == (8, 8, 8, 8)
    assert balanced_split([10] * 10, 30, 30, 2) == (5, 5)
    assert balanced_split([10] * 9, 40, 0, 2) == (2, 7)
    rng = random.Random(1)
    for _ in range(150):
        layers = [rng.randrange(1, 20) for _ in range(rng.randrange(1, 8))]
        first, last = rng.randrange(40), rng.randrange(40)
        stages = rng.randrange(1, len(layers) + 1)
        split = balanced_split(layers, first, last, stages)
        check_split(split, len(layers), stages)
        possible = [
            each
            for each in itertools.product(range(1, len(layers) + 1), repeat=stages)
            if sum(each) == len(layers)
        ]
        assert largest(layers, first, last, split) == min(
            largest(layers, first, last, each) for each in possible
        )


def test_kv_heads_follow_the_query_heads() -> None:
    assert [kv_heads_of(8, 4, rank, 2) for rank in range(2)] == [(0, 2), (2, 4)]
    assert [kv_heads_of(8, 2, rank, 4) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [kv_heads_of(4, 1, rank, 4) for rank in range(4)] == [(0, 1)] * 4
    with pytest.raises(CannotCut, match=r"cannot be divided by 3\. Sizes that do: 1, 2, 4, 8"):
        kv_heads_of(8, 2, 0, 3)
    with pytest.raises(CannotCut, match=r"Sizes that do: 1, 2, 6"):
        kv_heads_of(6, 2, 0, 3)


def test_each_worker_gets_cores_of_its_own_or_none_does() -> None:
    assert [cores_of_worker([4, 5, 6, 7], worker, 2, 2) for worker in range(2)] == [(4, 5), (6, 7)]
    assert cores_of_worker([4, 5], 0, 2, 2) == ()
    assert cores_of_worker([], 0, 1, 1) == ()
