"""What does not change a bit of an answer in bfloat16: docs/design/invariance.md has the table.

Each request has the answer that it has alone: token ids, why it ended, and log-probabilities to the last bit.
Requests are of all kinds at once (``mixed.py``). Columns of the table are greedy requests and seeded samples, in
each of some families. For each push every line runs in some columns, at night in all.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coordinator.numerics import Numerics
from engine.config import SHIPPED_MODEL, EngineConfig
from engine.kernels.core import library
from engine.kernels.products.compression import OFF
from engine.messages import Counters, Submit
from engine.model.checkpoint import read_model_info
from engine.model.finding import MODELS_DIRECTORY
from engine.numerics import numerics_of
from engine.sampling import SamplingParams
from engine.scheduling.request import stream_seed
from engine.settings import resolve
from parallel.communicators.base import CollectiveError
from tests.engine.invariance.answers import ALONE, Answers, How, Instance, load, run, settings
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.invariance.spread import Group, Members, in_shared_memory
from tests.engine.scheduling.test_grammar import Troubled
from tests.engine.shard_threads import ThreadedShards
from tests.engine.states.models import at_night, make_servable_model
from tests.engine.tiny_models import make_tiny_model
from tests.parallel.thread_group import thread_group
from tests.router.tiny_tokenizer import byte_level

KERNELS = library.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no AVX2, or no C++ compiler, here")

VOCAB = 403
"""Tokens of the tiny models: more than their tokenizer has, no multiple of 8."""
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 40},
    "mixtral": {"intermediate_size": 128},  # two ranks have whole parts of it
}
"""Families beside the shipped one: dense, norms of heads, a sliding window, experts."""
HYBRIDS = ["qwen3_next", "lfm2_moe", "nemotron_h"]
"""Families with states, and experts: gated delta rules, short convolutions, Mamba 2."""
FAMILIES = [SHIPPED_MODEL, *TINY, *HYBRIDS]
MIXTURES = [SHIPPED_MODEL, "mixtral", *HYBRIDS]
"""Families with experts."""
COLUMNS = ["greedy", "sampled"]
COUNT = 24
"""Requests of a column."""
MIXED = {"count": COUNT, "longest": 150, "most": 10}
LASTING = {"count": 10, "longest": 30, "most": 40}
"""Short prompts and long answers, which preempt each other where room is scarce."""


class Model:
    """A model, and its answers to requests that are alone."""

    def __init__(self, directory: Path, *, has_states: bool = False) -> None:
        self.directory = directory
        self.device: dict[str, Any] = {"batch_invariant": True} if has_states else {}
        """Settings that each of its instances needs."""
        self.instance = load(directory, **self.device)
        self.alone = cache(self._alone)

    def settings(self, **device: Any) -> EngineConfig:
        """Settings of an instance."""
        return settings(self.directory, **self.device, **device)

    def submits(self, column: str, *, lasting: bool = False) -> list[Submit]:
        """Mixed requests of one column of the table."""
        size, vocab_size = LASTING if lasting else MIXED, self.instance.info.vocab_size
        return requests(len(column), vocab_size=vocab_size, greedy=column == "greedy", **size)

    def _alone(self, column: str, *, lasting: bool = False) -> Answers:
        return self.instance.answers(self.submits(column, lasting=lasting), ALONE)[0]

    def check(
        self, column: str, how: How, instance: Instance | None = None, *, lasting: bool = False
    ) -> Counters:
        """Answers under these settings are those of each request alone."""
        submits = self.submits(column, lasting=lasting)
        found, counters = (instance or self.instance).answers(submits, how)
        assert found == self.alone(column, lasting=lasting)
        return counters

    def scarce(self, column: str, **settings: Any) -> How:
        """Settings with room for little more than the longest of the lasting requests."""
        longest = longest_of(self.submits(column, lasting=True))
        return How(cache=longest // 16 * 16 + 48, budget=64, **settings)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    """A family's model, loaded once."""
    return cache(lambda family: Model(directory_of(family, tmp_path_factory), has_states=family in HYBRIDS))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    return models(request.param)


