"""Prefix hits of models with recurrent states, in number and in bits.

Several are failures that users of other engines reported: checkpoints that no later prompt reaches, short
prefixes that are never cached, states spoiled by drafts, hits that give NaN.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.core import EngineCore
from engine.messages import Submit
from engine.pieces.kinds import kept_positions
from engine.sampling import SamplingParams
from tests.engine.invariance.answers import Answer, Answers, How, Instance, load, run
from tests.engine.states.agent import (
    ATTENTION,
    HISTORY,
    LENGTHS,
    Turn,
    agent_turns,
    grid_of,
    held_states,
    load_served,
)
from tests.engine.states.models import make_servable_model
from tests.nightly import NIGHTLY

FAMILIES = [
    "qwen3_next",
    *(pytest.param(each, marks=pytest.mark.nightly) for each in ("nemotron_h", "lfm2_moe")),
]
BLOCK = 16
VOCAB = 4096


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def attention_turns(tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """An agent's turns with attention alone."""
    return agent_turns(load_served(tmp_path_factory.mktemp(ATTENTION), ATTENTION))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_agents_turns_compute_as_much_as_with_attention_alone_but_for_the_grid(
    family: str, attention_turns: list[Turn], tmp_path: Path
) -> None:
    """A turn begins at most a grid less a block before its new text."""
    instance = load_served(tmp_path, family)
    turns = agent_turns(instance)
    assert turns[0] == attention_turns[0]
    more = [one.computed - other.computed for one, other in zip(turns, attention_turns, strict=True)]
    assert max(more) <= grid_of(instance) - BLOCK
    held = {held_states(instance, length) for length in LENGTHS}
    assert len(held) == 1, "memory is flat in context"
    assert held <= {1, 2}
    assert all(each.computed < HISTORY // 10 for each in turns[1:]), "each turn is a hit"


class Bits:
    """A model, and answers that requests have alone."""

    def __init__(self, directory: Path) -> None:
        self.instance: Instance = load(directory, batch_invariant=True)
        self.grid = grid_of(self.instance)
        alone = load(directory, batch_invariant=True).core(How(caching=False))
        self.alone = cache(lambda prompt, count: run(alone, [ask(prompt, count)])[0])

    def core(self, **how: Any) -> EngineCore:
        return self.instance.core(How(**{"states": 64} | how))

    def check(self, core: EngineCore, prompt: Sequence[int], count: int = 4) -> tuple[Answer, int]:
        """A request's answer, equal to that of it alone, and its cached tokens."""
        before = core.scheduler.counters().prefix_cache_hits
        found = run(core, [ask(prompt, count)])[0]
        assert found == self.alone(tuple(prompt), count)
        assert all(math.isfinite(float.fromhex(each[1])) for each in found.logprobs)
        return found, core.scheduler.counters().prefix_cache_hits - before


def ask(prompt: Sequence[int], count: int, number: int = 0) -> Submit:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2)
    return Submit(number, str(number), list(prompt), params, 0)


def text(seed: object, count: int) -> list[int]:
    chance = random.Random(str(seed))
    return [chance.randrange(4, VOCAB) for _ in range(count)]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bits:
    return Bits(make_servable_model(tmp_path_factory.mktemp(request.param), request.param))


@pytest.mark.parametrize("own", [30, 200])
def test_a_beginning_is_found_at_second_sight_and_whole_at_third(own: int, model: Bits) -> None:
    """Though no prompt ends there; own: tokens behind it that each prompt has for itself."""
    core, shared = model.core(), text("shared", 600)
    _, first = model.check(core, shared + text(1, own))
    _, second = model.check(core, shared + text(2, own))
    _, third = model.check(core, shared + text(3, own))
    assert first == 0
    assert second >= len(shared) - own - 2 * model.grid
    assert third == len(shared) // model.grid * model.grid


def test_a_beginning_of_one_grid_is_found(model: Bits) -> None:
    core, shared = model.core(), text("shared", model.grid)
    model.check(core, shared + text(1, 5))
    assert model.check(core, shared + text(2, 30))[1] == model.grid


def test_hits_behind_ends_of_all_kinds_change_no_bit(model: Bits) -> None:
    """Prompts end anywhere in a block and in a cell of the grid."""
    grid, core = model.grid, model.core()
    for over in range(grid) if NIGHTLY else {0, 1, 4, 7, 10, grid - 1}:
        prompt = text(over, 2 * grid + over)
        answer, _ = model.check(core, prompt)
        _, hits = model.check(core, [*prompt, *answer.token_ids, *text("next", 5)])
        assert hits == (len(prompt) + 3) // grid * grid


@pytest.mark.parametrize("budget", [1024, 100])
def test_states_kept_within_a_chunk_are_those_at_its_end(budget: int, model: Bits) -> None:
    """Prompts part from one at each of its kept positions."""
    core, prompt = model.core(budget=budget), text("whole", 9 * model.grid + 3)
    kept = kept_positions(len(prompt), model.grid)
    assert len(kept) > 3
    model.check(core, prompt)
    for position in kept:
        assert model.check(core, prompt[:position] + text(position, 7))[1] == position


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_chunks_shorter_than_a_convolution_go_on_behind_a_hit(budget: int, model: Bits) -> None:
    core, shared = model.core(budget=budget), text("shared", model.grid)
    model.check(core, shared + text(1, 1))
    assert model.check(core, shared + text(2, 11))[1] == model.grid


def test_states_of_drafted_requests_are_as_good_as_others(model: Bits) -> None:
    """A turn goes on behind an answer of which drafts were accepted and refused."""
    first = text("loop", 9) * 6
    length = model.grid
    answer = model.alone(tuple(first), length).token_ids
    turns = [[*first, *answer, *text(name, 9)] for name in ("turn", "other")]
    known: Answers = {
        number: model.alone(tuple(prompt), count)
        for number, (prompt, count) in enumerate([(first, length), *((turn, 4) for turn in turns)])
    }
    submits = [ask(first, length), *(ask(turn, 4, number) for number, turn in enumerate(turns, 1))]
    core = model.instance.core(How(states=64, drafts=known), submits)
    model.check(core, first, length)
    counters = core.scheduler.counters()
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 0
    for turn in turns:
        _, hits = model.check(core, turn)
        assert hits == (len(first) + length - 1) // model.grid * model.grid > len(first)


@pytest.mark.parametrize("caching", [True, False])
def test_freed_slots_are_written_before_they_are_read(caching: bool, model: Bits) -> None:
    """Few slots, of which those that nobody holds or finds have NaN after each step."""
    core = model.core(states=4, seqs=3, caching=caching)
    pool, tensors = core.scheduler._pool, model.instance.executor._tensors[1]
    once, spoiled = core.step, set()

    def spoil() -> None:
        named = {pool.slot_of(name) for name in pool.known}
        for number, slot in enumerate(pool.kinds.slots_of(1)):
            if not pool.num_holders(slot) and slot not in named:
                spoiled.add(slot)
                for each in tensors:
                    each[number].fill_(math.nan)

    def step() -> Any:
        found = once()
        spoil()
        return found

    spoil()
    spoiled.clear()
    core.step = step  # type: ignore[method-assign]
    shared = text("shared", 2 * model.grid)
    prompts = [shared[: model.grid * (number % 3)] + text(number, model.grid - number) for number in range(6)]
    found = run(core, [ask(prompt, 9, number) for number, prompt in enumerate(prompts)])
    assert len(spoiled) >= (1 if caching else 4)
    for number, prompt in enumerate(prompts):
        assert found[number] == model.alone(tuple(prompt), 9)
