"""Bits of models whose queries see a part of their context, under all schedules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from engine.messages import Submit
from engine.transfers import price
from tests.engine.invariance.answers import ALONE, Answers, How, Instance, load
from tests.engine.invariance.mixed import requests
from tests.engine.states.models import make_state_model
from tests.engine.tiers.test_bits import Serving
from tests.engine.tiny_models import VOCAB

FAMILIES = [
    pytest.param(("llama4_text", "bfloat16")),
    pytest.param(("deepseek_v32", "bfloat16")),
    pytest.param(("GLM-5.2, shared choices", "float32"), marks=pytest.mark.nightly),
    pytest.param(("axk2", "bfloat16"), marks=pytest.mark.nightly),
    pytest.param(("hy_v4", "bfloat16"), marks=pytest.mark.nightly),
    pytest.param(("minimax_m3_vl_text", "bfloat16")),
]
NUM_REQUESTS = 10
SHARED = [4 + number % 97 for number in range(75)]


@pytest.fixture(scope="module", params=FAMILIES)
def instance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Instance:
    family, dtype = request.param
    torch.set_num_threads(1)
    directory = make_state_model(tmp_path_factory.mktemp(family), family, getattr(torch, dtype))
    return load(directory, dtype=dtype, batch_invariant=True)


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    """Requests of all kinds; every third begins as the first does."""
    drawn = requests(5, vocab_size=VOCAB, greedy=False, count=NUM_REQUESTS, longest=150, most=10)
    drawn = [
        msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, grammar=None))
        for each in drawn
    ]
    return [
        msgspec.structs.replace(each, prompt_ids=SHARED + each.prompt_ids[:30]) if index % 3 == 0 else each
        for index, each in enumerate(drawn)
    ]


@pytest.fixture(scope="module")
def alone(instance: Instance, submits: list[Submit]) -> Answers:
    return instance.answers(submits, ALONE)[0]


@pytest.mark.each_push
def test_answers_in_company_are_those_alone(
    instance: Instance, submits: Sequence[Submit], alone: Answers
) -> None:
    instance.check_in_company(submits, alone)


@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.nightly), 7, 50])
def test_chunks_of_any_size_give_the_same_bits(
    instance: Instance, submits: Sequence[Submit], alone: Answers, budget: int
) -> None:
    some = submits[:4]
    found, _ = instance.answers(some, How(budget=budget, caching=False))
    assert found == {each.request: alone[each.request] for each in some}


def test_found_prefixes_give_the_same_bits(
    instance: Instance, submits: Sequence[Submit], alone: Answers
) -> None:
    found, counters = instance.answers(submits, How(together=False))
    assert found == alone
    assert counters.prefix_cache_hits >= 64


def test_prefixes_that_are_read_from_files_give_the_same_bits(
    instance: Instance,
    submits: list[Submit],
    alone: Answers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Indexers' keys are in the files, too: without them other keys would be chosen."""
    monkeypatch.setattr(price, "WORTH", float("inf"))
    monkeypatch.setattr(price, "FEWEST", 16)
    for is_again in (False, True):
        serving = Serving(instance, tmp_path)
        try:
            assert serving.answers(submits) == alone
        finally:
            serving.close()
        counters = serving.core.reports.report(0, 0).transfers
        assert counters is not None
        assert (counters.prompt_tokens > 64, counters.wrong_blocks) == (is_again, 0)
