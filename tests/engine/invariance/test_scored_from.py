"""Log-probabilities of the end of a prompt have the bits of all of it."""

from __future__ import annotations

import random

import msgspec
import pytest

from engine.messages import Submit
from engine.sampling import SamplingParams
from tests.engine.invariance.answers import ALONE, How, Instance, load
from tests.engine.tiny_models import VOCAB
from tests.engine.weight_versions.test_shard_weights import make

PREFIX, LENGTH, NUM_REQUESTS = 100, 140, 5


@pytest.fixture(scope="module", params=["llama", "qwen3_next"])
def instance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Instance:
    directory = make(request.param, tmp_path_factory.mktemp("s") / request.param)
    return load(directory, batch_invariant=request.param != "llama")


def submits(first: int) -> list[Submit]:
    """Prompts that begin alike, scored from a token on."""
    chance = random.Random(1)
    prefix = chance.choices(range(VOCAB), k=PREFIX)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=1, prompt_logprobs=2)
    ends = [chance.choices(range(VOCAB), k=LENGTH - PREFIX) for _ in range(NUM_REQUESTS)]
    return [
        Submit(number, str(number), [*prefix, *end], params, seed=1, scored_from=first)
        for number, end in enumerate(ends)
    ]


@pytest.mark.parametrize("first", [1, 37, PREFIX, LENGTH])
@pytest.mark.parametrize("budget", [512, 24])
def test_the_end_has_the_bits_of_the_whole(instance: Instance, first: int, budget: int) -> None:
    whole, _ = instance.answers(submits(0), ALONE)
    found, counters = instance.answers(submits(first), How(budget=budget, seqs=2))
    for number, answer in found.items():
        expected = whole[number].prompt_logprobs
        assert expected is not None
        assert answer.prompt_logprobs == [*[None] * first, *expected[first:]]
        assert answer.text == whole[number].text
        assert answer.logprobs == whole[number].logprobs
    if first <= 16:
        assert not counters.prefix_cache_hits
    elif instance.info.architecture.startswith("Llama"):
        assert counters.prefix_cache_hits, "what is before may come from the cache"


def test_a_place_outside_the_prompt_is_refused(instance: Instance) -> None:
    core = instance.core(How())
    (submit, *_) = submits(0)
    refused = core.submit(b"router", msgspec.structs.replace(submit, scored_from=LENGTH + 1))
    assert refused is not None
    assert not refused.retry
