"""The whole engine against transformers' ``generate``, token for token, for every family.

32 requests of mixed length at once, prompts cut into small chunks, a prefix that is found in the cache,
and a KV cache so small that requests are preempted: none of it may change a greedy float32 output.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor import make_executor
from engine.executor_contract import Executor
from engine.kernels.core import library
from engine.messages import Counters, Submit
from engine.model.checkpoint import read_model_info
from engine.sampling import SamplingParams
from tests.engine.greedy import greedy_outputs
from tests.engine.oracle import Oracle, knowing
from tests.engine.tiny_models import FAMILIES, VOCAB, make_tiny_model
from tests.nightly import NIGHTLY

PEER = b"router"
NUM_REQUESTS = 32
NUM_ALONE = NUM_REQUESTS if NIGHTLY else 12
"""Requests that also run alone: at least one with each combination of sampling parameters."""
CACHE_TOKENS = 96
"""Tokens in the small cache: little more than the longest request."""
NATIVE = ("llama", "mistral", "mixtral", "qwen2", "qwen3_moe")
"""Families whose tiny models the native kernels compute, given blocks of 16."""
CASES = [(family, size) for family in sorted(FAMILIES) for size in ((4, 16) if family in NATIVE else (4,))]
SHARED = [random.Random(0).randrange(3, VOCAB) for _ in range(17)]


def prompts() -> list[list[int]]:
    """Prompts of mixed lengths, a third of them with a common beginning."""
    rng = random.Random(1)
    return [
        (SHARED if index % 3 == 0 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 40))]
        for index in range(NUM_REQUESTS)
    ]


def output_length(index: int) -> int:
    return 5 + index % 14


@pytest.fixture(scope="module", params=CASES, ids=[f"{family}-{size}" for family, size in CASES])
def case(request: pytest.FixtureRequest) -> tuple[str, int]:
    """A family and a block size."""
    family, block_size = request.param
    return family, block_size


@pytest.fixture(scope="module")
def block_size(case: tuple[str, int]) -> int:
    return case[1]


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[Path, list[list[int]]]]:
    """A family's model and the outputs of transformers, once for both block sizes."""
    return {}


