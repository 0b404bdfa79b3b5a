"""Settings that rule files of KV blocks out."""

from __future__ import annotations

import pytest

from engine.config import CacheConfig, DeviceConfig, EngineConfig

FILES = CacheConfig(kv_cache_dir="/tmp/kv")


@pytest.mark.parametrize("off", ["enable_prefix_caching", "enable_kv_transfer"])
def test_files_need_names_and_transfers(off: str) -> None:
    with pytest.raises(ValueError, match=r"--kv-cache-dir does nothing with --no-enable-.*: drop one"):
        CacheConfig(kv_cache_dir="/tmp/kv", **{off: False})


@pytest.mark.parametrize(
    "device",
    [
        DeviceConfig(tensor_parallel_size=2, distributed_executor_backend="ray"),
        DeviceConfig(device="cuda", tensor_parallel_size=2),
    ],
)
def test_files_are_not_built_for_workers_elsewhere_and_on_gpus(device: DeviceConfig) -> None:
    with pytest.raises(ValueError, match="--kv-cache-dir is not built for"):
        EngineConfig(cache=FILES, device=device)
    EngineConfig(device=device)
    EngineConfig(cache=FILES, device=DeviceConfig(tensor_parallel_size=2, pipeline_parallel_size=2))
    EngineConfig(cache=FILES, device=DeviceConfig(device="cuda"))
