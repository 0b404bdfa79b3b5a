"""Settings that a model with recurrent states refuses (no torch)."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.model.checkpoint import ModelInfo
from engine.model.errors import CheckpointError
from engine.states.grid import GRID


def check_states(config: EngineConfig, info: ModelInfo) -> None:
    """Check the settings for a model that may have recurrent states.

    Raises:
        CheckpointError: blocks of keys and values do not end where states are kept.
    """
    if info.has_states and GRID % config.cache.block_size:
        raise CheckpointError(
            f"{info.architecture} has a recurrent state, which is kept every {GRID} tokens: give a "
            f"--block-size that divides {GRID}, not {config.cache.block_size}"
        )
