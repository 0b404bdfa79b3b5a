"""Token ids and log-probabilities of any number of tensor-parallel ranks equal those of one worker.

Bit for bit, in float32 and bfloat16, where the native kernels compute. The tiny models are wide enough for
the inputs of each product to be split into four parts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from coordinator.numerics import Arithmetic, class_of
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor.uni import UniExecutor
from engine.groups.stepping import Stepping
from engine.kernels.core import library
from engine.messages import Submit, TokenLogprobs
from engine.model.checkpoint import read_model_info
from engine.sampling import SamplingParams
from parallel.communicators.base import Communicator
from parallel.parts import MOST_PARTS, is_order_fixed, parts_here, parts_of
from parallel.placement import assign_experts
from tests.coordinator.test_numerics import facts
from tests.engine.compute.test_exactness import PEER, prompts
from tests.engine.groups.test_lockstep_engine import ThreadStepping
from tests.engine.kernels.exchange.test_native_shards import Rank, of_all, programs, shared, shared_group
from tests.engine.model.sharding.test_sharding import mixed
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import make_tiny_model
from tests.parallel.thread_group import thread_group

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")

LAYERS = 3
NUM_REQUESTS = 12
NUM_BLOCKS = 64
WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 385}
"""385 tokens do not divide: the ranks have parts of the vocabulary of different size."""
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": WIDE,  # biases
    "gemma2": WIDE | {"head_dim": 32},  # norms behind parts, factors, caps
    "qwen3_moe": WIDE | {"head_dim": 32, "moe_intermediate_size": 128, "num_experts_per_tok": 3},
    "olmoe": WIDE | {"num_key_value_heads": 2, "intermediate_size": 128},  # norms over all heads
    "gpt_oss": WIDE | {"head_dim": 32, "intermediate_size": 128},  # whole experts with biases
}
DTYPES = [torch.float32, torch.bfloat16]

Answer = tuple[list[int], list[TokenLogprobs]]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp(request.param), request.param)


def make(place: Path, family: str) -> Path:
    return make_tiny_model(place, family, layers=LAYERS, **FAMILIES[family])


# ---- one step


def logits(
    directory: Path, size: int, groups: Callable[[int], Communicator], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Logits of a few steps, [tokens, vocabulary]."""
    ranks = of_all(size, groups, lambda rank, group: Rank(directory, rank, group, dtype).run())
    return [torch.cat(parts, dim=1) for parts in zip(*ranks, strict=True)]


@pytest.mark.diagonal("dtype", "size", columns=2, each=1)
@pytest.mark.parametrize("through", ["shared memory", "a communicator"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [2, 4])
def test_logits_are_those_of_one_worker(directory: Path, size: int, dtype: torch.dtype, through: str) -> None:
    alone = logits(directory, 1, thread_group(1).__getitem__, dtype)
    groups = shared(size) if through == "shared memory" else thread_group(size).__getitem__
    for found, expected in zip(logits(directory, size, groups, dtype), alone, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("inputs", "parts"), [(2048, 4), (1408, 4), (192, 2), (96, 1), (72, 4), (12, 2), (10, 1)]
)
def test_inputs_are_split_where_neither_tiles_nor_words_are_cut(inputs: int, parts: int) -> None:
    """Whether the machine has tiles does not matter."""
    assert parts_of(inputs) == parts
    for ranks in (1, 2, MOST_PARTS):
        fixed = parts % ranks == 0
        assert is_order_fixed(inputs, ranks) == fixed
        assert parts_here(inputs // ranks, ranks) == (parts // ranks if fixed else 1)


# ---- whole answers


def settings(directory: Path, dtype: str) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype=dtype),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=NUM_REQUESTS),
    )


def requests() -> list[SamplingParams]:
    """All ways of sampling, of which every other request has log-probabilities."""
    return [
        msgspec.structs.replace(params, logprobs=2 if index % 2 else params.logprobs)
        for index, params in enumerate(mixed()[:NUM_REQUESTS])
    ]


