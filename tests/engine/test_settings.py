"""Checks of -tp and -pp before any process is started."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from coordinator.settings.flags import changed
from engine.config import (
    SHIPPED_MODEL,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine.config.scheduler import TAIL_DIVISOR
from engine.model.checkpoint import CheckpointError
from engine.settings import adopt, ignored_when_joining, resolve

TP, PP = "tensor_parallel_size", "pipeline_parallel_size"


@pytest.mark.parametrize(
    ("device", "asked", "spread"),
    [("cpu", None, True), ("cuda", None, False), ("cuda", True, True), ("cuda", False, False)],
)
def test_on_gpus_experts_are_spread_only_if_asked(device: Any, asked: bool | None, spread: bool) -> None:
    """Each layer's tokens would travel, which costs more there than reading all experts."""
    config = EngineConfig(device=DeviceConfig(device=device, enable_expert_parallel=asked))
    assert resolve(config, 2)[1].enable_expert_parallel is spread


def test_more_copies_than_instances_can_hold_are_named(caplog: pytest.LogCaptureFixture) -> None:
    for count, is_named in ((8, False), (9, True)):
        caplog.clear()
        eplb = DeviceConfig(enable_eplb=True, eplb_config=f'{{"num_redundant_experts": {count}}}')
        settings = resolve(EngineConfig(device=eplb), 2)[1]
        assert settings.balancing is not None
        assert ("num_redundant_experts 9 means 8 until instances join" in caplog.text) is is_named


