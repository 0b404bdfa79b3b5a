"""Torch's operators under ``--batch-invariant``: what runs beside a request changes no bit of its answer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

from coordinator.numerics import Numerics
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor.uni import UniExecutor
from engine.executor_contract import Executor
from engine.kernels.core import library
from engine.messages import Counters, Submit, TokenLogprobs
from engine.model.checkpoint import CheckpointError, read_model_info
from engine.numerics import numerics_of
from engine.sampling import SamplingParams
from engine.settings import resolve
from tests.engine.groups.test_lockstep_engine import Layout, run_instances
from tests.engine.oracle import Oracle, knowing
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import VOCAB, make_tiny_model
from tests.nightly import NIGHTLY

PEER = b"router"
NUM_REQUESTS = 48 if NIGHTLY else 8
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
    sampled = {
        "temperature": 0.9,
        "top_p": 0.95 if index % 4 == 1 else 1.0,
        "top_k": 40 if index % 3 == 0 else 0,
    }
    how = sampled if index % 2 else {"temperature": 0.0}
    return SamplingParams(**how, max_tokens=4 + 3 * (index % 5), ignore_eos=True, logprobs=2)


def engine(
    directory: Path, block_size: int = BLOCK_SIZE, load_format: Any = "auto", **device: Any
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), dtype="bfloat16", load_format=load_format),
        cache=CacheConfig(block_size=block_size),
        device=DeviceConfig(device="cpu", **device),
    )


def loaded(config: EngineConfig) -> UniExecutor:
    executor = UniExecutor(config, read_model_info(Path(config.model.model)), 1)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    return executor


def class_of_executor(executor: UniExecutor, directory: Path) -> Numerics:
    config = engine(directory)
    info, settings = resolve(config)
    return numerics_of(settings, config.model, info.directory, executor.arithmetic())


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
    executor = loaded(engine(directory, batch_invariant=True))
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


def test_tokens_that_torch_chooses_are_alike_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernels are loaded, nor compiled."""
    monkeypatch.setenv(library.OFF, "0")
    directory = make_tiny_model(tmp_path, "gpt_oss", layers=2)
    executor = loaded(engine(directory, batch_invariant=True))
    assert "TorchLogits" in repr(executor._runner._sampler)  # type: ignore[union-attr]
    by_itself, _ = answers(executor, directory, together=False)
    assert answers(executor, directory)[0] == by_itself
    executor.close()


@pytest.mark.nightly
def test_threads_change_no_bit(executor: UniExecutor, directory: Path, alone: list[Answer]) -> None:
    threads = torch.get_num_threads()
    executor.set_threads(3)
    try:
        assert answers(executor, directory)[0] == alone
    finally:
        executor.set_threads(threads)


@pytest.mark.nightly
def test_without_the_flag_bits_depend_on_the_batch(directory: Path) -> None:
    """Else the tests above would show nothing."""
    executor = loaded(engine(directory))
    try:
        by_itself, _ = answers(executor, directory, together=False)
        together, _ = answers(executor, directory)
    finally:
        executor.close()
    if together == by_itself:
        pytest.skip("this CPU computes rows of these sizes alike in any batch")


@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_shards_keep_it(layout: dict[str, int], tmp_path: Path) -> None:
    """Stages compute the bits of one worker; ranks others, alike in any batch."""
    directory = make_tiny_model(tmp_path, "gemma3")
    config = engine(directory, batch_invariant=True)
    shards = ThreadedShards(config, read_model_info(directory), **layout)
    try:
        shards.load(lambda _phase: None)
        shards.allocate(8)
        by_itself, _ = answers(shards, directory, together=False)
        assert answers(shards, directory)[0] == by_itself
    finally:
        shards.close()
    if "pp" in layout:
        whole = loaded(config)
        assert answers(whole, directory)[0] == by_itself
        whole.close()


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
def test_spread_experts_keep_it(family: str, tmp_path: Path) -> None:
    """Rows of several instances go through one product of an expert."""
    directory = make_tiny_model(tmp_path, family)
    alone, *others = [
        run_instances(directory, Layout(size, backend=backend, dtype="bfloat16", batch_invariant=True))[0]
        for size, backend in (
            (1, "allgather_reducescatter"),
            (2, "allgather_reducescatter"),
            (3, "all_to_all"),
        )
    ]
    assert others == [alone, alone]


def test_the_class_says_so(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "gemma3")
    for flag in (True, False):
        executor = loaded(engine(directory, batch_invariant=flag))
        numerics = class_of_executor(executor, directory)
        assert (numerics.kernels, numerics.invariant) == ("torch", flag)
        executor.close()


@pytest.mark.skipif(library.load() is None, reason="no native kernels here")
def test_native_kernels_need_nothing_for_it(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    found = []
    for flag in (True, False):
        executor = loaded(engine(directory, block_size=16, batch_invariant=flag))
        assert "Program" in repr(executor)
        found.append(class_of_executor(executor, directory))
        executor.close()
    assert found[0] == found[1]


def test_an_operator_that_nobody_knows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_tiny_model(tmp_path, "gemma3")
    monkeypatch.setattr(Gemma3RMSNorm, "_norm", lambda _self, hidden: torch.special.i0(hidden))
    with pytest.raises(
        CheckpointError, match=r"--batch-invariant: Gemma3ForCausalLM uses the operator aten.special_i0"
    ):
        loaded(engine(directory, batch_invariant=True, load_format="dummy"))


def test_a_model_that_depends_on_the_batch_all_the_same_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_tiny_model(tmp_path, "gemma3")
    norm = Gemma3RMSNorm._norm
    monkeypatch.setattr(
        Gemma3RMSNorm, "_norm", lambda self, hidden: norm(self, hidden) + hidden.mean(dim=1, keepdim=True)
    )
    with pytest.raises(CheckpointError, match="of 40 tokens have other bits beside another request"):
        loaded(engine(directory, batch_invariant=True, load_format="dummy"))
