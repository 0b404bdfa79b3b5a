"""Instances that join a mesh without ``-dp``, as those do that a scale command starts.

Each setting in which instances must agree is either taken from the mesh, or does not depend on the number of
instances. Tests mirror :data:`coordinator.membership.admission.AGREED`, setting by setting.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from coordinator.membership.admission import AGREED, NEEDS_SIZE, ONLY_SPREAD, differences_of, problem_with
from coordinator.messages import Register, Settings
from coordinator.pooled_model import PooledModel, PoolingTask
from engine.config import SHIPPED_MODEL, CacheConfig, DeviceConfig, EngineConfig, ModelConfig
from engine.config.lora import LoraConfig
from engine.settings import adopt, resolve

EPLB = '{"window_size": 100, "step_interval": 400, "num_redundant_experts": 3, "log_balancedness": true}'

AGREES: dict[str, tuple[dict[str, Any], object]] = {
    "fingerprint": ({}, "another"),
    "served_model_name": ({"model": {"served_model_name": ("a", "b")}}, ("c",)),
    "dtype": ({"model": {"dtype": "float32"}}, "bfloat16"),
    "quantization": ({"model": {"quantization": "int8"}}, ""),
    "max_model_len": ({"model": {"max_model_len": 100}}, 99),
    "block_size": ({"cache": {"block_size": 8}}, 16),
    "kv_cache_dtype": ({"cache": {"kv_cache_dtype": "int8"}}, "auto"),
    "vocab_size": ({}, 7),
    "tensor_parallel_size": ({"device": {"tensor_parallel_size": 2}}, 1),
    "pipeline_parallel_size": ({"device": {"pipeline_parallel_size": 2}}, 1),
    "pipeline_split": ({"device": {"pipeline_parallel_size": 2, "pipeline_split": "2, 4"}}, "3,3"),
    "enable_expert_parallel": ({}, None),
    "expert_placement_strategy": ({"device": {"expert_placement_strategy": "round_robin"}}, "linear"),
    "balancing": ({"device": {"enable_eplb": True, "eplb_config": EPLB, "eplb_survive": 1}}, None),
    "all2all_backend": ({"device": {"all2all_backend": "all_to_all"}}, "auto"),
    "mesh_transport": ({"device": {"mesh_transport": "gloo"}}, "auto"),
    "data_parallel_size": ({}, None),
    "lora": ({"lora": {"enable_lora": True, "max_loras": 3}}, None),
    "pooling": ({}, PooledModel(tasks=(PoolingTask.EMBED,), dimensions=8)),
}
"""For each setting: flags that give it a value, and another value."""
SIZE = 2


def config_of(flags: dict[str, dict[str, Any]], *, spread: bool | None) -> EngineConfig:
    device = {"enable_expert_parallel": spread, **flags.get("device", {})}
    return EngineConfig(
        model=ModelConfig(model=SHIPPED_MODEL, **flags.get("model", {})),
        cache=CacheConfig(**flags.get("cache", {})),
        device=DeviceConfig(**device),
        lora=LoraConfig(**flags.get("lora", {})),
    )


def problem(newcomer: Settings, mesh: Settings, size: int | None = None) -> str | None:
    """Why an instance with these settings may not join a mesh that began with two."""
    register = Register(
        instance="new", rank=SIZE if size is None else 1, size=size, settings=newcomer, host="h", pid=1
    )
    return problem_with(register, SIZE, mesh, range(SIZE))


def test_the_table_has_every_setting_in_which_instances_must_agree() -> None:
    assert AGREES.keys() == AGREED.keys()
    assert AGREED.keys() <= set(Settings.__struct_fields__)
    assert AGREED.keys() > (NEEDS_SIZE | ONLY_SPREAD)


@pytest.mark.parametrize("name", AGREES)
def test_an_instance_of_the_same_flags_joins_whatever_the_number_of_instances_is(name: str) -> None:
    flags, _ = AGREES[name]
    for spread in (True, None):
        config = config_of(flags, spread=spread)
        _, mesh = resolve(config, SIZE)
        _, newcomer = resolve(config)
        assert problem(newcomer, mesh) is None
        found = differences_of(newcomer, mesh, "the mesh")
        assert bool(found) is mesh.enable_expert_parallel, "what depends on the size is unknown, and no more"
        settings = resolve(adopt(config, mesh), mesh.data_parallel_size)[1]
        assert differences_of(settings, mesh, "the mesh") == []
        assert adopt(config, mesh).device.split == config.device.split


@pytest.mark.parametrize("name", sorted(AGREES.keys() - NEEDS_SIZE))
def test_an_instance_of_other_flags_is_refused_with_the_setting(name: str) -> None:
    flags, other = AGREES[name]
    _, mesh = resolve(config_of(flags, spread=True), SIZE)
    assert mesh.enable_expert_parallel
    _, newcomer = resolve(config_of(flags, spread=True))
    assert getattr(newcomer, name) == getattr(mesh, name) != other
    found = problem(msgspec.structs.replace(newcomer, **{name: other}), mesh)
    assert found is not None
    assert AGREED[name] in found


@pytest.mark.parametrize("name", sorted(NEEDS_SIZE))
def test_what_only_the_mesh_knows_is_compared_where_the_size_is_given(name: str) -> None:
    _, mesh = resolve(config_of({}, spread=True), SIZE)
    found = problem(msgspec.structs.replace(mesh, **{name: 0}), mesh, SIZE)
    assert found is not None
    assert AGREED[name] in found


@pytest.mark.parametrize("name", sorted(ONLY_SPREAD))
def test_what_spread_experts_need_does_not_matter_without_them(name: str) -> None:
    flags, other = AGREES[name]
    apart = {"tensor_parallel_size": 2, **flags["device"]}  # sharded instances spread them only with -ep
    _, mesh = resolve(config_of({"device": apart}, spread=None), SIZE)
    assert not mesh.enable_expert_parallel
    assert problem(msgspec.structs.replace(mesh, **{name: other}), mesh, SIZE) is None
    learns = adopt(EngineConfig(), mesh).device
    assert (learns.eplb, learns.split) == (None, None)


def test_a_difference_in_the_balancing_is_readable() -> None:
    flags, _ = AGREES["balancing"]
    _, mesh = resolve(config_of(flags, spread=True), SIZE)
    found = problem(msgspec.structs.replace(mesh, balancing=None), mesh)
    assert found == (
        "this instance differs from the mesh: --enable-eplb with --eplb-config and --eplb-survive is not given, "
        "the mesh has window_size 100, windows 4, num_redundant 3, survive 1, log_every 1"
    )