def directory_of(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, or a tiny one with a tokenizer that grammars can use."""
    if family == SHIPPED_MODEL:
        return MODELS_DIRECTORY / SHIPPED_MODEL
    if family in HYBRIDS:
        return make_servable_model(tmp_path_factory.mktemp(family), family)
    directory = make_tiny_model(
        tmp_path_factory.mktemp(family),
        family,
        dtype=torch.bfloat16,
        vocab_size=VOCAB,
        max_position_embeddings=2048,
        **TINY[family],
    )
    byte_level().save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(autouse=True, scope="module")
def quick_turns() -> Iterator[None]:
    """Make threads switch often: stages and members compute in turns."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture(scope="module", params=[SHIPPED_MODEL, "mixtral", *at_night(HYBRIDS)])
def mixture(request: pytest.FixtureRequest, models: Callable[[str], Model]) -> Model:
    """A model with experts."""
    return models(request.param)


columns = pytest.mark.parametrize("column", COLUMNS)
some_families = pytest.mark.diagonal("column", "model", columns=len(FAMILIES), each=1)


# ---- steps


@columns
@pytest.mark.parametrize("seqs", [16, 64])
@pytest.mark.diagonal("seqs", "model", columns=len(FAMILIES), each=1)
def test_a_request_in_a_batch_has_the_answer_that_it_has_alone(seqs: int, column: str, model: Model) -> None:
    """All requests three times, as many in a batch as may be."""
    submits, alone = model.submits(column), model.alone(column)
    second = again(submits)
    found, _ = model.instance.answers([*submits, *second, *again(second)], How(seqs=seqs, budget=8192))
    assert found == {key + COUNT * time: answer for key, answer in alone.items() for time in range(3)}


def again(submits: Sequence[Submit]) -> list[Submit]:
    """The same requests under other numbers."""
    return [msgspec.structs.replace(each, request=each.request + COUNT) for each in submits]


@columns
@some_families
def test_the_place_in_the_batch_changes_nothing(column: str, model: Model) -> None:
    """Other orders of arrival, and an order by priority."""
    submits = model.submits(column)
    random.Random(1).shuffle(submits)
    for policy in ("fcfs", "priority"):
        assert model.instance.answers(submits, How(seqs=12, policy=policy))[0] == model.alone(column)


@columns
@pytest.mark.parametrize("budget", [64, 512, 4096])
@pytest.mark.diagonal("budget", "model", columns=len(FAMILIES), each=1)
def test_the_size_of_prefill_chunks_changes_nothing(budget: int, column: str, model: Model) -> None:
    """The last one takes all prompts whole."""
    model.check(column, How(budget=budget, long_prefill=33 if budget == 64 else 0))


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_size_of_chunks_of_a_long_prompt_changes_nothing(
    family: str, models: Callable[[str], Model]
) -> None:
    """Also those behind a part of it that is cached."""
    chance, instance = random.Random(family), models(family).instance
    ids = [chance.randrange(VOCAB) for _ in range(1900)]
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=3)
    whole, part = (Submit(0, "long", ids[:count], params, 0) for count in (1900, 700))
    expected = instance.answers([whole], How(budget=2048, caching=False))[0]
    for budget in (64, 512):
        assert instance.answers([whole], How(budget=budget))[0] == expected
    for budget in (512, 2048):
        core = instance.core(How(budget=budget))
        run(core, [part])
        assert run(core, [whole]) == expected
        assert core.scheduler.counters().prefix_cache_hits


@columns
@some_families
def test_the_number_of_threads_changes_nothing(column: str, model: Model) -> None:
    model.check(column, How(threads=2))


