"""Freed slots of states hold NaN, and no answer changes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import msgspec
import pytest
import torch

from engine.core import EngineCore
from engine.messages import Submit
from engine.sampling import SamplingParams
from engine.transfers.block_memory import CacheMemory
from tests.engine.invariance.answers import ALONE, PATIENCE, PEER, Answer, Answers, How, Instance, load, step
from tests.engine.states.models import make_state_model
from tests.nightly import examples

FAMILIES = [
    pytest.param(("lfm2", "bfloat16")),
    pytest.param(("qwen3_next", "bfloat16")),
    pytest.param(("nemotron_h", "bfloat16"), marks=pytest.mark.nightly),
    pytest.param(("falcon_h1", "float32"), marks=pytest.mark.nightly),
]
COUNT, FEW = 8, 3
SCARCE = 22 * 16
"""Tokens that the cache has room for: two of the longest requests."""


@pytest.fixture(scope="module", params=FAMILIES)
def instance(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Instance:
    family, dtype = request.param
    torch.set_num_threads(1)
    directory = make_state_model(tmp_path_factory.mktemp(family), family, getattr(torch, dtype))
    return load(directory, dtype=dtype, batch_invariant=True)


@pytest.fixture(scope="module")
def submits() -> list[Submit]:
    """Prompts over several boundaries, of which every second one begins alike and repeats itself."""
    numbers, shared = random.Random(2), [5 + number % 23 for number in range(135)]
    return [
        Submit(
            number, f"r{number}",
            shared + [numbers.randrange(4, 90) for _ in range(30)] if number % 2
            else [numbers.randrange(4, 90) for _ in range(numbers.randrange(3, 160))],
            SamplingParams(max_tokens=14, logprobs=2, ignore_eos=True), seed=number,
        )
        for number in range(COUNT)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(instance: Instance, submits: list[Submit]) -> Answers:
    return instance.answers(submits, ALONE)[0]


def spoil_free(core: EngineCore, memory: CacheMemory) -> int:
    """Fill unheld slots without a name with NaN; returns how many."""
    pool = core.pool
    named = {pool.slot_of(name) for name in pool.known}
    free = [slot for slot in pool.kinds.slots_of(1) if not pool.num_holders(slot) and slot not in named]
    for slot in free:
        for part in memory.parts_of(slot):
            part[:] = b"\xff" * part.nbytes
    return len(free)


def answers(
    instance: Instance, submits: Sequence[Submit], how: How, numbers: random.Random
) -> tuple[Answers, EngineCore]:
    """Answers to requests that come some steps apart, some of which are aborted."""
    core, found = instance.core(how, submits), dict[int, Answer]()
    memory = instance.executor.block_memory()
    assert spoil_free(core, memory) == how.states
    waiting, deadline = list(submits), time.monotonic() + PATIENCE
    while waiting or not core.is_empty:
        assert time.monotonic() < deadline
        if waiting and numbers.random() < 0.6:
            submit = waiting.pop(0)
            found[submit.request] = Answer()
            assert core.submit(PEER, submit) is None
        if found and numbers.random() < 0.05:
            number = numbers.choice(sorted(found))
            core.abort(PEER, [number])
            if found[number].ended == (None, None):
                del found[number]
        step(core, found, lambda: None)
        spoil_free(core, memory)
    return found, core


def test_no_freed_slot_is_read_before_it_is_written(
    instance: Instance, submits: list[Submit], alone: Answers
) -> None:
    preemptions = taken = hits = 0
    is_native = instance.executor._program is not None
    for seed in range(examples(100) if is_native else FEW):
        numbers = random.Random(seed)
        order = numbers.sample(submits, len(submits))
        twice = [msgspec.structs.replace(each, request=each.request + COUNT) for each in order[:3]]
        states = numbers.choice([3, 7, 20])
        how = How(
            budget=numbers.choice([24, 64, 150]), cache=SCARCE, states=states, seqs=4,
            drafts={each.request: alone[each.request % COUNT] for each in [*order, *twice]},
        )  # fmt: skip
        found, core = answers(instance, [*order, *twice], how, numbers)
        assert found == {number: alone[number % COUNT] for number in found}
        assert len(found) >= COUNT // 2
        counters = core.scheduler.counters()
        preemptions += counters.preemptions
        taken += sum(counters.taken_by_place)
        hits += counters.prefix_cache_hits
        assert core.pool.num_free_boundaries == states
        assert core.pool.num_used == 0
    assert min(preemptions, taken, hits) > 0


def test_a_slot_that_is_read_too_early_would_show(
    instance: Instance, submits: list[Submit], alone: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with slots that are spoilt while a request goes on from them."""
    monkeypatch.setattr("engine.pieces.pool.PiecePool.num_holders", lambda *_: 0)
    monkeypatch.setattr("engine.pieces.pool.PiecePool.slot_of", lambda *_: None)
    found, _ = answers(instance, submits[1:2], How(budget=64, states=20), random.Random(1))
    assert found != {1: alone[1]}
