"""Models with recurrent states against transformers' generate, in steps of several requests."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch

from engine.kernels.core import library
from engine.messages import Counters, Submit
from engine.sampling import SamplingParams
from engine.states.grid import GRID
from tests.engine.compute.test_runner import GREEDY, load, make_driver
from tests.engine.invariance import answers
from tests.engine.invariance.answers import PEER, Answer, How, run, step
from tests.engine.states.models import BY_TORCH, EACH_PUSH, NATIVE, at_night, generated, make_state_model
from tests.engine.tiny_models import VOCAB
from tests.nightly import NIGHTLY

needs_kernels = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

LENGTHS = (5, 37, 3, GRID - 2, 2 * GRID + 9)
NUM_NEW = 8


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.each_push
@pytest.mark.parametrize("family", at_night([*NATIVE, *BY_TORCH], ["qwen3_next", "nemotron_h"]))
def test_tokens_are_those_of_generate_without_a_cache(family: str, tmp_path: Path) -> None:
    make_state_model(tmp_path, family)
    numbers = random.Random(3)
    prompts = [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    expected = generated(tmp_path, prompts, NUM_NEW)
    model = load(tmp_path)
    for chunk in (7, 50, 1 << 20):
        driver = make_driver(model, chunk)
        requests = [driver.add(prompt, GREEDY) for prompt in prompts]
        driver.generate(requests, NUM_NEW, chunk=chunk, together=chunk != 50)
        assert [request.output_ids for request in requests] == expected, f"in chunks of {chunk}"


COUNT, ABORTED = (32, 8) if NIGHTLY else (12, 3)
"""Requests at once, and those among them that are given up."""


def many_prompts() -> list[list[int]]:
    """Prompts of which half begin alike, and part at and beside positions of the grid."""
    numbers = random.Random(4)

    def text(length: int) -> list[int]:
        return [numbers.randrange(3, VOCAB) for _ in range(length)]

    shared = text(2 * GRID + 11)
    parts = [GRID, GRID - 1, GRID + 17, 2 * GRID, 2 * GRID + 11]
    return [
        (shared[: parts[index // 2 % len(parts)]] if index % 2 else []) + text(numbers.randrange(1, 50))
        for index in range(COUNT)
    ]


@pytest.mark.parametrize(
    ("family", "numerics"),
    [
        pytest.param("qwen3_next", "auto", marks=needs_kernels),
        *(
            pytest.param(family, "auto", marks=[needs_kernels, pytest.mark.nightly])
            for family in NATIVE
            if family != "qwen3_next"
        ),
        *(pytest.param(family, "torch", marks=pytest.mark.nightly) for family in [*EACH_PUSH, *BY_TORCH]),
    ],
)
def test_many_requests_at_once_have_the_tokens_of_generate(
    family: str, numerics: str, tmp_path: Path
) -> None:
    """Answers in chunks, behind hits, preempted, in used slots, beside aborted requests."""
    make_state_model(tmp_path, family)
    prompts = many_prompts()
    expected = dict(enumerate(generated(tmp_path, prompts, NUM_NEW)))
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    submits = [Submit(index, str(index), prompt, params, 0) for index, prompt in enumerate(prompts)]
    instance = answers.load(tmp_path, dtype="float32", numerics=numerics)
    assert (instance.executor._program is None) == (numerics == "torch")

    def tokens(how: How, some: list[Submit]) -> dict[int, list[int]]:
        found, counted = instance.answers(some, how)
        counters.append(counted)
        return {number: answer.token_ids for number, answer in found.items()}

    counters: list[Counters] = []
    assert tokens(How(budget=1), submits[:3]) == {number: expected[number] for number in range(3)}
    for budget in (7, 16, 50, 64) if NIGHTLY else (7, 50):
        assert tokens(How(budget=budget), submits) == expected, f"in chunks of {budget}"
    assert counters[-1].prefix_cache_hits >= GRID
    core = instance.core(How(budget=16, seqs=2, policy="priority"))
    urgent = [msgspec.structs.replace(each, priority=-each.request) for each in submits]
    found = run(core, urgent, steps_between=3)
    assert {number: answer.token_ids for number, answer in found.items()} == expected
    assert core.scheduler.counters().preemptions > 3
    assert tokens(How(budget=64, states=3, caching=False), submits) == expected, "few slots of states"

    core = instance.core(How(budget=50, seqs=5, states=12))
    given_up = range(0, COUNT, COUNT // ABORTED)
    found = {number: Answer() for number in range(2 * COUNT)}
    for submit in [
        *submits,
        *(msgspec.structs.replace(each, request=COUNT + each.request) for each in submits),
    ]:
        assert core.submit(PEER, submit) is None
        step(core, found, lambda: None)
        if submit.request - 1 in given_up:
            core.abort(PEER, [submit.request - 1])
    while not core.is_empty:
        step(core, found, lambda: None)
    for number, ids in expected.items():
        assert found[COUNT + number].token_ids == ids
        assert found[number].token_ids == ids[: len(found[number].token_ids)]
        assert number in given_up or found[number].token_ids == ids
