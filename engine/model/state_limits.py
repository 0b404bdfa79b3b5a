"""Settings that a model with recurrent states changes or refuses (no torch)."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig
from engine.model.checkpoint import ModelInfo
from engine.model.errors import CheckpointError
from engine.states.grid import GRID


def fit_states(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """The settings for this model: with recurrent states, nothing moves between instances yet.

    A prefix goes on from keys and values *and* a state, so blocks alone are of no use to others.

    Raises:
        CheckpointError: a flag asks for what cannot be done with such a model.
    """
    if not info.has_states:
        return config
    try:
        cache = msgspec.structs.replace(config.cache, enable_kv_transfer=False)
        cache.__post_init__()
    except ValueError as error:
        flag = str(error).split(" ", 1)[0]
        raise CheckpointError(
            f"{info.architecture} has layers with a recurrent state, which is not moved or kept in "
            f"files: leave {flag} out"
        ) from error
    if GRID % config.cache.block_size:
        raise CheckpointError(
            f"{info.architecture} has a recurrent state, which is kept every {GRID} tokens: give a "
            f"--block-size that divides {GRID}, not {config.cache.block_size}"
        )
    return msgspec.structs.replace(config, cache=cache)