@columns
@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.diagonal("block_size", "model", columns=len(FAMILIES), each=1)
def test_the_size_of_kv_blocks_changes_nothing(block_size: int, column: str, model: Model) -> None:
    """Models whose states are kept more often than blocks end are of another class."""
    other = load(model.directory, block_size, **model.device)
    assert model.instance.facts is not None
    if all(kind.grid % block_size == 0 for kind in model.instance.facts.boundaries):
        model.check(column, How(), other)
    else:
        assert class_of(other, model.settings()) != class_of(model.instance, model.settings())


# ---- the KV cache


@columns
@some_families
def test_prefix_cache_hits_change_nothing(column: str, model: Model) -> None:
    """Common beginnings, then all prompts again: as much of each as a hit may be."""
    submits, alone = model.submits(column), model.alone(column)
    core = model.instance.core(How(seqs=4))  # from here on its KV cache is this one's
    assert run(core, submits) == alone
    partial = core.scheduler.counters().prefix_cache_hits
    found = run(core, again(submits))
    assert {key - COUNT: answer for key, answer in found.items()} == alone
    assert core.scheduler.counters().prefix_cache_hits >= 2 * partial > 0


@columns
@some_families
def test_preemption_changes_nothing(column: str, model: Model) -> None:
    """With and without what the prefix cache keeps of a preempted request."""
    for caching in (True, False):
        counters = model.check(column, model.scarce(column, caching=caching), lasting=True)
        assert counters.preemptions > 2


@columns
@some_families
def test_giving_way_changes_nothing(column: str, model: Model) -> None:
    """Each request takes the slot of an earlier one by its priority; with drafts, too."""
    submits = [
        msgspec.structs.replace(each, priority=-number)
        for number, each in enumerate(model.submits(column, lasting=True))
    ]
    for ngrams in (False, True):
        core = model.instance.core(How(seqs=2, policy="priority", ngrams=ngrams), submits)
        assert run(core, submits, steps_between=3) == model.alone(column, lasting=True)
        assert core.scheduler.counters().preemptions > 3


# ---- how tokens are found


@columns
@some_families
def test_drafts_change_nothing(column: str, model: Model) -> None:
    """Drafts of n-grams, then of answers with mistakes: some are accepted and some rejected."""
    model.check(column, How(ngrams=True))
    counters = model.check(column, How(drafts=model.alone(column)))
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 0


@columns
@some_families
def test_grammars_change_nothing_beside_them(column: str, model: Model) -> None:
    """The others alone, then beside requests with grammars, with drafts and without."""
    submits = model.submits(column)
    plain = [each for each in submits if each.params.grammar is None]
    assert 0 < len(plain) < COUNT
    expected = {each.request: model.alone(column)[each.request] for each in plain}
    for drafts in (None, model.alone(column)):
        assert model.instance.answers(plain, How(drafts=drafts))[0] == expected
        assert model.instance.answers(submits, How(drafts=drafts))[0] == model.alone(column)


@some_families
@pytest.mark.parametrize("column", ["sampled"])
def test_sample_i_of_n_is_a_request_with_a_seed_of_its_own(column: str, model: Model) -> None:
    """The seed of sample i is seed + i * 0x9E3779B97F4A7C15."""
    samples = [each for each in model.submits(column) if each.sample_index]
    assert samples
    ones = []
    for each in samples:
        seed = stream_seed(each.seed, each.sample_index)
        assert seed == (each.seed + each.sample_index * 0x9E3779B97F4A7C15) % 2**64
        signed = seed - 2**64 if seed >= 2**63 else seed
        ones.append(msgspec.structs.replace(each, seed=signed, sample_index=0))
    expected = {each.request: model.alone(column)[each.request] for each in samples}
    assert model.instance.answers(ones, How())[0] == expected