def test_experts_reach_each_other_over_nccl_on_gpus_only() -> None:
    asked: dict[str, Any] = {"enable_expert_parallel": True, "all2all_backend": "nccl"}
    with pytest.raises(CheckpointError, match="--all2all-backend nccl needs a GPU for each instance"):
        resolve(EngineConfig(device=DeviceConfig(device="cpu", **asked)), 2)
    _, settings = resolve(EngineConfig(device=DeviceConfig(device="cuda", **asked)), 2)
    assert (settings.enable_expert_parallel, settings.all2all_backend) == (True, "nccl")


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ({TP: 4}, "6 attention heads and 2 KV heads cannot be divided by 4. Sizes that do: 1, 2, 6"),
        ({TP: 3}, "--tensor-parallel-size 3: Qwen3MoeForCausalLM: 6 attention heads and 2 KV heads"),
        ({PP: 7}, "7 pipeline stages are more than the 6 layers of the model: use at most 6"),
        ({PP: 2, "pipeline_split": "3,4"}, "the split 3,4 adds up to 7 layers, but the model has 6"),
    ],
)
def test_sizes_that_do_not_fit_the_model(device: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve(EngineConfig(device=DeviceConfig(**device)))  # type: ignore[arg-type]
    assert said in str(caught.value)


@pytest.mark.parametrize("device", [{TP: 2}, {TP: 6}, {PP: 6}, {TP: 2, PP: 3, "pipeline_split": "1,4,1"}])
def test_sizes_that_fit(device: dict[str, object]) -> None:
    _, settings = resolve(EngineConfig(device=DeviceConfig(**device)))  # type: ignore[arg-type]
    assert (settings.tensor_parallel_size, settings.pipeline_parallel_size) == (
        device.get(TP, 1),
        device.get(PP, 1),
    )
    assert not settings.enable_expert_parallel, "never on by itself"


def test_experts_are_spread_over_the_ranks_of_sharded_instances_if_asked() -> None:
    sharded = DeviceConfig(tensor_parallel_size=2, pipeline_parallel_size=2)
    assert not resolve(EngineConfig(device=sharded), 2)[1].enable_expert_parallel
    asked = msgspec.structs.replace(sharded, enable_expert_parallel=True)
    settings = resolve(EngineConfig(device=asked), 4)[1]
    assert (settings.enable_expert_parallel, settings.num_experts) == (True, 8)
    split = msgspec.structs.replace(asked, pipeline_split="2,4")
    settings = resolve(EngineConfig(device=split), 2)[1]
    assert settings.pipeline_split == "2,4", "a stage's experts are exchanged with the same stage elsewhere"
    assert adopt(EngineConfig(), settings).device.split == (2, 4)
    with pytest.raises(CheckpointError, match="8 experts cannot be spread over 10 ranks: use at most 8"):
        resolve(EngineConfig(device=asked), 5)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ({PP: 2, "pipeline_split": "3,3,3"}, "is for 3 stages, but --pipeline-parallel-size is 2"),
        ({PP: 2, "pipeline_split": "a"}, "'a' is no list of layers per stage: write it like 10,12,10"),
        ({PP: 2, "pipeline_split": "6,0"}, "none below 1"),
        ({TP: 2, PP: 2, "distributed_executor_backend": "uni"}, "uni runs one worker, -tp 2 -pp 2 needs 4"),
        ({"trace": ""}, "--trace '' names no file: give one, like trace.json"),
        ({"trace": "."}, "--trace '.' names no file"),
        ({"trace": "/"}, "--trace '/' names no file"),
    ],
)
def test_flags_that_make_no_sense(device: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        DeviceConfig(**device)  # type: ignore[arg-type]


def test_workers_and_micro_batches() -> None:
    one = DeviceConfig()
    assert (one.num_workers, one.micro_batches, one.uses_processes) == (1, 1, False)
    assert DeviceConfig(distributed_executor_backend="mp").uses_processes
    six = DeviceConfig(tensor_parallel_size=2, pipeline_parallel_size=3)
    assert (six.num_workers, six.micro_batches, six.uses_processes) == (6, 3, True)
    assert DeviceConfig(pipeline_parallel_size=2, pipeline_micro_batches=5).micro_batches == 5


def test_an_instance_that_joins_takes_the_sizes_of_the_mesh_or_says_why_not() -> None:
    _, settings = resolve(EngineConfig(device=DeviceConfig(tensor_parallel_size=2)))
    assert adopt(EngineConfig(), settings).device.tensor_parallel_size == 2
    uni = EngineConfig(device=DeviceConfig(distributed_executor_backend="uni"))
    with pytest.raises(CheckpointError, match="uni runs one worker"):
        adopt(uni, settings)


def test_what_the_mesh_overrules_was_given_in_vain() -> None:
    assert ignored_when_joining(EngineConfig()) == []
    given = EngineConfig(
        model=ModelConfig(dtype="float16", max_model_len=100, served_model_name=("a",)),
        cache=CacheConfig(block_size=8, kv_cache_dtype="int8"),
        scheduler=SchedulerConfig(
            max_num_seqs=3, max_num_batched_tokens=77, performance_mode="interactivity"
        ),
        device=DeviceConfig(
            tensor_parallel_size=2,
            pipeline_parallel_size=2,
            enable_expert_parallel=True,
            expert_placement_strategy="round_robin",
            all2all_backend="all_to_all",
            mesh_transport="gloo",
            collective_timeout=5.0,
        ),
    )
    kept = list(changed(adopt(given, resolve(EngineConfig())[1])))
    overruled = [
        {field.long_name, *field.names} for field, value in changed(given) if (field, value) not in kept
    ]
    ignored = ignored_when_joining(given)
    assert len(ignored) == len(overruled) == 14
    assert all(names & set(ignored) for names in overruled)


@pytest.mark.parametrize(
    ("device", "scheduler", "tokens"),
    [
        ("cpu", {}, 512),
        ("cuda", {}, 2048),
        ("cpu", {"max_num_seqs": 900}, 900),
        ("cuda", {"max_num_batched_tokens": 300}, 300),
    ],
)
def test_tokens_of_a_step(device: Any, scheduler: dict[str, int], tokens: int) -> None:
    config = EngineConfig(device=DeviceConfig(device=device), scheduler=SchedulerConfig(**scheduler))
    _, settings = resolve(config)
    assert settings.max_num_batched_tokens == tokens
    joins = EngineConfig(device=DeviceConfig(device=device))
    assert adopt(joins, settings).scheduler.token_budget() == tokens
    other: Any = "cuda" if device == "cpu" else "cpu"
    joins = EngineConfig(device=DeviceConfig(device=other))
    own = tokens if scheduler else {"cpu": 512, "cuda": 2048}[other]
    if scheduler != {"max_num_seqs": 900}:
        assert adopt(joins, settings).scheduler.token_budget() == own, "each takes what suits its device"


@pytest.mark.parametrize(
    ("device", "own", "tokens", "requests"),
    [
        ("cpu", {"max_num_batched_tokens": 64, "max_num_seqs": 8}, 64, 8),
        ("cpu", {}, 512, 128),
        ("cuda", {}, 2048, 128),
    ],
)
def test_what_fits_a_machine_an_instance_with_a_model_decides_for_itself(
    device: Any, own: dict[str, int], tokens: int, requests: int
) -> None:
    """The mesh's are for those who come without any settings."""
    mesh = SchedulerConfig(max_num_batched_tokens=900, max_num_seqs=30)
    _, settings = resolve(EngineConfig(scheduler=mesh))
    config = EngineConfig(
        model=ModelConfig(model=SHIPPED_MODEL),
        device=DeviceConfig(device=device),
        scheduler=SchedulerConfig(**own),
    )
    scheduler = adopt(config, settings).scheduler
    assert (scheduler.token_budget(), scheduler.most_requests()) == (tokens, requests)
    scheduler = adopt(EngineConfig(device=DeviceConfig(device=device)), settings).scheduler
    assert (scheduler.token_budget(), scheduler.most_requests()) == (900, 30)


@pytest.mark.parametrize("model", [None, SHIPPED_MODEL])
@pytest.mark.parametrize(
    ("own", "seconds"),
    [
        ({}, 0.15),
        ({"performance_mode": "interactivity"}, 0.05),
        ({"performance_mode": "throughput"}, None),
        ({"max_num_batched_tokens": 600}, None),
    ],
)
def test_prompts_beside_decodes_are_limited_in_time_unless_somebody_set_the_budget(
    model: str | None, own: dict[str, Any], seconds: float | None
) -> None:
    """Also on an instance that has its settings from the mesh."""
    config = EngineConfig(scheduler=SchedulerConfig(**own), device=DeviceConfig(device="cpu"))
    _, settings = resolve(config)
    joins = config if model else EngineConfig(device=DeviceConfig(device="cpu"))
    joins = msgspec.structs.replace(joins, model=ModelConfig(model=model))
    scheduler = adopt(joins, settings).scheduler
    assert scheduler.prompt_seconds_beside_decodes() == seconds
    assert scheduler.token_budget() == settings.max_num_batched_tokens
    assert (scheduler.largest_lone_chunk() == 0) == (seconds is None)


def test_throughput_has_larger_defaults_and_leaves_what_was_given() -> None:
    mode: dict[str, Any] = {"performance_mode": "throughput"}
    default = SchedulerConfig(**mode)
    assert (default.token_budget(), default.most_requests()) == (2048, 256)
    assert default.token_budget(has_gpu=True) == 4096
    assert default.prompt_tokens_beside_decodes() is None
    given = SchedulerConfig(max_num_seqs=128, **mode)
    assert (given.token_budget(), given.most_requests()) == (2048, 128)
    given = SchedulerConfig(max_num_batched_tokens=200, **mode)
    assert (given.token_budget(), given.most_requests()) == (200, 200)


@pytest.mark.parametrize("requests", [128, 500, 900, 1900, 3000])
def test_no_step_on_a_cpu_is_longer_than_memory_was_left_for(requests: int) -> None:
    scheduler = SchedulerConfig(max_num_seqs=requests)
    budget, most = scheduler.token_budget(), scheduler.largest_lone_chunk()
    assert max(budget, most) + budget // TAIL_DIVISOR <= scheduler.largest_step()
