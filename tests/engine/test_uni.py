"""The in-process executor, from loading to a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.checkpoint import CheckpointError, read_model_info
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.executor import make_executor
from engine.executor.uni import CPU_KV_LIMIT
from engine.sampling import SamplingParams
from engine.step import Admit, Step
from tests.engine.tiny_models import VOCAB, make_tiny_model


def test_load_allocate_execute_close(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "qwen3_moe")
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype="bfloat16"),
        cache=CacheConfig(block_size=8),
        device=DeviceConfig(device="cpu"),
    )
    phases: list[str] = []
    executor = make_executor(config, read_model_info(directory), 1)
    facts = executor.load(phases.append)
    assert torch.get_num_threads() == 1
    assert phases
    assert (facts.architecture, facts.dtype, facts.device) == ("Qwen3MoeForCausalLM", "bfloat16", "cpu")
    assert (facts.vocab_size, facts.weight_bytes) == (VOCAB, 2 * facts.num_parameters)
    assert (facts.kv.num_layers, facts.kv.bytes_per_token) == (2, 2 * 2 * (16 + 16) * 2)
    assert 0 < executor.free_kv_memory() <= CPU_KV_LIMIT
    executor.allocate(4)
    greedy = SamplingParams(temperature=0.0)
    step = Step([Admit(0, [5, 6, 7], 3, greedy, 0, ())], [0], [0], [3], {0: [2]})
    first = executor.execute(step)
    assert executor.execute(step) == first
    token = first.tokens[0]
    assert token is not None
    assert 0 <= token < VOCAB
    assert len(executor.execute(Step([], [0], [3], [1])).tokens) == 1
    executor.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path, "llama")
    config = EngineConfig(model=ModelConfig(model=str(directory)), device=DeviceConfig(device="cuda"))
    with pytest.raises(CheckpointError, match="torch finds no CUDA device"):
        make_executor(config, read_model_info(directory), 1).load(print)


def test_an_attention_backend_that_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    directory = make_tiny_model(tmp_path, "llama")
    config = EngineConfig(
        model=ModelConfig(model=str(directory)),
        device=DeviceConfig(device="cpu", attention_backend="TRITON_ATTN"),
    )
    with pytest.raises(CheckpointError, match=r"TRITON_ATTN cannot serve: .*or use TORCH_SDPA"):
        make_executor(config, read_model_info(directory), 1).load(lambda phase: None)
    with pytest.raises(ValueError, match="--enforce-eager captures nothing"):
        DeviceConfig(enforce_eager=True, cudagraph_capture_sizes=(1, 2))
