"""Order and window of the inputs of a pooled request, over drawn orders of answers."""

from __future__ import annotations

import random

import pytest

from router.pooled import batch
from router.pooled.batch import PooledBatch
from tests.nightly import examples


@pytest.mark.parametrize("seed", range(examples(200)))
def test_each_input_is_sent_and_answered_once_in_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers come in any order, some twice, as after a death."""
    monkeypatch.setattr(batch, "MOST_TOKENS", 100)
    draw = random.Random(seed)
    sizes = [draw.choice([1, 9, 40, 130]) for _ in range(draw.randint(1, 40))]
    work: PooledBatch[str] = PooledBatch(sizes, most=7)
    under_way: list[int] = []
    sent: list[int] = []
    answered: set[int] = set()
    while not work.is_complete:
        new = list(work.to_send())
        sent += new
        under_way += new
        assert under_way, "it never stands still"
        assert len(under_way) <= 7
        assert sum(sizes[each] for each in under_way) <= 100 or len(under_way) == 1
        index = draw.choice(under_way)
        under_way.remove(index)
        assert work.take(index, f"first of {index}")
        answered.add(index)
        assert not work.take(draw.choice(sorted(answered)), "a second one")
        if waiting := [each for each in range(len(sizes)) if each not in sent]:
            assert not work.take(waiting[0], "of one that was not sent")
    assert sent == list(range(len(sizes)))
    assert work.answers() == [f"first of {index}" for index in range(len(sizes))]
