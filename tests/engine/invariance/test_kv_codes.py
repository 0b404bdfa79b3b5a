"""What changes no bit of an answer where keys and values are kept as codes."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.config import SHIPPED_MODEL
from engine.kernels.core import library
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.model.finding import MODELS_DIRECTORY
from tests.engine.invariance.answers import ALONE, Answers, How, Instance, load, settings
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.shard_threads import ThreadedShards

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

DIRECTORY = MODELS_DIRECTORY / SHIPPED_MODEL


@cache
def instance(kept: str) -> Instance:
    return load(DIRECTORY, kept=kept)


@cache
def submits(greedy: bool) -> list[Submit]:
    vocab_size = instance("int8").info.vocab_size
    return requests(7, vocab_size=vocab_size, greedy=greedy, count=8, longest=60, most=48)


@cache
def alone(kept: str, greedy: bool) -> Answers:
    return instance(kept).answers(submits(greedy), ALONE)[0]


@pytest.mark.parametrize(("kept", "greedy"), [("int8", True), ("fp8", False)])
def test_batches_pieces_prefixes_and_preemption_change_nothing(kept: str, greedy: bool) -> None:
    expected = alone(kept, greedy)
    scarce = longest_of(submits(greedy)) // 16 * 16 + 48
    ways: list[dict[str, Any]] = [{}, {"budget": 64}, {"ngrams": True}, {"cache": scarce, "budget": 64}]
    for way in ways:
        found, counters = instance(kept).answers(submits(greedy), How(**way))
        assert found == expected
    assert counters.preemptions
    assert expected != alone("auto", greedy)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_ranks_and_stages_change_nothing(layout: dict[str, int]) -> None:
    executor = ThreadedShards(settings(DIRECTORY, kept="int8"), read_model_info(Path(DIRECTORY)), **layout)
    try:
        executor.load(lambda _phase: None)
        found, _ = Instance(DIRECTORY, executor).answers(submits(True), How(budget=64))
        assert found == alone("int8", True)
    finally:
        executor.close()
