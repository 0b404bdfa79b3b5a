"""Models with recurrent states give the same bits alone, in company, in chunks and drafted."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import torch

from engine.messages import Submit
from engine.states.grid import GRID
from tests.engine.invariance.answers import ALONE, Answers, How, Instance, load
from tests.engine.invariance.mixed import requests
from tests.engine.states.models import make_state_model
from tests.engine.tiny_models import VOCAB

FAMILIES = [
    pytest.param(("qwen3_next", "bfloat16")),
    pytest.param(("lfm2", "bfloat16")),
    pytest.param(("lfm3", "bfloat16"), marks=pytest.mark.nightly),
    pytest.param(("nemotron_h", "bfloat16"), marks=pytest.mark.nightly),
    pytest.param(("lfm2_moe", "float32"), marks=pytest.mark.nightly),
    pytest.param(("falcon_h1", "bfloat16"), marks=pytest.mark.nightly),
    pytest.param(("kimi_linear", "float32"), marks=pytest.mark.nightly),
    pytest.param(("granitemoehybrid", "bfloat16"), marks=pytest.mark.nightly),
]
NUM_REQUESTS = 7


@pytest.fixture(scope="module", params=FAMILIES)
def instance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Instance:
    family, dtype = request.param
    torch.set_num_threads(1)
    directory = make_state_model(tmp_path_factory.mktemp(family), family, getattr(torch, dtype))
    return load(directory, dtype=dtype, batch_invariant=True)


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    """Requests of all kinds; every third begins as the first does, over two boundaries."""
    drawn = requests(5, vocab_size=VOCAB, greedy=False, count=NUM_REQUESTS, longest=150, most=10)
    shared = [4 + number % 97 for number in range(2 * GRID + 11)]
    drawn = [
        msgspec.structs.replace(each, params=msgspec.structs.replace(each.params, grammar=None))
        for each in drawn
    ]
    return [
        msgspec.structs.replace(each, prompt_ids=shared + each.prompt_ids[:30]) if index % 3 == 0 else each
        for index, each in enumerate(drawn)
    ]


@pytest.fixture(scope="module")
def alone(instance: Instance, submits: list[Submit]) -> Answers:
    return instance.answers(submits, ALONE)[0]


def test_answers_in_company_are_those_alone(
    instance: Instance, submits: Sequence[Submit], alone: Answers
) -> None:
    instance.check_in_company(submits, alone)


def test_prefixes_go_on_from_states_and_give_the_same_bits(
    instance: Instance, submits: Sequence[Submit], alone: Answers
) -> None:
    found, counters = instance.answers(submits, How(together=False))
    assert found == alone
    later = [each for each in submits[1:] if each.prompt_ids[: 2 * GRID] == submits[0].prompt_ids[: 2 * GRID]]
    finds = [each for each in later if each.params.prompt_logprobs is None]
    assert counters.prefix_cache_hits >= len(finds) * 2 * GRID > 0


@pytest.mark.parametrize("budget", [pytest.param(1, marks=pytest.mark.nightly), 7, 50])
def test_chunks_of_any_size_give_the_same_bits(
    instance: Instance, submits: Sequence[Submit], alone: Answers, budget: int
) -> None:
    some = submits[:4]
    found, _ = instance.answers(some, How(budget=budget, caching=False))
    assert found == {each.request: alone[each.request] for each in some}


def test_few_slots_of_states_give_the_same_bits(
    instance: Instance, submits: Sequence[Submit], alone: Answers
) -> None:
    found, _ = instance.answers(submits, How(states=3))
    assert found == alone
