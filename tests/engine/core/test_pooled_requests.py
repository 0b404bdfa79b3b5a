"""Pooled requests in the engine core: one step, one delta, and what is refused."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from coordinator.pooled_model import PooledModel, PoolingTask
from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.messages import FinishReason, Submit, Tokens, ToRouter
from engine.model.checkpoint import ModelInfo
from engine.pooling_params import Pooled, PoolingParams
from engine.sampling import SamplingParams
from engine.step import Step, StepResult
from tests.engine.simulated_executor import SimulatedExecutor

MODEL = PooledModel(tasks=(PoolingTask.EMBED,), dimensions=4, matryoshka=(2,))
INFO = ModelInfo(
    directory="", architecture="", model_type="", vocab_size=100, context_length=16, dtype="float32",
    eos_token_ids=(), num_experts=0, pooling=MODEL,
)  # fmt: skip
EMBED = PoolingParams(PoolingTask.EMBED)
PEER = b"router"


class SummingExecutor(SimulatedExecutor):
    """Executor whose embeddings are sums of tokens; that of token 99 is not finite."""

    def __init__(self) -> None:
        super().__init__(block_size=4, budget=16, max_rows=4)
        self.steps: list[list[int]] = []
        self._results: list[StepResult] = []

    def begin(self, step: Step, sizes: object = ()) -> None:
        self.steps.append(step.counts)
        prompts = {admit.slot: admit for admit in step.admits}
        pooled = {}
        for row, slot in enumerate(step.slots):
            admit = prompts[slot]
            assert admit.pooling is not None
            values = np.full(admit.pooling.dimensions or 4, sum(admit.token_ids), np.float32)
            if 99 not in admit.token_ids:
                pooled[row] = Pooled(values.tobytes(), values.shape)
        self._results.append(StepResult([0] * len(step.slots), pooled=pooled))

    def finish(self) -> StepResult:
        return self._results.pop(0)


@pytest.fixture
def executor() -> SummingExecutor:
    return SummingExecutor()


@pytest.fixture
def core(executor: SummingExecutor) -> EngineCore:
    config = EngineConfig(
        cache=CacheConfig(block_size=4, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_batched_tokens=16, max_num_seqs=4, enable_chunked_prefill=False),
    )
    return EngineCore(config, INFO, executor, num_blocks=16, max_model_len=16)


def submit(number: int, prompt: list[int], **fields: object) -> Submit:
    made = Submit(number, "r", prompt, SamplingParams(), 0, pooling=EMBED)
    return msgspec.structs.replace(made, **fields)


def test_each_request_is_answered_by_one_delta_over_the_wire(
    core: EngineCore, executor: SummingExecutor
) -> None:
    prompts = {1: [1, 2, 3], 2: [7] * 16, 3: [5], 4: [6] * 13}
    for number, prompt in prompts.items():
        assert core.submit(PEER, submit(number, prompt)) is None
    answers = {}
    while core.has_work:
        for delta in core.step()[PEER]:
            message = msgspec.msgpack.encode(Tokens(deltas=[delta]))
            read = msgspec.msgpack.decode(message, type=ToRouter)
            assert isinstance(read, Tokens)
            (over_the_wire,) = read.deltas
            assert (over_the_wire.finish_reason, over_the_wire.token_ids) == (FinishReason.STOP, [])
            assert over_the_wire.pooled is not None
            assert over_the_wire.request not in answers
            answers[over_the_wire.request] = np.frombuffer(over_the_wire.pooled.values, np.float32)
    assert {number: float(found[0]) for number, found in answers.items()} == {1: 6, 2: 112, 3: 5, 4: 78}
    assert all(found.shape == (4,) for found in answers.values())
    assert all(sum(counts) <= 16 for counts in executor.steps)
    assert sum(map(sum, executor.steps)) == sum(map(len, prompts.values()))
    counters = core.scheduler.counters()
    assert (counters.pooled_requests, counters.pooled_tokens) == (4, sum(map(len, prompts.values())))
    assert counters.pooled_steps == len(executor.steps) > 1
    assert core.is_empty
    assert core.pool.num_used == 0


def test_numbers_that_are_not_finite_are_an_error_and_counted(core: EngineCore) -> None:
    assert core.submit(PEER, submit(1, [99])) is None
    assert core.submit(PEER, submit(2, [98])) is None
    bad, good = core.step()[PEER]
    assert (bad.finish_reason, bad.pooled) == (FinishReason.ERROR, None)
    assert "not finite" in bad.error
    assert good.finish_reason is FinishReason.STOP
    assert core.scheduler.counters().not_finite == 1


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"pooling": None}, "generates no text: it does embed"),
        ({"prompt_ids": [1] * 17}, "the input has 17 tokens; this model takes up to 16"),
        ({"prompt_ids": [100]}, "outside the vocabulary"),
        ({"prompt_ids": []}, "empty"),
        ({"pooling": PoolingParams(PoolingTask.SCORE)}, "does not do score"),
        ({"pooling": PoolingParams(PoolingTask.EMBED, dimensions=3)}, "ask for 2, 4"),
        ({"pooling": PoolingParams(PoolingTask.EMBED, b"\0\1")}, "2 token type ids for 1 tokens"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    core: EngineCore, fields: dict[str, object], problem: str
) -> None:
    refused = core.submit(PEER, submit(1, [1], **fields))
    assert refused is not None
    assert problem in refused.reason
    assert not refused.retry
    assert core.is_empty


def test_a_model_that_generates_refuses_pooled_requests(executor: SummingExecutor) -> None:
    info = msgspec.structs.replace(INFO, pooling=None)
    core = EngineCore(EngineConfig(), info, executor, num_blocks=16, max_model_len=16)
    refused = core.submit(PEER, submit(1, [1]))
    assert refused is not None
    assert "--runner pooling" in refused.reason