def answers(executor: Any, directory: Path, dtype: str, stepping: Stepping | None = None) -> list[Answer]:
    core = EngineCore(
        settings(directory, dtype),
        read_model_info(directory),
        executor,
        num_blocks=NUM_BLOCKS,
        max_model_len=512,
    )
    if stepping is not None:
        core.stepping = stepping
    found: list[Answer] = [([], []) for _ in range(NUM_REQUESTS)]
    for index, params in enumerate(requests()):
        submit = Submit(
            request=index, request_id=str(index), prompt_ids=prompts()[index], params=params, seed=index
        )
        assert core.submit(PEER, submit) is None
    while core.has_work:
        core.stepping.notice_work()
        for delta in core.step().get(PEER, []):
            ids, logprobs = found[delta.request]
            ids += delta.token_ids
            logprobs += [each for each in delta.prompt_logprobs or [] if each is not None]
            logprobs += delta.logprobs or []
    assert all(ids for ids, _ in found)
    assert sum(bool(logprobs) for _, logprobs in found) > NUM_REQUESTS // 2
    return found


def answers_of_one_worker(directory: Path, dtype: str) -> tuple[UniExecutor, list[Answer]]:
    alone = UniExecutor(settings(directory, dtype), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    alone.allocate(NUM_BLOCKS)
    return alone, answers(alone, directory, dtype)


def shards(directory: Path, dtype: str, **layout: Any) -> ThreadedShards:
    executor = ThreadedShards(settings(directory, dtype), read_model_info(directory), **layout)
    executor.load(lambda _phase: None)
    executor.allocate(NUM_BLOCKS)
    assert all(programs(executor))
    return executor


def arithmetic(executor: ThreadedShards) -> list[Arithmetic]:
    return [each for worker in executor.workers for each in worker.executor.arithmetic()]


@pytest.mark.diagonal("directory", "layout", columns=3, each=1)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_are_those_of_one_worker(directory: Path, dtype: str, layout: dict[str, int]) -> None:
    """All of one class, too."""
    alone, expected = answers_of_one_worker(directory, dtype)
    executor = shards(directory, dtype, group=shared_group, **layout)
    try:
        assert answers(executor, directory, dtype) == expected
        workers = arithmetic(executor)
    finally:
        executor.close()
    whole = facts(*alone.arithmetic(), tensor_parallel_size=1)
    cut = facts(*workers, tensor_parallel_size=layout["tp"])
    assert class_of(cut) == class_of(whole)
    assert class_of(whole).invariant


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_answers_with_spread_experts_are_those_of_one_worker(dtype: str, tmp_path: Path) -> None:
    """Whole experts on the ranks of one instance, exchanged through Python."""
    directory = make(tmp_path, "qwen3_moe")
    _, expected = answers_of_one_worker(directory, dtype)
    executor = shards(directory, dtype, tp=2, place=(0, 1))
    placement = assign_experts(read_model_info(directory).num_experts, 2, "linear")
    executor.join([thread_group(2)], placement)
    stepping = ThreadStepping(thread_group(1)[0], [])
    try:
        assert answers(executor, directory, dtype, stepping=stepping) == expected
    finally:
        executor.close()


def test_ranks_that_would_cut_a_part_are_a_class_of_their_own(tmp_path: Path) -> None:
    """64 inputs are two parts, not four."""
    directory = make_tiny_model(tmp_path, "llama", layers=1, intermediate_size=128)
    alone = UniExecutor(settings(directory, "float32"), read_model_info(directory), 1)
    alone.load(lambda _phase: None)
    alone.allocate(NUM_BLOCKS)
    classes = [class_of(facts(*alone.arithmetic(), tensor_parallel_size=1))]
    for size in (2, 4):
        executor = shards(directory, "float32", tp=size, group=shared_group)
        classes.append(class_of(facts(*arithmetic(executor), tensor_parallel_size=size)))
        executor.close()
    assert classes[1] == classes[0] != classes[2]
