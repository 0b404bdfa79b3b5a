"""The EAGLE-3 head that ships: found by name, small, and mostly right."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.config import SHIPPED_HEAD
from engine.config.speculation import read_config
from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from engine.model.finding import find_model
from engine.sampling import SamplingParams
from tests.engine.invariance.answers import How, settings
from tests.engine.speculation.test_draft_model import MOST, Drafting
from tests.engine.speculation.test_eagle_head import with_head

PROMPTS = (
    "It is a truth universally acknowledged, that",
    "The morning was so fine, that",
    "Elizabeth had no sooner left the room, than",
)


def test_it_is_found_by_its_name_alone_and_small() -> None:
    found = read_config(f'{{"model": "{SHIPPED_HEAD}"}}')
    assert (found.method, found.model) == ("eagle3", SHIPPED_HEAD)
    assert read_config('{"model": "other"}').method == "draft_model"
    assert sum(path.stat().st_size for path in find_model(SHIPPED_HEAD).iterdir()) < 1_500_000


@pytest.mark.skipif(library.load() is None, reason="no native kernels here")
def test_most_of_its_first_greedy_proposals_are_right() -> None:
    directory = find_model(None)
    executor = UniExecutor(with_head(settings(directory), Path(SHIPPED_HEAD)), read_model_info(directory), 1)
    facts = executor.load(lambda _phase: None)
    executor.allocate(8, 2)
    instance = Drafting(directory, executor, 16, facts)
    instance.always = True
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
    submits = [
        Submit(request=i, request_id=f"p{i}", prompt_ids=tokenizer.encode(text).ids, params=params, seed=i)
        for i, text in enumerate(PROMPTS)
    ]
    expected, _ = instance.answers(submits, How())
    found, counters = instance.answers(submits, How(ngrams=True))
    assert found == expected
    assert counters.taken_by_place[0] > 0.6 * counters.drafted_tokens / MOST