@pytest.fixture(scope="module")
def model_directory(
    case: tuple[str, int],
    references: dict[str, tuple[Path, list[list[int]]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    family = case[0]
    if family not in references:
        directory = make_tiny_model(tmp_path_factory.mktemp(family), family)
        references[family] = directory, generated_by_transformers(directory)
    return references[family][0]


@pytest.fixture(scope="module")
def executor(model_directory: Path, case: tuple[str, int]) -> Iterator[Executor]:
    family, block_size = case
    config = EngineConfig(
        model=ModelConfig(model=str(model_directory), dtype="float32"),
        cache=CacheConfig(block_size=block_size),
    )
    executor = make_executor(config, read_model_info(model_directory), 1)
    executor.load(lambda _phase: None)
    executor.allocate(8)
    native = block_size == 16 and family in NATIVE and library.load() is not None
    assert ("Program" in repr(executor)) == native
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def reference(
    case: tuple[str, int], model_directory: Path, references: dict[str, tuple[Path, list[list[int]]]]
) -> list[list[int]]:
    return references[case[0]][1]


def generated_by_transformers(model_directory: Path) -> list[list[int]]:
    """The tokens that transformers generates for each prompt alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_directory, dtype=torch.float32, attn_implementation="eager"
    )
    return greedy_outputs(model, prompts(), [output_length(index) for index in range(NUM_REQUESTS)])


def run(
    executor: Executor,
    directory: Path,
    params: list[SamplingParams],
    texts: list[list[int]],
    *,
    block_size: int,
    tokens: int,
    budget: int,
    together: bool = True,
    drafts: list[list[int]] | None = None,
) -> tuple[list[list[int]], Counters]:
    """Outputs of all requests, sent at once or each after the one before has ended.

    ``drafts``: what they will be, to be drafted with mistakes.
    """
    num_blocks = tokens // block_size
    core = EngineCore(
        EngineConfig(
            cache=CacheConfig(block_size=block_size),
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=min(budget, 32)),
        ),
        read_model_info(directory),
        executor,
        num_blocks=num_blocks,
        max_model_len=512,
        speculation=None if drafts is None else oracle(texts, drafts),
    )
    executor.allocate(num_blocks)
    outputs: dict[int, list[int]] = {index: [] for index in range(len(texts))}
    for index, (text, param) in enumerate(zip(texts, params, strict=True)):
        submit = Submit(request=index, request_id=str(index), prompt_ids=text, params=param, seed=index)
        assert core.submit(PEER, submit) is None
        while core.has_work and not together:
            _collect(core, outputs)
    while core.has_work:
        _collect(core, outputs)
    assert core.reports.report(0, 0).blocks_used == 0
    return [outputs[index] for index in range(len(texts))], core.scheduler.counters()


def oracle(texts: list[list[int]], outputs: list[list[int]]) -> Oracle:
    """Drafts of these outputs for these texts, with mistakes."""
    return Oracle(knowing([[*text, *output] for text, output in zip(texts, outputs, strict=True)]), right=0.8)


def _collect(core: EngineCore, outputs: dict[int, list[int]]) -> None:
    for delta in core.step().get(PEER, []):
        outputs[delta.request] += delta.token_ids
        if delta.logprobs is not None:
            assert [each.token_id for each in delta.logprobs] == delta.token_ids
            assert all(each.rank == 1 for each in delta.logprobs)


def greedy(logprobs: int | None = None) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=0.0, max_tokens=output_length(index), ignore_eos=True, logprobs=logprobs)
        for index in range(NUM_REQUESTS)
    ]


def test_greedy_ids_equal_transformers(
    executor: Executor, model_directory: Path, block_size: int, reference: list[list[int]]
) -> None:
    roomy, counters = run(
        executor, model_directory, greedy(), prompts(), block_size=block_size, tokens=2400, budget=512
    )
    assert roomy == reference
    assert counters.preemptions == 0
    assert counters.prefix_cache_hits > 0, "the shared beginning was not found"


def test_chunks_and_preemption_change_nothing(
    executor: Executor, model_directory: Path, block_size: int, reference: list[list[int]]
) -> None:
    tight, counters = run(
        executor, model_directory, greedy(), prompts(), block_size=block_size, tokens=CACHE_TOKENS, budget=12
    )
    assert tight == reference
    assert counters.preemptions > 0, "the cache was not small enough to prove anything"


@pytest.mark.diagonal("case", "room", columns=3, each=1)
@pytest.mark.parametrize(
    "room",
    [(2400, 512, None), (2400, 512, 0), (CACHE_TOKENS, 12, None)],
    ids=["roomy", "logprobs", "tight"],
)
def test_drafts_change_nothing(
    executor: Executor,
    model_directory: Path,
    block_size: int,
    reference: list[list[int]],
    room: tuple[int, int, int | None],
) -> None:
    """Where there is room, and where requests are preempted between them; with log-probabilities, too."""
    tokens, budget, logprobs = room
    outputs, counters = run(
        executor,
        model_directory,
        greedy(logprobs),
        prompts(),
        block_size=block_size,
        tokens=tokens,
        budget=budget,
        drafts=reference,
    )
    assert outputs == reference
    assert counters.drafted_tokens > sum(counters.taken_by_place) > 0
    assert (counters.preemptions > 0) == (tokens == CACHE_TOKENS)


def test_a_seeded_sample_is_the_same_alone_and_in_any_batch(
    executor: Executor, model_directory: Path, block_size: int
) -> None:
    params = [
        SamplingParams(
            temperature=0.9,
            top_p=0.95 if index % 2 else 1.0,
            top_k=40 if index % 3 == 0 else 0,
            repetition_penalty=1.2 if index % 4 == 0 else 1.0,
            max_tokens=output_length(index),
            ignore_eos=True,
        )
        for index in range(NUM_REQUESTS)
    ]
    alone, _ = run(
        executor,
        model_directory,
        params[:NUM_ALONE],
        prompts()[:NUM_ALONE],
        block_size=block_size,
        tokens=2400,
        budget=512,
        together=False,
    )
    together, _ = run(
        executor, model_directory, params, prompts(), block_size=block_size, tokens=2400, budget=512
    )
    tight, counters = run(
        executor, model_directory, params, prompts(), block_size=block_size, tokens=CACHE_TOKENS, budget=12
    )
    drafted, with_drafts = run(
        executor,
        model_directory,
        params,
        prompts(),
        block_size=block_size,
        tokens=2400,
        budget=512,
        drafts=together,
    )
    assert together[:NUM_ALONE] == alone
    assert tight == together
    assert drafted == together
    assert counters.preemptions > 0
    assert with_drafts.drafted_tokens > sum(with_drafts.taken_by_place) > 0
    assert len({tuple(output[:5]) for output in together}) > NUM_REQUESTS // 2, "the samples do not vary"
