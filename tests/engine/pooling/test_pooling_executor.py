"""A pooling model behind the engine core: mixed requests, bits of each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from coordinator.pooled_model import PoolingTask
from engine.config import EngineConfig, ModelConfig, SchedulerConfig
from engine.core import EngineCore
from engine.executor import make_executor
from engine.messages import FinishReason, Submit
from engine.pooling.flags import for_pooling
from engine.pooling.pooling_executor import PoolingExecutor
from engine.pooling_params import PoolingParams
from engine.sampling import SamplingParams
from engine.settings import adopt, resolve
from tests.engine.pooling.shapes import add_sentence_files, make_checkpoint

PEER = b"router"


class Pooling:
    """An engine core with a pooling model, as an instance makes it."""

    def __init__(self, directory: Path) -> None:
        config = EngineConfig(
            model=ModelConfig(model=str(directory)),
            scheduler=SchedulerConfig(max_num_batched_tokens=600, max_num_seqs=16),
        )
        settings = resolve(config, 1)[1]
        self.config = adopt(config, settings)
        info = resolve(self.config, 1)[0]
        assert info.pooling == settings.pooling
        self.executor = make_executor(self.config, info, torch.get_num_threads())
        assert isinstance(self.executor, PoolingExecutor)
        self.executor.load(lambda phase: None)
        self.core = EngineCore(
            self.config, info, self.executor, num_blocks=1000, max_model_len=info.context_length
        )
        self._number = 0

    def ask(self, prompts: list[list[int]]) -> list[Any]:
        """Answers to prompts that come at once; each must come exactly once."""
        first = self._number + 1
        for ids in prompts:
            self._number += 1
            params = PoolingParams(PoolingTask.EMBED)
            submit = Submit(self._number, "r", ids, SamplingParams(), 0, pooling=params)
            assert self.core.submit(PEER, submit) is None
        answers: dict[int, Any] = {}
        while self.core.has_work:
            for delta in self.core.step()[PEER]:
                assert delta.request not in answers
                assert delta.finish_reason in (FinishReason.STOP, FinishReason.ERROR)
                found = delta.pooled
                answers[delta.request] = found and np.frombuffer(found.values, np.float32).reshape(
                    found.shape
                )
        return [answers[first + index] for index in range(len(prompts))]


def test_requests_of_all_lengths_have_the_bits_of_each_alone(tmp_path: Path) -> None:
    pooling = Pooling(make_checkpoint(tmp_path, "roberta"))
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, 128, length).tolist() for length in (512, 1, 77, 300, 16, 17, 450, 2, 33)]
    together = pooling.ask(prompts)
    steps = pooling.core.scheduler.counters().steps
    assert steps < len(prompts)
    for ids, found in zip(prompts, together, strict=True):
        assert np.array_equal(found, pooling.ask([ids])[0])
    assert pooling.core.is_empty


def test_weights_that_make_nan_fail_each_request_and_are_counted(tmp_path: Path) -> None:
    pooling = Pooling(make_checkpoint(tmp_path, "bert"))
    model: Any = pooling.executor._model  # type: ignore[attr-defined]
    with torch.no_grad():
        model._base.embeddings.word_embeddings.weight[9] = float("nan")
    bad, good = pooling.ask([[5, 9, 6], [5, 6]])
    assert bad is None
    assert np.isfinite(good).all()
    assert pooling.core.scheduler.counters().not_finite == 1


def test_other_dense_layers_are_other_weights(tmp_path: Path) -> None:
    digests = set()
    for number in range(3):
        directory = make_checkpoint(tmp_path / str(number), "bert")
        if number:
            torch.manual_seed(number)
            add_sentence_files(directory, "cls", normalizes=True, dense=24)
        (arithmetic,) = Pooling(directory).executor.arithmetic()
        digests.add(arithmetic.weights)
    assert len(digests) == 3


def test_a_mesh_of_models_that_write_text_turns_detection_off() -> None:
    assert for_pooling(EngineConfig(), None).pooling.runner == "generate"


def test_a_task_of_another_model_is_refused_with_the_right_endpoint(tmp_path: Path) -> None:
    pooling = Pooling(make_checkpoint(tmp_path, "bert"))
    params = PoolingParams(PoolingTask.CLASSIFY)
    refused = pooling.core.submit(PEER, Submit(1, "r", [4], SamplingParams(), 0, pooling=params))
    assert refused is not None
    assert "POST /v1/embeddings" in refused.reason
