"""Drafts by a model: equal bits, and a cache that follows the blocks."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from engine.config import EngineConfig, ModelConfig
from engine.config.speculation import SpeculativeConfig
from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.messages import Counters, Submit
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.model.finding import find_model
from engine.sampling import SamplingParams
from engine.settings import resolve
from engine.speculation.speculation import Drafter, Speculation
from tests.engine.invariance.answers import PEER, Answers, How, Instance, settings, step
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.tiny_models import make_tiny_model

MOST = 5


class Asking(Speculation):
    """Speculation that asks a model by chance; ``always``: for all that it may."""

    def __init__(self, *, always: bool = False, combines: bool = False) -> None:
        super().__init__(
            SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=MOST, combines=combines)
        )
        self._always = always
        self._random = random.Random(0)

    def ask(self, wanting: Sequence[tuple[Drafter, int]], rows: int) -> list[int]:
        most = [max(0, min(MOST, longest)) for _, longest in wanting]
        return most if self._always else [self._random.randrange(each + 1) for each in most]

    def is_off(self, running: int) -> bool:
        return False

    @property
    def rests(self) -> bool:
        return not self._always and self._random.random() < 0.2


class Drafting(Instance):
    """An instance with a draft model, which is asked as a test wants it."""

    always = False
    combines = False
    """Whether texts are looked up, too."""

    def core(self, how: How, submits: Sequence[Submit] = ()) -> Any:
        core = super().core(how, submits)
        if how.ngrams:
            speculation = Asking(always=self.always, combines=self.combines)
            core.scheduler._speculation = core.scheduler._drafting._speculation = speculation
        return core


def loaded(directory: Path, draft: Path, **device: Any) -> Drafting:
    executor = UniExecutor(with_draft(settings(directory, **device), draft), read_model_info(directory), 1)
    facts = executor.load(lambda _phase: None)
    executor.allocate(8, 2)
    return Drafting(directory, executor, 16, facts)


def with_draft(config: EngineConfig, draft: Path) -> EngineConfig:
    text = json.dumps({"method": "draft_model", "model": str(draft), "num_speculative_tokens": MOST})
    return msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, speculative_config=text)
    )


@pytest.fixture(scope="module")
def shipped() -> Path:
    if library.load() is None:
        pytest.skip("no native kernels here")
    return find_model(None, None, weights=True)


@pytest.fixture(scope="module")
def own(shipped: Path) -> Drafting:
    """The shipped model, which is its own draft: all greedy proposals are right."""
    return loaded(shipped, shipped)


@pytest.fixture(scope="module")
def alone(own: Drafting) -> tuple[list[Submit], Answers]:
    submits = requests(3, count=48, vocab_size=own.info.vocab_size, longest=100, most=40)
    return submits, own.answers(submits, How())[0]


@pytest.mark.parametrize(
    ("how", "always"),
    [
        (How(), True),
        (How(together=False), False),
        (How(caching=False), False),
        (How(budget=64, long_prefill=7), True),
        (How(budget=24, policy="priority"), False),
    ],
    ids=["together", "alone", "no prefix cache", "chunks", "small steps"],
)
def test_mixed_requests_have_the_bits_that_they_have_without_drafts(
    own: Drafting, alone: tuple[list[Submit], Answers], how: How, always: bool
) -> None:
    submits, expected = alone
    own.always = always
    found, counters = own.answers(submits, replace(how, ngrams=True))
    assert found == expected
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 0


def test_drafts_follow_grammars_and_are_accepted(own: Drafting, alone: tuple[list[Submit], Answers]) -> None:
    """Right and wrong drafts of structured answers, by a model and by an oracle."""
    submits = [each for each in alone[0] if each.params.grammar is not None]
    expected = {each.request: alone[1][each.request] for each in submits}
    own.always = True
    for how in (How(ngrams=True), How(drafts=expected, budget=64)):
        found, counters = own.answers(submits, how)
        assert found == expected
        assert counters.drafted_tokens > 20
        assert sum(counters.taken_by_place) > 10


def test_preemption_changes_nothing(own: Drafting, alone: tuple[list[Submit], Answers]) -> None:
    submits, expected = alone
    own.always = False
    found, counters = own.answers(submits, How(cache=longest_of(submits) // 16 * 16 + 64, ngrams=True))
    assert found == expected
    assert counters.preemptions > 0
    assert sum(counters.taken_by_place) > 0


def greedy(count: int, most: int = 40) -> list[Submit]:
    """Greedy requests that begin alike, without anything that shapes the logits."""
    chance = random.Random(1)
    shared = [chance.randrange(4, 500) for _ in range(37)]
    params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
    texts = [shared + [chance.randrange(4, 500) for _ in range(chance.randrange(30))] for _ in range(count)]
    return [
        Submit(request=i, request_id=f"g{i}", prompt_ids=each, params=params, seed=i)
        for i, each in enumerate(texts)
    ]


@pytest.mark.parametrize(
    "how",
    [How(), How(together=False), How(budget=20), How(seqs=2), How(cache=16 * 12, seqs=8), How(caching=False)],
    ids=["together", "alone", "small steps", "two at once", "preemption", "no prefix cache"],
)
def test_a_model_that_drafts_for_itself_is_always_right(own: Drafting, how: How) -> None:
    """Its cache follows prefix hits, chunks, preemption, refused tokens and reused blocks."""
    submits = greedy(12)
    own.always = True
    expected, _ = own.answers(submits, replace(how, ngrams=False))
    found, counters = own.answers(submits, replace(how, ngrams=True))
    assert found == expected
    assert sum(counters.taken_by_place) == counters.drafted_tokens > 100


def test_it_catches_up_after_a_rest_in_parts(own: Drafting) -> None:
    """The model was asked for nothing while the first tokens were computed."""
    chance = random.Random(2)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompt = [chance.randrange(4, 500) for _ in range(900)]
    submit = Submit(request=0, request_id="long", prompt_ids=prompt, params=params, seed=0)
    expected, _ = own.answers([submit], How())
    own.always = True
    core = own.core(How(ngrams=True))
    resting = core.scheduler._drafting
    asking, resting._speculation = resting._speculation, None
    found = {0: type(expected[0])()}
    assert core.submit(PEER, submit) is None
    while len(found[0].token_ids) < 10:
        step(core, found, lambda: None)
    resting._speculation = asking
    drafted = []
    while not core.is_empty:
        step(core, found, lambda: None)
        drafted.append(core.scheduler.counters().drafted_tokens)
    assert found == expected
    counters: Counters = core.scheduler.counters()
    assert drafted[2] == 0, "900 tokens are more than one step takes in"
    assert sum(counters.taken_by_place) == counters.drafted_tokens > 10


def test_texts_that_are_looked_up_beside_a_model_change_nothing(
    own: Drafting, alone: tuple[list[Submit], Answers], monkeypatch: pytest.MonkeyPatch
) -> None:
    submits, expected = alone
    monkeypatch.setattr(own, "combines", True)
    monkeypatch.setattr(own, "always", True)
    found, counters = own.answers(submits, How(ngrams=True, budget=64))
    assert found == expected
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 0


def test_a_draft_that_knows_less_is_refused_in_part(shipped: Path, tmp_path: Path) -> None:
    """Sampled requests with another model as draft have the same bits."""
    info = read_model_info(shipped)
    draft = make_tiny_model(tmp_path / "draft", "llama", dtype=torch.bfloat16, vocab_size=info.vocab_size)
    instance = loaded(shipped, draft)
    submits = requests(5, count=24, vocab_size=info.vocab_size, longest=60, most=24, greedy=False)
    expected, _ = instance.answers(submits, How())
    found, counters = instance.answers(submits, How(ngrams=True, budget=64))
    assert found == expected
    assert counters.drafted_tokens > sum(counters.taken_by_place)


def test_a_draft_of_another_vocabulary_or_tokenizer_is_refused_at_the_start(
    shipped: Path, tmp_path: Path
) -> None:
    other = make_tiny_model(tmp_path / "other", "llama", vocab_size=123)
    config = with_draft(EngineConfig(model=ModelConfig(model=str(shipped))), other)
    with pytest.raises(CheckpointError, match=f"{other} has 123 tokens, and {shipped} has"):
        resolve(config)
    renamed = tmp_path / "renamed"
    shutil.copytree(shipped, renamed)
    tokenizer = json.loads((renamed / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    first, second = sorted(vocab)[40:42]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (renamed / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="has another tokenizer than"):
        resolve(with_draft(config, renamed))
    config = msgspec.structs.replace(config, device=msgspec.structs.replace(config.device, device="cuda"))
    with pytest.raises(CheckpointError, match="native kernels, on a CPU"):
        resolve(with_draft(config, shipped))
