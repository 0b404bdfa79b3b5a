"""Families in all formats over ranks and stages: the answers of one worker."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.executor.uni import UniExecutor
from engine.model.checkpoint import read_model_info
from tests.engine.model.quantization.writers import KINDS, write_quantized
from tests.engine.model.test_sharding import LAYOUTS, NUM_IN_TABLE, greedy, run, settings, shards
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import make_tiny_model

BLOCK_SIZE = 16
FAMILIES = ["llama", "qwen3", "qwen3_moe", "deepseek_v3"]
ROUNDED = [kind for kind in KINDS if kind.startswith("w8a8")]
EACH_PUSH = ("qwen3_moe", "w8a8 per channel", "tp2")
CASES = [
    pytest.param(*case, marks=() if case == EACH_PUSH else pytest.mark.nightly)
    for case in ((family, kind, layout) for family in FAMILIES for kind in KINDS for layout in ("tp2", "pp2"))
]


def alone(directory: Path) -> list[list[int]]:
    """Ids from one worker."""
    executor = UniExecutor(settings(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    params = greedy()[:NUM_IN_TABLE]
    return run(executor, directory, params, num_blocks=9, budget=24, block_size=BLOCK_SIZE)[0]


@pytest.mark.parametrize(("family", "kind", "layout"), CASES)
def test_answers_are_those_of_one_worker(family: str, kind: str, layout: str, tmp_path: Path) -> None:
    """Where inputs are not rounded, it is one of the widened model."""
    plain = make_tiny_model(tmp_path / "plain", family, intermediate_size=128)
    quantized = tmp_path / "quantized"
    write_quantized(plain, kind, quantized, tmp_path / "wide")
    expected = alone(quantized if kind in ROUNDED else tmp_path / "wide")
    executor = shards(quantized, LAYOUTS[layout], BLOCK_SIZE)
    try:
        params = greedy()[:NUM_IN_TABLE]
        assert run(executor, quantized, params, num_blocks=9, budget=24, block_size=BLOCK_SIZE)[0] == expected
    finally:
        executor.close()


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_inputs_are_rounded_where_a_cut_model_is_compared(family: str, tmp_path: Path) -> None:
    """The layers that were not cut are computed in float32, whatever the data type."""
    plain = make_tiny_model(tmp_path / "plain", family, dtype=torch.bfloat16, intermediate_size=128)
    write_quantized(plain, "w8a8 per channel", tmp_path / "quantized", tmp_path / "wide")
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path / "quantized"), dtype="bfloat16"),
        cache=CacheConfig(block_size=BLOCK_SIZE),
    )
    executor = ThreadedShards(config, read_model_info(tmp_path / "quantized"), tp=2, pp=1)
    try:
        executor.load(lambda _phase: None)
    finally:
        executor.close()
