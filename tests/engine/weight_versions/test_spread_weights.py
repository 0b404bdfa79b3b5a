"""New weights of an instance that holds some experts of each layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AttentionInterface

from engine.attention.base import IMPLEMENTATION, paged_attention
from engine.config import ModelConfig
from engine.model.checkpoint import read_model_info
from engine.model.expert_change import HeldExperts
from engine.model.expert_weights import ExpertShare, expert_modules
from engine.model.sharding.shard import WHOLE
from engine.model.tensors_again import read_again
from engine.model.weight_files import MAPPED
from engine.weight_versions.spread_weights import SpreadWeights
from parallel.placement import assign_experts
from tests.engine.groups.test_lockstep_engine import directory
from tests.engine.model.test_expert_change import PLENTY
from tests.engine.model.test_expert_weights import load
from tests.engine.weight_versions.made import trained

__all__ = ["directory"]  # a fixture


@pytest.fixture(scope="module")
def newer(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(directory, tmp_path_factory.mktemp("newer") / "weights")


def assert_holds(
    model: Any, weights: Path, experts: Sequence[Sequence[int]], dtype: torch.dtype = torch.float32
) -> None:
    """Each layer has these experts of these weights."""
    whole = transformers.AutoModelForCausalLM.from_pretrained(weights, dtype=dtype)
    for (path, module), of_layer in zip(expert_modules(model).items(), experts, strict=True):
        assert module.num_experts == len(of_layer)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, getattr(whole.get_submodule(path), name)[list(of_layer)])


def read(model: Any, held: HeldExperts, old: Path, new: Path) -> SpreadWeights:
    """Read the experts that are held of another version."""
    info = read_model_info(old)
    spread = SpreadWeights(model, held, info.num_experts, new)
    AttentionInterface.register(IMPLEMENTATION, paged_attention)
    settings = ModelConfig(model=str(old), dtype="float32")
    module = read_again(info, settings, torch.float32, WHOLE, new, MAPPED, spread.share)
    rest = spread.take(dict(module.named_parameters()), None, lambda: False)
    assert rest
    assert not any(".experts." in name for name in rest)
    return spread


@pytest.mark.parametrize("is_balanced", [False, True])
def test_held_experts_change_with_the_version(directory: Path, newer: Path, is_balanced: bool) -> None:
    num_experts = read_model_info(directory).num_experts
    model = load(directory, ExpertShare(assign_experts(num_experts, 2), 0))
    held = HeldExperts(model, directory, range(num_experts // 2))
    before: list[list[int]] = [list(each) for each in held.experts]
    if is_balanced:  # layers hold different ones
        before[-1] = [0, num_experts - 1]
        held.prepare(before, PLENTY)
        held.install(before, lambda: PLENTY)
    spread = read(model, held, directory, newer)
    assert_holds(model, directory, before)
    other = [[1, num_experts - 1] for _ in before]
    held.prepare(other, PLENTY)  # of the old version, for a group that is not entered
    assert held.is_prepared(other)
    asked = itertools.count()

    def switch_meanwhile() -> bool:
        if next(asked) == 1:  # the first question comes before anything is read
            spread.switch("other")
        return False

    held.prepare(other, PLENTY, switch_meanwhile)
    assert next(asked) > 1
    assert_holds(model, newer, before)
    assert not held.is_prepared(other), "what was read of the old version is void"
    held.install(other, lambda: PLENTY)
    assert_holds(model, newer, other)
