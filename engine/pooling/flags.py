"""Flags of instances with a pooling model: refused ones, and those set for it (pure)."""

from __future__ import annotations

import msgspec

from coordinator.pooled_model import PooledModel
from engine.config import EngineConfig
from engine.config.pooling import PoolingConfig
from engine.host.cores import has_gpu
from engine.model.errors import CheckpointError

QUANTIZATIONS = ("int8", "int8_per_channel_weight_only")
"""What ``--quantization`` may name with a pooling model."""


def check_flags(config: EngineConfig) -> None:
    """Refuse flags that a pooling model cannot have.

    Raises:
        CheckpointError: one is given.
    """
    device, name, reads = config.device, config.model.quantization, config.model.reads_weights
    given = {
        "-tp": device.tensor_parallel_size > 1,
        "-pp": device.pipeline_parallel_size > 1,
        "--nnodes and ray": config.workers_elsewhere,
        "--enable-lora": config.lora.enable_lora,
        "--speculative-config": config.scheduler.speculative is not None,
        f"--quantization {name}": name is not None and (name not in QUANTIZATIONS or not reads),
        "--kv-cache-dir": config.cache.kv_cache_dir is not None,
    }
    if named := [name for name, was_given in given.items() if was_given]:
        raise CheckpointError(f"a pooling model is computed without {', '.join(named)}: leave it out")
    if has_gpu(device):
        raise CheckpointError("pooling models are computed on CPUs: pass --device cpu")


def for_pooling(config: EngineConfig, model: PooledModel | None) -> EngineConfig:
    """Settings of an instance with what a pooling model of the mesh asks for.

    A whole input fits one step, and no part of it is kept for others.
    """
    if model is None:
        return msgspec.structs.replace(config, pooling=PoolingConfig(runner="generate"))
    longest = config.model.max_model_len or 0
    return msgspec.structs.replace(
        config,
        pooling=PoolingConfig(runner="pooling", convert=model.convert, pooler_config=_pooler(model)),
        cache=msgspec.structs.replace(config.cache, enable_prefix_caching=False),
        scheduler=msgspec.structs.replace(
            config.scheduler,
            enable_chunked_prefill=False,
            max_num_batched_tokens=max(config.scheduler.token_budget(), longest),
        ),
    )


def _pooler(model: PooledModel) -> str:
    """``--pooler-config`` that makes the same model of a checkpoint."""
    embeds = model.convert == "embed"
    asked = {
        "pooling_type": model.pooling,
        "normalize" if embeds else "use_activation": model.normalizes if embeds else model.activates,
        "matryoshka_dimensions": model.matryoshka or None,
        "is_matryoshka": model.cuts_anywhere,
        "answer_tokens": model.answer_tokens or None,
    }
    return msgspec.json.encode({name: value for name, value in asked.items() if value is not None}).decode()
