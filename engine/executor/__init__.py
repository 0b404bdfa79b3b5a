"""Who computes an instance's steps: the contract in ``base``, one file per way of running workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.checkpoint import ModelInfo
    from engine.config import EngineConfig
    from engine.executor.base import Executor


def make_executor(
    config: EngineConfig,
    info: ModelInfo,
    threads: int,
    place: tuple[int, int] | None = None,
    *,
    cores: Sequence[int] = (),
    rank: int = 0,
) -> Executor:
    """The executor that the settings ask for. Computing in this process loads torch, so call it in the one
    that computes.

    Args:
        threads: of each worker.
        place: (rank, size) among the instances over which experts are spread, if they are.
        cores: those that this instance shares with no other, if any.
        rank: of the instance.
    """
    if config.device.uses_processes:
        if place is not None:
            from engine.executor.spread_mp import SpreadMpExecutor

            return SpreadMpExecutor(config, info, threads, cores, rank, place)
        from engine.executor.mp import MpExecutor

        return MpExecutor(config, info, threads, cores, rank)
    from engine.executor.uni import UniExecutor

    return UniExecutor(config, info, threads, place)
