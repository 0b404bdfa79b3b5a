"""Who computes an instance's steps: the contract in ``base``, one file per way of running workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.checkpoint import ModelInfo
    from engine.config import EngineConfig
    from engine.executor.base import Executor


def make_executor(
    config: EngineConfig, info: ModelInfo, threads: int, place: tuple[int, int] | None = None
) -> Executor:
    """The executor that the settings ask for. Loads torch, so call it in the process that computes.
    ``place`` is (rank, size) among the instances over which experts are spread, if they are."""
    from engine.executor.uni import UniExecutor

    return UniExecutor(config, info, threads, place)
