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
from engine.executor.local_model import differs
from engine.executor.relay import Relay
from engine.executor_contract import CannotStart, Progress
from engine.host.versions import other_versions

logger = logging.getLogger(__name__)

GROUP_VARIABLE = "LOCKSTEP_PLACEMENT_GROUP"
"""Name of the placement group that the launcher made for this instance's workers."""


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
        self._relay = Relay("ray-relay", self._serve, self._fail)

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
            self._relay.workers.append(RelayedWorker(name, where, host, address, 0))
        logger.info(
            "actors on %d node%s: %s",
            len(set(hosts)), "s" * (len(set(hosts)) > 1),
            "; ".join(
                f"{name} on {place.host} ({host[:8]})"
                for name, place, host in zip(self._names, places, hosts, strict=True)
            ),
        )  # fmt: skip
        workers += self._relay.workers
        self._relay.start()

    def threads_of(self, worker: WorkerEnd) -> int | None:
        """See ``Crew``. As many as the CPUs that were asked for."""
        return self._threads

    def close(self, problem: str) -> None:
        """See ``Crew``."""
        self._relay.close()
        for actor in self._actors:
            with contextlib.suppress(RayError):
                ray.kill(actor)
        if self._group is not None and self._owns_group:
            placement.release(self._group)

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
        settings = self._settings
        return differs(place.directory, place.fingerprint, settings.model, settings.fingerprint)

    # ---- the thread that relays

    async def _serve(self, closed: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        listening = []
        for actor, worker in zip(self._actors, self._relay.workers, strict=True):
            listening.append(loop.create_task(self._listen(actor, worker)))
            worker.forward(loop, _teller(actor))
        try:
            await closed.wait()
        finally:
            for task in listening:
                task.cancel()
            await asyncio.gather(*listening, return_exceptions=True)

    def _fail(self, error: Exception) -> None:
        """Called when the relay has failed: no worker can be reached any more."""
        logger.error("the relay to actors failed", exc_info=error)
        for worker in self._relay.workers:
            worker.gone("is out of reach: the relay to actors failed")

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