@columns
@some_families
def test_log_probabilities_that_are_asked_for_change_no_token(column: str, model: Model) -> None:
    """None, few and many of them; those that two requests ask for are equal."""
    submits = model.submits(column)
    found = []
    for logprobs, prompt_logprobs in ((None, None), (0, None), (20, 5)):
        asked = [changed(each, logprobs=logprobs, prompt_logprobs=prompt_logprobs) for each in submits]
        found.append(model.instance.answers(asked, How())[0])
        assert {key: each.text for key, each in found[-1].items()} == {
            key: each.text for key, each in model.alone(column).items()
        }
    for key, alone in model.alone(column).items():
        few, many = found[1][key].logprobs, found[2][key].logprobs
        assert [each[:3] for each in few] == [each[:3] for each in many]
        for some, all_of_them in zip(alone.logprobs, many, strict=False):
            assert some[3] == all_of_them[3][: len(some[3])]
            assert some[4] == all_of_them[4][: len(some[4])]


@columns
@some_families
def test_an_answer_that_is_scored_as_a_prompt_has_the_numbers_of_its_tokens(
    column: str, model: Model
) -> None:
    submits = [changed(each, logprobs=3) for each in model.submits(column)]
    answers = model.instance.answers(submits, How(drafts=model.alone(column)))[0]
    scoring = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=3)
    texts = {each.request: each.prompt_ids + answers[each.request].token_ids for each in submits}
    scores = model.instance.answers(
        [
            Submit(request=key, request_id=str(key), prompt_ids=ids, params=scoring, seed=0)
            for key, ids in texts.items()
        ],
        How(budget=64),
    )[0]
    for each in submits:
        scored = scores[each.request].prompt_logprobs
        assert scored is not None
        assert scored[len(each.prompt_ids) :] == answers[each.request].logprobs


def changed(submit: Submit, **params: Any) -> Submit:
    return msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, **params))


# ---- another instance goes on


