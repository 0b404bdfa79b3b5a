"""Settings of a whole instance and of its process, with the checks across their parts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from coordinator.config import LogLevel, MeshConfig
from coordinator.settings.flags import flag
from engine.config.cache import CacheConfig
from engine.config.device import DeviceConfig
from engine.config.lora import LoraConfig
from engine.config.model import ModelConfig
from engine.config.nodes import NodesConfig, check_keys
from engine.config.pooling import PoolingConfig
from engine.config.scheduler import SchedulerConfig


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of one instance."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    device: DeviceConfig = DeviceConfig()
    lora: LoraConfig = LoraConfig()
    pooling: PoolingConfig = PoolingConfig()
    nodes: NodesConfig = NodesConfig()
    drain_timeout: Annotated[
        float,
        Meta(ge=0),
        flag(help="Seconds that a leaving instance gives its requests to finish before they move elsewhere."),
    ] = 120.0

    def __post_init__(self) -> None:
        device, nnodes = self.device, self.nodes.nnodes
        if self.lora.enable_lora and device.device == "cuda":
            raise ValueError("--enable-lora is not built for GPUs: leave it out, or compute on the CPU")
        is_elsewhere = nnodes > 1 or device.distributed_executor_backend == "ray"
        on_gpus = device.device == "cuda" and device.num_workers > 1
        if self.cache.kv_cache_dir is not None and (is_elsewhere or on_gpus):
            what = "workers on other hosts (--nnodes, ray)" if is_elsewhere else "workers on GPUs (-tp, -pp)"
            raise ValueError(f"--kv-cache-dir is not built for {what}: drop it")
        if self.cache.kv_codes is not None and device.attention_backend == "TRITON_ATTN":
            raise ValueError(
                f"--attention-backend TRITON_ATTN reads no {self.cache.kv_codes} KV cache: drop it, or "
                "--kv-cache-dtype"
            )
        if nnodes > 1 and device.distributed_executor_backend == "ray":
            raise ValueError(
                "--nnodes with --distributed-executor-backend ray: Ray knows its nodes, drop --nnodes"
            )
        if nnodes > 1 and device.distributed_executor_backend == "uni":
            raise ValueError(
                "--nnodes with --distributed-executor-backend uni: use mp, or leave the flag out"
            )
        if device.num_workers % nnodes:
            raise ValueError(
                f"--nnodes {nnodes}: the {device.num_workers} workers of -tp "
                f"{device.tensor_parallel_size} -pp {device.pipeline_parallel_size} cannot be spread "
                "evenly. Numbers of hosts that can: "
                + ", ".join(str(n) for n in range(1, device.num_workers + 1) if device.num_workers % n == 0)
            )
        if self.workers_elsewhere and device.enable_expert_parallel:
            raise ValueError(
                "-ep needs all workers of an instance on one host: drop --nnodes, and --distributed-executor-"
                "backend ray"
            )

    @property
    def workers_elsewhere(self) -> bool:
        """Whether workers of the instance may run on other hosts."""
        return self.nodes.nnodes > 1 or self.device.distributed_executor_backend == "ray"

    @property
    def num_local_workers(self) -> int:
        """Number of workers that the instance has on each of its hosts; 0: Ray decides."""
        if self.device.distributed_executor_backend == "ray":
            return 0
        return self.device.num_workers // self.nodes.nnodes


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The process of one instance, or of its workers on another host."""

    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = EngineConfig()
    log_level: LogLevel = "info"

    def __post_init__(self) -> None:
        check_keys(self.mesh, self.engine.nodes)
