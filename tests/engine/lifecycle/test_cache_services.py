"""Services around a cache on a pretended device: what moves, and what is left out."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from coordinator.config import MeshConfig
from engine.config import CacheConfig
from engine.core import EngineCore
from engine.inheritance.names import MEMORY_VARIABLE
from engine.kernels.core import library
from engine.lifecycle.cache_services import CacheServices, share_memory
from engine.numerics import numerics_of
from engine.settings import resolve
from tests.engine.copying_device import OnDevice, load_on_device
from tests.engine.invariance.answers import Instance, settings
from tests.engine.invariance.test_table import directory_of

pytestmark = pytest.mark.skipif(library.load() is None, reason="no AVX2, or no C++ compiler, here")


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Instance:
    return load_on_device(directory_of("llama", tmp_path_factory))


def test_caches_of_devices_are_not_inherited_and_the_log_says_so(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(MEMORY_VARIABLE, "/proc/self/fd/0")
    share_memory(instance.executor, "cuda:0")
    assert instance.executor.shared is None
    assert "--enable-kv-inheritance is not built for -tp, -pp and GPUs: nothing is inherited" in caplog.text


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_blocks_of_a_device_are_lent_filed_and_checked(
    instance: Instance, runs_ahead: bool, tmp_path: Path
) -> None:
    executor = instance.executor
    assert isinstance(executor, OnDevice)
    config = settings(Path(instance.info.directory))
    config = msgspec.structs.replace(config, cache=CacheConfig(kv_cache_dir=str(tmp_path / "kv")))
    info, shared = resolve(config, 1)
    executor.allocate(256)
    executor.runs_ahead, executor.in_flight = runs_ahead, 1 + runs_ahead
    core = EngineCore(config, info, executor, num_blocks=256, max_model_len=1024)
    numerics = numerics_of(shared, config.model, info.directory, executor.arithmetic())
    services = CacheServices(config, MeshConfig(), shared, numerics, 0, "127.0.0.1", None)
    services.start(core, executor, lambda: None)
    try:
        exchange = core.sharing.exchange
        assert exchange is not None
        assert exchange.is_open
        assert core.sharing.tier is not None
        assert exchange.spot_checks is not None
    finally:
        services.close()
        executor.runs_ahead, executor.in_flight = False, 1
