"""Workers of an instance as Ray actors: reserves room, starts them, relays (no torch).

A thread with an event loop holds the calls. One call that waits for a worker's message is always under way;
should the actor die, that call fails, which is how its end is noticed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from coordinator.messages import Settings
from engine.config import EngineConfig
from engine.executor.cluster import placement
from engine.executor.cluster.actors import worker_actor
from engine.executor.cluster.messages import Place, PlaceQuery
from engine.executor.ends import LOOPBACK, RelayedWorker, WorkerEnd
from engine.executor_contract import CannotStart, Progress
from engine.host.versions import other_versions

logger = logging.getLogger(__name__)

GROUP_VARIABLE = "LOCKSTEP_PLACEMENT_GROUP"
"""Name of the placement group that the launcher made for this instance's workers."""
END_TIMEOUT = 5.0
"""Seconds that the thread of the crew may take to end."""


class RayCrew:
    """Implements ``executor.ends.Crew`` with one actor per worker."""

    def __init__(
        self, config: EngineConfig, settings: Settings, names: Sequence[str], timeout: float
    ) -> None:
        """``timeout``: seconds to wait for resources, and for the actors."""
        self._config = config
        self._settings = settings
        self._names = names
        self._timeout = timeout
        self._threads = max(1, config.device.cpu_threads // config.device.num_workers)
        self._group: PlacementGroup | None = None
        self._owns_group = False
        self._actors: list[Any] = []
        self._workers: list[RelayedWorker] = []
        self._loop = asyncio.new_event_loop()
        self._listening: list[asyncio.Task[None]] = []
        self._thread = threading.Thread(target=self._run, name="ray-relay", daemon=True)

    def __repr__(self) -> str:
        return f"<RayCrew of {len(self._actors)} actors>"

    # ---- the engine's thread

    def start(self, workers: list[WorkerEnd], progress: Progress) -> None:
        """See ``Crew``."""
        deadline = time.monotonic() + self._timeout
        progress("joining the Ray cluster")
        placement.connect()
        self._group = self._reserve(progress)
        progress("starting actors")
        nodes = placement.nodes_of(self._group)
        here = ray.get_runtime_context().get_node_id()
        # Neighbours in the instance talk most: keep them together, those on this node first.
        order = sorted(range(len(nodes)), key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))
        for bundle in order[: len(self._names)]:
            self._actors.append(self._actor(bundle))
        places = self._look(deadline)
        hosts = [f"{nodes[bundle]}/{place.boot}" for bundle, place in zip(order, places, strict=False)]
        for name, host, place in zip(self._names, hosts, places, strict=True):
            address = place.address if len(set(hosts)) > 1 else LOOPBACK
            where = f"actor, pid {place.pid} on {place.host}"
            self._workers.append(RelayedWorker(name, where, host, address, 0))
        logger.info(
            "actors on %d node%s: %s",
            len(set(hosts)), "s" * (len(set(hosts)) > 1),
            "; ".join(
                f"{name} on {place.host} ({host[:8]})"
                for name, place, host in zip(self._names, places, hosts, strict=True)
            ),
        )  # fmt: skip
        workers += self._workers
        self._thread.start()

    def threads_of(self, worker: WorkerEnd) -> int | None:
        """See ``Crew``. As many as the CPUs that were asked for."""
        return self._threads

    def close(self, problem: str) -> None:
        """See ``Crew``."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_TIMEOUT)
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._group is not None and self._owns_group:
            placement.release(self._group)
        if not self._thread.is_alive():
            for worker in self._workers:
                worker.forget()
            self._workers.clear()

    def _reserve(self, progress: Progress) -> PlacementGroup:
        name = os.environ.get(GROUP_VARIABLE)
        if name:
            return ray.util.get_placement_group(name)
        self._owns_group = True
        bundles = [placement.worker_resources(self._config)] * len(self._names)
        strategy = self._config.nodes.ray_placement_strategy
        return placement.reserve("", bundles, strategy, self._timeout, progress)

    def _actor(self, bundle: int) -> Any:
        needs = placement.worker_resources(self._config)
        options = {
            "num_cpus": needs["CPU"],
            "num_gpus": needs.get("GPU", 0.0),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
        }
        return worker_actor(**options).remote()

    def _look(self, deadline: float) -> list[Place]:
        """Places of the actors, checked to have the engine's versions and model.

        Raises:
            CannotStart: an actor does not start, or has something else.
        """
        ask = msgspec.msgpack.encode(PlaceQuery(self._config.model))
        answers = [actor.look.remote(ask) for actor in self._actors]
        try:
            answered = ray.get(answers, timeout=max(1.0, deadline - time.monotonic()))
        except RayError as error:
            raise CannotStart(f"an actor does not start: {placement.first_line(error)}") from error
        places = [msgspec.msgpack.decode(each, type=Place) for each in answered]
        for place in places:
            problem = self._problem_with(place)
            if problem:
                raise CannotStart(f"node {place.host} ({place.address}): {problem}")
        return places

    def _problem_with(self, place: Place) -> str:
        versions = other_versions(place.versions)
        if versions:
            return "; ".join(versions) + " (the engine)"
        if place.problem:
            return place.problem
        if place.fingerprint != self._settings.fingerprint:
            return (
                f"{place.directory} (fingerprint {place.fingerprint}) is not the model of the engine "
                f"({self._settings.model}, fingerprint {self._settings.fingerprint})"
            )
        return ""

    # ---- the thread that relays

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        for actor, worker in zip(self._actors, self._workers, strict=True):
            self._listening.append(self._loop.create_task(self._listen(actor, worker)))
            worker.forward(self._loop, _teller(actor))
        try:
            self._loop.run_forever()
        finally:
            for task in self._listening:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*self._listening, return_exceptions=True))
            self._loop.close()

    async def _listen(self, actor: Any, worker: RelayedWorker) -> None:
        """Relay a worker's messages until its actor dies, or the executor hangs up."""
        while True:
            try:
                messages = await actor.listen.remote()
            except RayError as error:
                worker.gone(f"died: {placement.first_line(error)}")
                return
            if not all(map(worker.deliver, messages)):
                return


def _teller(actor: Any) -> Callable[[bytes], bool]:
    """Sends an actor its messages; the first one begins its worker."""
    methods = itertools.chain([actor.begin], itertools.repeat(actor.tell))

    def tell(payload: bytes) -> bool:
        next(methods).remote(payload)
        return True

    return tell
