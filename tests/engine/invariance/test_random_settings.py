"""Mixed requests under random settings of an instance have the bits of each request alone."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import pytest

from engine.messages import Submit
from tests.engine.invariance.answers import ALONE, Answers, How, run
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.invariance.test_table import FAMILIES, KERNELS, Model, model, models
from tests.nightly import NIGHTLY

__all__ = ["model", "models"]

pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

SEEDS, COUNT, DRAWS = (range(12), 48, 4) if NIGHTLY else (range(2), 12, 2)
"""Seeds, requests of each, and settings under which the requests of one seed run."""


def drawn(chance: random.Random, submits: Sequence[Submit], alone: Answers) -> How:
    """Settings of an instance, often with little room."""
    room = longest_of(submits) // 16 * 16
    drafts = chance.choice(["none", "ngrams", "known"])
    return How(
        budget=chance.choice([16, 64, 100, 512, 2000]),
        seqs=chance.choice([2, 7, 16, 64]),
        cache=chance.choice([16384, room + chance.choice([32, 160, 480])]),
        caching=chance.random() < 0.7,
        ngrams=drafts == "ngrams",
        drafts=alone if drafts == "known" else None,
        policy=chance.choice(["fcfs", "priority"]),
        long_prefill=chance.choice([0, 0, 33]),
    )


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.diagonal("seed", "model", columns=len(FAMILIES), each=1)
def test_mixed_requests_have_the_bits_that_they_have_alone(seed: int, model: Model) -> None:
    """Some of them resumed, on an instance whose cache has what others left."""
    chance, instance = random.Random(seed), model.instance
    submits = requests(seed, count=COUNT, vocab_size=instance.info.vocab_size, longest=600, most=28)
    alone, _ = instance.answers(submits, ALONE)
    for _ in range(DRAWS):
        how = drawn(chance, submits, alone)
        chance.shuffle(submits)
        core = instance.core(how, submits)
        assert run(core, submits) == alone, how
        resumed, expected = [], {}
        for each in submits[: COUNT // 3]:
            ids = alone[each.request].token_ids
            cut = chance.randrange(len(ids))
            resumed.append(msgspec.structs.replace(each, output_ids=ids[:cut]))
            expected[each.request] = alone[each.request].behind(cut) if cut else alone[each.request]
        assert run(core, resumed) == expected, how
