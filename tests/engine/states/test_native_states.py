"""Models with recurrent states on the native kernels: tokens of generate, grids and refusals."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.kernels.core import library
from engine.kernels.make import bytes_for_program
from engine.messages import Submit
from engine.sampling import SamplingParams
from engine.states.grid import GRID, NATIVE_GRID
from tests.engine.compute.test_runner import load as load_model
from tests.engine.invariance.answers import ALONE, How, Instance, load, run, settings
from tests.engine.invariance.mixed import requests
from tests.engine.shard_threads import ThreadedShards
from tests.engine.states.models import EACH_PUSH, NATIVE, at_night, generated, make_state_model
from tests.engine.tiny_models import VOCAB

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

LENGTHS = (5, 37, 3, NATIVE_GRID - 2, 1, 2 * GRID + 9, NATIVE_GRID)
NUM_NEW = 2 * NATIVE_GRID + 2


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("family", at_night(NATIVE, EACH_PUSH))
def test_tokens_are_those_of_generate_without_a_cache(family: str, tmp_path: Path) -> None:
    make_state_model(tmp_path, family)
    numbers = random.Random(3)
    prompts = [[numbers.randrange(3, VOCAB) for _ in range(length)] for length in LENGTHS]
    expected = generated(tmp_path, prompts, NUM_NEW)
    instance = load(tmp_path, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    submits = [Submit(index, str(index), prompt, params, seed=1) for index, prompt in enumerate(prompts)]
    for budget in (1, 7, 16, 50, 512):
        core = instance.core(How(budget=budget))
        program = instance.executor._program
        assert program is not None
        assert program.states is not None
        for tensor in program.states.pool.stored:
            tensor.view(torch.uint8).fill_(0xFF)  # NaN in any type
        found = run(core, submits)
        assert [found[index].token_ids for index in range(len(prompts))] == expected, f"in chunks of {budget}"
        assert program.continuation is not None, "its last step was packed anew"


def test_block_sizes_that_do_not_divide_the_native_grid_are_computed_by_torch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_state_model(tmp_path, "lfm2")
    native = load(tmp_path, dtype="float32")
    with caplog.at_level(logging.INFO):
        wide = load(tmp_path, block_size=32, dtype="float32")
    assert native.facts is not None
    assert wide.facts is not None
    assert [kind.grid for kind in native.facts.boundaries] == [NATIVE_GRID]
    assert [kind.grid for kind in wide.facts.boundaries] == [GRID]
    assert wide.executor._program is None
    assert "--block-size 32 does not divide the 16 tokens of states' grid" in caplog.text


def test_rings_of_running_requests_are_counted(tmp_path: Path) -> None:
    make_state_model(tmp_path, "lfm2")
    model = load_model(tmp_path)
    hidden, conv_layers = 64, 2
    of_request = conv_layers * 2 * NATIVE_GRID * hidden * 4
    without = bytes_for_program(model, NATIVE_GRID)
    assert bytes_for_program(model, NATIVE_GRID, requests=10) == without + 10 * of_request > without > 0


at_night_only = pytest.mark.nightly
LAYOUTS = [
    pytest.param("lfm2", {"pp": 2, "split": (2, 2)}, [True, True]),
    pytest.param("lfm2", {"pp": 2, "split": (3, 1)}, [True, False], marks=at_night_only),
    pytest.param("qwen3_next", {"tp": 2}, [True] * 2),
    pytest.param("qwen3_5_moe_text", {"tp": 2}, [True] * 2, marks=at_night_only),
    pytest.param("qwen3_next", {"pp": 2, "tp": 2}, [True] * 4, marks=at_night_only),
    pytest.param("lfm2_moe", {"pp": 2, "tp": 2}, [True, True, False, False], marks=at_night_only),
]
"""Family, numbers of workers, and which of these have layers with states."""


@pytest.mark.each_push
@pytest.mark.parametrize(("family", "layout", "have_states"), LAYOUTS)
def test_workers_give_the_bits_of_one(
    family: str, layout: dict[str, Any], have_states: list[bool], tmp_path: Path
) -> None:
    make_state_model(tmp_path, family, torch.bfloat16)
    submits = requests(5, vocab_size=VOCAB, greedy=False, count=5, longest=80, most=10)
    whole = load(tmp_path)
    alone = whole.answers(submits, ALONE)[0]
    executor = ThreadedShards(settings(tmp_path), whole.info, **layout)
    try:
        facts = executor.load(lambda _phase: None)
        workers = Instance(tmp_path, executor, facts=facts)
        assert workers.answers(submits, How(budget=24))[0] == alone
        programs = [worker.executor._program for worker in executor.workers]
        assert all(program is not None for program in programs)
        assert [program.states is not None for program in programs] == have_states
    finally:
        executor.close()
