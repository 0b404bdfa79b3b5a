"""Mixtures of many families on the native kernels: whole, cut or spread.

In float32 their greedy tokens are those of transformers' ``generate``, with chunks, preemption and hits in the
prefix cache. In bfloat16 a request has the same bits alone and in any company. ``make nightly`` takes every
family through every layout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.executor.uni import UniExecutor
from engine.kernels.core import library
from engine.messages import Submit
from engine.model.checkpoint import read_model_info
from tests.engine.compute.test_exactness import prompts
from tests.engine.greedy import greedy_outputs
from tests.engine.invariance.answers import ALONE, Answers, Instance, settings
from tests.engine.invariance.mixed import longest_of, requests
from tests.engine.invariance.spread import Members, in_shared_memory
from tests.engine.model.sharding.test_sharding import LAYOUTS, greedy, run, shards
from tests.engine.model.sharding.test_sharding import settings as in_float32
from tests.engine.native_families import MIXTURES, SOME_MIXTURES, make_family
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import VOCAB
from tests.nightly import NIGHTLY
from tests.router.tiny_tokenizer import byte_level

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

BLOCK_SIZE = 16
NUM_REQUESTS, NUM_MIXED = (32, 48) if NIGHTLY else (12, 16)
"""Greedy requests in float32, and mixed ones in bfloat16."""
NUM_BLOCKS = 6
"""Room that is too small for all requests at once."""
SHAPES = ["alone", "tp2", "pp2", "spread"]


@pytest.fixture(autouse=True, scope="module")
def quick_turns() -> Iterator[None]:
    """Make threads switch often: ranks, stages and members compute in turns."""
    interval, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-4)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=MIXTURES if NIGHTLY else SOME_MIXTURES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("m") / request.param, request.param)


@pytest.fixture(scope="module")
def generated(directory: Path) -> list[list[int]]:
    """What transformers generates for each prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    )
    lengths = [param.max_tokens or 0 for param in greedy()[:NUM_REQUESTS]]
    return greedy_outputs(model, prompts()[:NUM_REQUESTS], lengths)


def executor_of(directory: Path, shape: str) -> Any:
    if shape != "alone":
        return shards(directory, LAYOUTS[shape], BLOCK_SIZE)
    executor = UniExecutor(in_float32(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    return executor


def programs_of(executor: Any) -> list[Any]:
    workers = getattr(executor, "workers", None)
    return [each._program for each in ([executor] if workers is None else [one.executor for one in workers])]


@pytest.mark.diagonal("directory", "shape", columns=3, each=1)
@pytest.mark.parametrize("shape", SHAPES[:3])
def test_greedy_tokens_are_those_of_generate(shape: str, directory: Path, generated: list[list[int]]) -> None:
    executor = executor_of(directory, shape)
    found, counters = run(
        executor,
        directory,
        greedy()[:NUM_REQUESTS],
        num_blocks=NUM_BLOCKS,
        budget=24,
        block_size=BLOCK_SIZE,
    )
    assert all(program is not None for program in programs_of(executor))
    executor.close()
    assert found == generated
    assert counters.preemptions > 0, "the cache was not small enough to prove anything"
    assert counters.prefix_cache_hits > 0, "the shared beginning was not found"


def test_greedy_tokens_of_spread_experts_are_those_of_generate(
    directory: Path, generated: list[list[int]]
) -> None:
    """Over two instances, in shared memory."""
    submits = [
        Submit(request=index, request_id=str(index), prompt_ids=prompts()[index], params=params, seed=index)
        for index, params in enumerate(greedy()[:NUM_REQUESTS])
    ]
    members = Members(directory, 2, in_shared_memory, num_blocks=NUM_BLOCKS, dtype="float32")
    found = members.answers(submits)
    counters = [core.scheduler.counters() for core in members.cores]
    exchanges = [each._program.exchange.joined for each in members.executors]
    members.close()
    assert all(exchange is not None for exchange in exchanges), "Python exchanges the rows"
    assert [found[index].token_ids for index in range(NUM_REQUESTS)] == generated
    assert sum(each.preemptions for each in counters) > 0
    assert sum(each.prefix_cache_hits for each in counters) > 0


class Alone:
    """A model in bfloat16 on one worker."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        byte_level().save(str(directory / "tokenizer.json"))
        executor = UniExecutor(settings(directory), read_model_info(directory), 1)
        executor.load(lambda _phase: None)
        executor.allocate(8)
        assert executor._program is not None, "torch computes it"
        self.instance = Instance(directory, executor)
        self.submits = requests(7, count=NUM_MIXED, vocab_size=VOCAB, longest=60, most=20)
        self.answers: Answers = self.instance.answers(self.submits, ALONE)[0]


@pytest.fixture(scope="module")
def alone(directory: Path) -> Alone:
    return Alone(directory)


def check_spread(alone: Alone, **settings: Any) -> None:
    """Answers of two instances with half of the experts each are those of one."""
    members = Members(alone.directory, 2, in_shared_memory, **settings)
    try:
        assert members.answers(alone.submits) == alone.answers
        assert all(each._program.exchange.joined is not None for each in members.executors), (
            "Python exchanges rows"
        )
        counters = [core.scheduler.counters() for core in members.cores]
    finally:
        members.close()
    if settings["in_pieces"]:
        assert all(each.prefix_cache_hits for each in counters)
        assert sum(each.preemptions for each in counters) > 0
        assert sum(each.drafted_tokens for each in counters) > 0


@pytest.mark.diagonal("directory", "shape", columns=4, each=1)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_are_those_of_each_request_alone(shape: str, alone: Alone) -> None:
    if shape == "spread":
        check_spread(alone, in_pieces=False)
        if NIGHTLY:
            check_spread(alone, in_pieces=True, num_blocks=longest_of(alone.submits) // BLOCK_SIZE + 2)
        return
    if shape == "alone":
        instance = alone.instance
    else:
        layout, info = LAYOUTS[shape], read_model_info(alone.directory)
        group = {"group": in_shared_memory} if shape == "tp2" else {}
        executor = ThreadedShards(settings(alone.directory), info, tp=layout.tp, pp=layout.pp, **group)
        executor.load(lambda _phase: None)
        instance = Instance(alone.directory, executor)
    instance.executor.allocate(8)
    assert all(program.is_order_fixed for program in programs_of(instance.executor)), "another class"
    instance.check_in_company(alone.submits, alone.answers)
    if shape != "alone":
        instance.executor.close()
