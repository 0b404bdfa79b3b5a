"""Executors of :mod:`engine.executor_contract`: one file per way of running workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from coordinator.rpc.keys import link_key
from engine.executor_contract import STARTUP_TIMEOUT
from engine.host.cores import Share
from parallel.links.keys import LinkKey

if TYPE_CHECKING:
    from coordinator.messages import Settings
    from coordinator.rpc.keys import MeshKeys
    from engine.config import EngineConfig
    from engine.executor.ends import Crew
    from engine.executor_contract import Executor
    from engine.model.checkpoint import ModelInfo


def make_executor(
    config: EngineConfig,
    info: ModelInfo,
    threads: int,
    place: tuple[int, int] | None = None,
    *,
    cores: Sequence[int] = (),
    rank: int = 0,
    settings: Settings | None = None,
    startup_timeout: float = STARTUP_TIMEOUT,
    keys: MeshKeys | None = None,
) -> Executor:
    """Make the executor that the settings ask for.

    Computing in this process loads torch, so call it in the one that computes.

    Args:
        threads: of each worker.
        place: (rank, size) among the instances over which experts are spread, if they are.
        cores: those that this instance shares with no other, if any.
        rank: of the instance.
        settings: what workers on other hosts must agree on; with ``--nnodes`` only.
        startup_timeout: seconds to wait for those hosts, for room in a Ray cluster, or for a word from
            workers that load.
        keys: of the mesh; other hosts must have them, too.

    Raises:
        engine.executor_contract.CannotStart: Ray is asked for and missing.
    """
    if info.pooling is not None:
        from engine.pooling.pooling_executor import PoolingExecutor

        return PoolingExecutor(config, info, threads)
    if config.device.uses_processes:
        share = Share(threads, tuple(cores))
        if place is not None:
            from engine.executor.ends import LocalCrew
            from engine.executor.spread_mp import SpreadMpExecutor

            spread_crew = LocalCrew(worker_names(config, rank), threads, SpreadMpExecutor.num_channels)
            key = link_key(keys) if keys is not None else None
            return SpreadMpExecutor(config, info, spread_crew, share, place, startup_timeout, key)
        from engine.executor.mp import MpExecutor

        crew = _make_crew(config, threads, rank, settings, startup_timeout, keys)
        # Its groups are its own: a key of theirs, so that the mesh's goes to no other host, nor through Ray.
        key = LinkKey.generate() if keys is not None else None
        return MpExecutor(config, info, crew, share, startup_timeout, key)
    from engine.executor.uni import UniExecutor

    return UniExecutor(config, info, threads, place)


def _make_crew(
    config: EngineConfig,
    threads: int,
    rank: int,
    settings: Settings | None,
    timeout: float,
    keys: MeshKeys | None,
) -> Crew:
    names = worker_names(config, rank)
    if config.device.distributed_executor_backend == "ray":
        from engine.executor.cluster import why_not
        from engine.executor_contract import CannotStart

        missing = why_not()
        if missing:
            raise CannotStart(f"--distributed-executor-backend ray: {missing}")
        from engine.executor.cluster.crew import RayCrew

        assert settings is not None
        return RayCrew(config, settings, names, timeout)
    if config.nodes.nnodes > 1:
        from engine.executor.nodes.driver import NodeCrew

        assert settings is not None
        return NodeCrew(config, settings, names, threads, keys=keys, timeout=timeout)
    from engine.executor.ends import LocalCrew

    return LocalCrew(names, threads)


def worker_names(config: EngineConfig, rank: int) -> list[str]:
    """Names of all workers of an instance, by stage, then rank."""
    stages, ranks = config.device.pipeline_parallel_size, config.device.tensor_parallel_size
    return [f"Worker_{rank}_PP{stage}_TP{each}" for stage in range(stages) for each in range(ranks)]