@columns
@pytest.mark.parametrize("kind", ["none cached", "prefix cached", "drafts", "preempted"])
@pytest.mark.diagonal("kind", "model", columns=len(FAMILIES), each=1)
def test_a_resumed_request_goes_on_as_it_would_have(kind: str, column: str, model: Model) -> None:
    """On an instance that gets the prompt, and the tokens that the client has."""
    alone, chance = model.alone(column, lasting=True), random.Random(kind)
    submits = model.submits(column, lasting=True)
    resumed, expected = [], {}
    for each in submits:
        ids = alone[each.request].token_ids
        cut = chance.randrange((len(ids) + 1) // 2)
        resumed.append(msgspec.structs.replace(each, output_ids=ids[:cut]))
        expected[each.request] = alone[each.request].behind(cut) if cut else alone[each.request]
    how = {
        "none cached": How(caching=False),
        "prefix cached": How(),
        "drafts": How(drafts=alone),
        "preempted": model.scarce(column, caching=False),
    }[kind]
    core = model.instance.core(how, resumed)
    if kind == "prefix cached":
        run(core, again(submits))
    assert run(core, resumed) == expected
    counters = core.scheduler.counters()
    assert (counters.drafted_tokens > 0) == (kind == "drafts")
    assert (counters.preemptions > 0) == (kind == "preempted")


@columns
@some_families
def test_a_step_that_runs_again_gives_the_same(
    column: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the loss of a peer, when a step was all but done."""
    alone, submits = model.alone(column, lasting=True), model.submits(column, lasting=True)
    troubled = Troubled(model.instance.executor)
    core = Instance(model.directory, troubled, facts=model.instance.facts).core(How(drafts=alone), submits)
    once = core.step

    def step() -> Any:
        while True:
            with contextlib.suppress(CollectiveError):
                return once()

    monkeypatch.setattr(core, "step", step)
    assert run(core, submits) == alone
    assert troubled.failures > 3


# ---- layouts


@columns
@pytest.mark.diagonal("column", "model", columns=len(FAMILIES), each=1)
def test_pipeline_stages_change_nothing(column: str, model: Model) -> None:
    executor = ThreadedShards(model.settings(), read_model_info(model.directory), pp=2)
    try:
        facts = executor.load(lambda _phase: None)
        model.check(column, How(), Instance(model.directory, executor, facts=facts))
    finally:
        executor.close()


LAYOUTS: dict[str, tuple[int, Group, str]] = {
    "2 on one host": (2, in_shared_memory, "auto"),
    "3 on one host": (3, in_shared_memory, "auto"),
    "2 hosts": (2, thread_group, "allgather_reducescatter"),
    "3 hosts": (3, thread_group, "all_to_all"),
}


@pytest.mark.each_push
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.diagonal("layout", "family", columns=len(MIXTURES), each=1)
def test_spread_experts_change_nothing(layout: str, family: str, models: Callable[[str], Model]) -> None:
    """Over any number of instances, in shared memory or from host to host."""
    size, group, backend = LAYOUTS[layout]
    model = models(family)
    members = Members(model.directory, size, group, all2all_backend=backend, **model.device)
    try:
        for column in COLUMNS:
            assert members.answers(model.submits(column)) == model.alone(column)
    finally:
        members.close()


@pytest.mark.skipif(KERNELS is None or not KERNELS.has_tiles, reason="weights are compressed for AMX alone")
@columns
@pytest.mark.parametrize("family", [SHIPPED_MODEL, *TINY])
@pytest.mark.diagonal("column", "family", columns=1 + len(TINY), each=1)
def test_compressed_weights_change_nothing(
    column: str, family: str, models: Callable[[str], Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models(family)
    assert model.instance.executor._program.saved_bytes > 0
    monkeypatch.setenv(OFF, "0")
    plain = load(model.directory)
    assert plain.executor._program.saved_bytes == 0
    model.check(column, How(), plain)


# ---- what does change them


def class_of(instance: Instance, config: EngineConfig) -> Numerics:
    """The numerics class that an instance with these settings names."""
    info, found = resolve(config)
    workers = getattr(instance.executor, "workers", None)
    executors = [instance.executor] if workers is None else [each.executor for each in workers]
    arithmetic = [each for executor in executors for each in executor.arithmetic()]
    return numerics_of(found, config.model, info.directory, arithmetic)


@pytest.mark.parametrize(
    "what",
    [{"numerics": "avx2"}, {"numerics": "torch"}, {"dtype": "float32"}],
    ids=["kernels", "torch", "dtype"],
)
def test_what_changes_bits_names_another_class(what: dict[str, Any], models: Callable[[str], Model]) -> None:
    assert KERNELS is not None
    if what == {"numerics": "avx2"} and not KERNELS.has_avx512:
        pytest.skip("this CPU has one kind of kernels")
    model = models("mixtral")
    alone, ours = model.alone("greedy"), class_of(model.instance, settings(model.directory))
    library._load.cache_clear()  # kernels are chosen for a whole process
    try:
        other = load(model.directory, **what)
        assert class_of(other, settings(model.directory, **what)) != ours
        assert other.answers(model.submits("greedy"), How())[0] != alone
        other.executor.close()
    finally:
        library.choose(None)
        library._load.cache_clear()
        library.load()


@columns
@pytest.mark.diagonal("column", "mixture", columns=2, each=1)
def test_tensor_parallel_ranks_change_nothing(column: str, mixture: Model) -> None:
    """Ranks that add up in shared memory, or through their communicator."""
    submits, config = mixture.submits(column), mixture.settings(tensor_parallel_size=2)
    for group in (in_shared_memory, thread_group):
        executor = ThreadedShards(mixture.settings(), mixture.instance.info, tp=2, group=group)
        instance = Instance(mixture.directory, executor, facts=executor.load(lambda _phase: None))
        for how in (ALONE, How(), How(budget=64, ngrams=True)):
            assert instance.answers(submits, how)[0] == mixture.alone(column)
        assert class_of(instance, config) == class_of(mixture.instance, mixture.settings())
        executor.close()


def test_whole_experts_on_ranks_change_nothing(mixture: Model) -> None:
    """``-tp 2`` cuts experts, unless ``-ep`` spreads whole ones over the ranks of all instances."""
    for size in (1, 2):
        members = Members(mixture.directory, size, ranks=2, **mixture.device)
        assert members.answers(mixture.submits("greedy")) == mixture.alone("greedy")
        members.close()
