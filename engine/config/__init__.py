"""Settings of an instance, from which flags and YAML keys are made (no torch)."""

from engine.config.cache import CacheConfig
from engine.config.device import DeviceConfig
from engine.config.instance import EngineConfig, InstanceConfig
from engine.config.model import QUANTIZED_MODELS, SHIPPED_HEAD, SHIPPED_MODEL, ModelConfig
from engine.config.nodes import NodesConfig, check_keys
from engine.config.scheduler import SchedulerConfig

__all__ = [
    "QUANTIZED_MODELS",
    "SHIPPED_HEAD",
    "SHIPPED_MODEL",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "InstanceConfig",
    "ModelConfig",
    "NodesConfig",
    "SchedulerConfig",
    "check_keys",
]
