"""Torch's operators under ``--batch-invariant``: what runs beside a request changes no bit of its answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor.uni import UniExecutor
from engine.executor_contract import Executor
from engine.messages import Counters, Submit, TokenLogprobs
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.numerics import numerics_of
from engine.sampling import SamplingParams
from tests.engine.oracle import Oracle, knowing
from tests.engine.tiny_models import VOCAB, make_tiny_model
from tests.nightly import NIGHTLY

PEER = b"router"
NUM_REQUESTS = 48 if NIGHTLY else 10
MODELS = ("gemma3", "gpt_oss", "deepseek_v3")
"""Families that torch's operators compute, whose bits depended on the batch."""
BLOCK_SIZE = 4
ROOMY, TIGHT = 4000, 124
"""Tokens in the cache: enough for all requests, or little more than the longest one."""
SHARED = [random.Random(0).randrange(3, VOCAB) for _ in range(17)]


@dataclass
class Answer:
    """What a client gets, to the bit."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


def prompts() -> list[list[int]]:
    """Prompts of mixed lengths, a third of them with a common beginning."""
    rng = random.Random(1)
    return [
        (SHARED if index % 3 == 0 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 80))]
        for index in range(NUM_REQUESTS)
    ]


def params(index: int) -> SamplingParams:
    """Greedy and sampled requests in turn."""
    sampled = {"temperature": 0.9, "top_p": 0.95 if index % 4 == 1 else 1.0, "top_k": 40 if index % 3 == 0 else 0}
    how = sampled if index % 2 else {"temperature": 0.0}
    return SamplingParams(**how, max_tokens=6 + 3 * (index % 7), ignore_eos=True, logprobs=2)


def loaded(directory: Path, **device: object) -> UniExecutor:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="bfloat16"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        device=DeviceConfig(device="cpu", **device),
    )
    executor = UniExecutor(config, read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    return executor


def answers(
    executor: Executor,
    directory: Path,
    *,
    budget: int = 512,
    tokens: int = ROOMY,
    together: bool = True,
    drafts: list[Answer] | None = None,
) -> tuple[list[Answer], Counters]:
    """Answers to all requests, sent at once or each after the one before has ended."""
    texts = prompts()
    oracle = None
    if drafts is not None:
        known = [[*text, *draft.token_ids] for text, draft in zip(texts, drafts, strict=True)]
        oracle = Oracle(knowing(known), right=0.8)
    core = EngineCore(
        EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE),
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=min(budget, 32)),
        ),
        read_model_info(directory),
        executor,
        num_blocks=tokens // BLOCK_SIZE,
        max_model_len=512,
        speculation=oracle,
    )
    executor.allocate(tokens // BLOCK_SIZE)
    found = [Answer() for _ in texts]

    def finish() -> None:
        while core.has_work:
            for delta in core.step().get(PEER, []):
                found[delta.request].token_ids += delta.token_ids
                found[delta.request].logprobs += delta.logprobs or []

    for index, text in enumerate(texts):
        submit = Submit(
            request=index, request_id=str(index), prompt_ids=text, params=params(index), seed=index
        )
        assert core.submit(PEER, submit) is None
        if not together:
            finish()
    finish()
    return found, core.scheduler.counters()


@pytest.fixture(scope="module", params=MODELS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def executor(directory: Path) -> Iterator[UniExecutor]:
    executor = loaded(directory, batch_invariant=True)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def alone(executor: UniExecutor, directory: Path) -> list[Answer]:
    return answers(executor, directory, together=False)[0]


def test_a_batch_changes_no_bit(executor: UniExecutor, directory: Path, alone: list[Answer]) -> None:
    together, counters = answers(executor, directory)
    assert together == alone
    assert counters.prefix_cache_hits > 0
    assert len({tuple(answer.token_ids[:4]) for answer in alone}) > NUM_REQUESTS // 2, "answers do not vary"
    assert all(len(answer.logprobs) == len(answer.token_ids) for answer in alone)


@pytest.mark.parametrize("budget", [64, 12] if NIGHTLY else [32])
def test_small_chunks_and_preemption_change_no_bit(
    executor: UniExecutor, directory: Path, alone: list[Answer], budget: int
) -> None:
    tight, counters = answers(executor, directory, budget=budget, tokens=TIGHT)
    assert tight == alone
    assert counters.preemptions > 0


def test_drafts_change_no_bit(executor: UniExecutor, directory: Path, alone: list[Answer]) -> None:
    drafted, counters = answers(executor, directory, budget=64, drafts=alone)
    assert drafted == alone
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 0


def test_threads_change_no_bit(executor: UniExecutor, directory: Path, alone: list[Answer]) -> None:
    threads = torch.get_num_threads()
    executor.set_threads(3)
    try:
        assert answers(executor, directory)[0] == alone
    finally:
        executor.set_threads(threads)
