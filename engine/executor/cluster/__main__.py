"""``python -m engine.executor.cluster``: one instance on any node of a Ray cluster.

Started by ``serve --data-parallel-backend ray`` in place of the instance itself, of which it is the shadow:
it prints what the instance prints, passes signals on, and ends as the instance does. The instance registers
with the coordinator as any other, and its requests do not pass here. Ray ends it when this process ends.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.addresses import is_loopback
from coordinator.process import process
from coordinator.settings.flags import parse, to_argv
from engine.config import SHIPPED_MODEL, EngineConfig, InstanceConfig
from engine.executor.cluster import placement
from engine.executor.cluster.actors import instance_actor
from engine.executor.cluster.crew import GROUP_VARIABLE
from engine.executor.cluster.messages import InstanceProgress, Place, PlaceQuery, StartInstance
from engine.executor_contract import CannotStart
from engine.host.versions import other_versions
from parallel.rounds.segments import this_host

logger = logging.getLogger("engine.executor.cluster")

ANSWER_SECONDS = 30.0
"""Seconds in which a running actor answers."""


class Shadow:
    """The launcher's side of an instance elsewhere."""

    def __init__(self, config: InstanceConfig) -> None:
        self._config = config
        self._patience = process.PATIENCE * config.mesh.startup_timeout
        self._actor: Any = None
        self._signals: list[int] = []

    def run(self) -> int:
        """Run until the instance ends; returns its exit status.

        Raises:
            CannotStart: there is no cluster, or no room in it.
            RayError: the actor died.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        placement.connect()
        engine = self._config.engine
        name = f"lockstep-{uuid.uuid4().hex[:12]}"
        bundles = self._bundles(engine)
        group = placement.reserve(
            name, bundles, engine.nodes.ray_placement_strategy, self._patience, logger.info
        )
        try:
            is_alone = len(bundles) == 1 and engine.device.distributed_executor_backend != "ray"
            self._actor = instance_actor(
                num_cpus=bundles[0]["CPU"] if is_alone else 0,
                num_gpus=bundles[0].get("GPU", 0) if is_alone else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=0
                ),
            ).remote()
            self._check_place()
            self._tell(
                "run",
                msgspec.msgpack.encode(StartInstance(argv=self._argv(), environment=self._environment(name))),
            )
            return self._follow()
        finally:
            placement.release(group)

    def _bundles(self, engine: EngineConfig) -> list[placement.Resources]:
        """Resources of the instance: for each worker apart, or for all on one node."""
        each, workers = placement.worker_resources(engine), engine.device.num_workers
        if engine.device.distributed_executor_backend == "ray":
            return [each] * workers
        return [{kind: amount * workers for kind, amount in each.items()}]

    def _argv(self) -> list[str]:
        """Command line of the instance, with as many threads as CPUs were reserved."""
        engine = self._config.engine
        threads = max(engine.device.cpu_threads, engine.device.num_workers)
        device = msgspec.structs.replace(engine.device, cpu_threads=threads)
        engine = msgspec.structs.replace(engine, device=device)
        return to_argv(msgspec.structs.replace(self._config, engine=engine))

    def _environment(self, group: str) -> dict[str, str]:
        device = self._config.engine.device
        threads = str(max(1, device.cpu_threads // device.num_workers))
        names = {process.INSTANCE_VARIABLE: os.environ.get(process.INSTANCE_VARIABLE, "")}
        if device.distributed_executor_backend == "ray":
            names[GROUP_VARIABLE] = group
        return names | {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            placement.CONNECT_VARIABLE: ray.get_runtime_context().gcs_address,
        }

    def _check_place(self) -> None:
        """Refuse a node from which the instance could never reach the coordinator."""
        try:
            answer = ray.get(
                self._actor.look.remote(msgspec.msgpack.encode(PlaceQuery())),
                timeout=self._patience,
            )
        except GetTimeoutError as error:
            raise CannotStart("the actor did not start in time") from error
        place = msgspec.msgpack.decode(answer, type=Place)
        mesh = self._config.mesh
        where = f"the instance is on {place.host} ({place.address})"
        logger.info("%s, actor pid %d", where, place.pid)
        versions = other_versions(place.versions)
        if versions:
            raise CannotStart(f"{where}: {'; '.join(versions)}, where serve runs")
        if place.boot != this_host() and is_loopback(mesh.data_parallel_address):
            raise CannotStart(
                f"{where}, where the coordinator at {mesh.data_parallel_address} cannot be reached: "
                "give -dpa an address of this host, and --mesh-key-file"
            )

    def _tell(self, method: str, argument: object) -> None:
        ray.get(getattr(self._actor, method).remote(argument), timeout=ANSWER_SECONDS)

    def _follow(self) -> int:
        """Print what the instance prints, until it ends."""
        while True:
            while self._signals:
                self._tell("signal", self._signals.pop(0))
            answer = ray.get(self._actor.listen.remote(), timeout=ANSWER_SECONDS)
            progress = msgspec.msgpack.decode(answer, type=InstanceProgress)
            sys.stderr.buffer.write(progress.output)
            sys.stderr.buffer.flush()
            if progress.status is not None:
                return progress.status

    def _on_signal(self, number: int, _frame: object) -> None:
        if self._actor is None:
            raise CannotStart("stopped before the cluster had room")
        self._signals.append(number)


def _with_whole_paths(config: InstanceConfig) -> InstanceConfig:
    """The configuration with absolute paths, since actors run in a directory of Ray's.

    The model is served under the name that it was given.
    """
    model, key = config.engine.model, config.mesh.mesh_key_file
    if model.model not in (None, SHIPPED_MODEL) and Path(model.model).exists():
        names = model.served_model_name or (model.model,)
        model = msgspec.structs.replace(
            model, model=str(Path(model.model).absolute()), served_model_name=names
        )
    return msgspec.structs.replace(
        config,
        engine=msgspec.structs.replace(config.engine, model=model),
        mesh=msgspec.structs.replace(config.mesh, mesh_key_file=key and str(Path(key).absolute())),
    )


def main(argv: list[str] | None = None) -> int:
    config = parse(
        InstanceConfig,
        sys.argv[1:] if argv is None else argv,
        prog="python -m engine.executor.cluster",
        description="One instance of a Lockstep mesh, somewhere in a Ray cluster.",
    )
    rank = config.mesh.data_parallel_start_rank
    process.set_up(
        "Shadow" if rank is None else f"Shadow_{rank}", config.log_level, config.mesh.observability.log_format
    )
    began = time.monotonic()
    try:
        status = Shadow(_with_whole_paths(config)).run()
    except CannotStart as error:
        logger.error("%s", error)
        return process.EXIT_FAILED
    except RayError as error:
        lived = time.monotonic() - began
        logger.error("the instance's actor died after %.0f s: %s", lived, placement.first_line(error))
        return process.EXIT_FAILED
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    os._exit(status)  # Ray's own exit takes a second and holds the cluster's resources meanwhile
