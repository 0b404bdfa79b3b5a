"""Families in all formats over ranks, stages and instances: the answers of one worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.executor.uni import UniExecutor
from engine.model.checkpoint import read_model_info
from tests.engine.groups.test_lockstep_engine import Layout as Instances
from tests.engine.groups.test_lockstep_engine import run_instances
from tests.engine.model.quantization.writers import KINDS, MXFP4, write_quantized
from tests.engine.model.sharding.test_sharding import LAYOUTS, NUM_IN_TABLE, greedy, run, settings, shards
from tests.engine.shard_threads import ThreadedShards
from tests.engine.tiny_models import make_tiny_model

BLOCK_SIZE = 16
MIXTURES = ["qwen3_moe", "deepseek_v3", "gpt_oss"]
FAMILIES = ["llama", "qwen3", *MIXTURES]
ROUNDED = [kind for kind in KINDS if kind.startswith("w8a8")]
EACH_PUSH = [("qwen3_moe", "w8a8 per channel", "tp2"), ("gpt_oss", MXFP4, "tp2")]


def kinds_of(family: str) -> list[str]:
    """Layouts of a family's checkpoints.

    GPT-OSS's experts are one tensor for a layer, which only MXFP4 knows: in the others its attention is
    quantised.
    """
    return [*KINDS, MXFP4] if family == "gpt_oss" else [*KINDS]


def cases(families: list[str], layouts: tuple[str, ...]) -> list[Any]:
    """All of them at night, and few for each push."""
    every = [(family, kind, each) for family in families for kind in kinds_of(family) for each in layouts]
    return [pytest.param(*one, marks=() if one in EACH_PUSH else pytest.mark.nightly) for one in every]


def make(directory: Path, family: str, kind: str) -> tuple[Path, Path]:
    """A quantised model, and one with its answers: widened where inputs are not rounded."""
    plain = make_tiny_model(directory / "plain", family, intermediate_size=128)
    quantized, wide = directory / "quantized", directory / "wide"
    write_quantized(plain, kind, quantized, wide)
    return quantized, quantized if kind in ROUNDED else wide


def alone(directory: Path) -> list[list[int]]:
    """Ids from one worker."""
    executor = UniExecutor(settings(directory, block_size=BLOCK_SIZE), read_model_info(directory), 1)
    executor.load(lambda _phase: None)
    params = greedy()[:NUM_IN_TABLE]
    return run(executor, directory, params, num_blocks=9, budget=24, block_size=BLOCK_SIZE)[0]


@pytest.mark.parametrize(("family", "kind", "layout"), cases(FAMILIES, ("dp1", "tp2", "pp2")))
def test_answers_are_those_of_one_worker(family: str, kind: str, layout: str, tmp_path: Path) -> None:
    """Where inputs are not rounded, it is one of the widened model."""
    quantized, wide = make(tmp_path, family, kind)
    expected = alone(wide)
    if layout == "dp1":
        assert alone(quantized) == expected
        return
    executor = shards(quantized, LAYOUTS[layout], BLOCK_SIZE)
    try:
        params = greedy()[:NUM_IN_TABLE]
        assert run(executor, quantized, params, num_blocks=9, budget=24, block_size=BLOCK_SIZE)[0] == expected
    finally:
        executor.close()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "kind"), [(family, kind) for family in MIXTURES for kind in kinds_of(family)]
)
def test_answers_with_spread_experts_are_those_of_one_instance(
    family: str, kind: str, tmp_path: Path
) -> None:
    quantized, wide = make(tmp_path, family, kind)
    expected, _ = run_instances(wide, Instances(1, block_size=BLOCK_SIZE))
    assert run_instances(quantized, Instances(2, block_size=BLOCK_SIZE))[0] == expected


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
