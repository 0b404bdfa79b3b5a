"""Experts of instances that are sharded themselves: what each worker holds, and reads from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.config import EngineConfig, ModelConfig
from engine.model import module_reading
from engine.model.checkpoint import read_model_info
from engine.model.expert_weights import expert_modules, expert_parameters
from parallel.placement import assign_experts
from tests.engine.model.test_expert_weights import MOE_FAMILIES, counting
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import make_tiny_model

LAYERS = 4


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_each_worker_holds_and_reads_its_own_experts_only(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of two instances, of two stages and two ranks."""
    directory = make_tiny_model(tmp_path, family, layers=LAYERS)
    taken = counting(monkeypatch, module_reading)
    info = read_model_info(directory)
    config = EngineConfig(model=ModelConfig(model=str(directory), dtype="float32"))
    shards = ThreadedShards(config, info, tp=2, pp=2, place=(1, 2))
    shards.load(lambda _phase: None)
    models = [model.module for model in shards.facts()]
    held = [worker.executor.experts_held() for worker in shards.workers]
    shards.close()
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    placement = assign_experts(info.num_experts, 4)
    num_layers, num_bytes = 0, 0
    for number, model in enumerate(models):
        mine = placement.experts_of(2 + number % 2)
        (of_rank,) = held[number]
        assert of_rank
        assert all(of_layer == mine for of_layer in of_rank)
        for path, module in expert_modules(model).items():
            num_layers += 1
            assert module.num_experts == len(mine)
            for name, parameter in expert_parameters(module):
                assert torch.equal(parameter, getattr(whole.get_submodule(path), name)[mine])
                num_bytes += parameter.nbytes
    assert num_layers == 2 * len(expert_modules(whole)), "each layer on the two ranks of its stage"
    assert sum(taken) == num_bytes, "no byte of another expert, or of another stage's"
