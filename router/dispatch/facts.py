"""Facts of the mesh as one router sees it.

They come from the coordinator's view, its pool of instances and its requests. Knows nothing of connections.
Base of :class:`router.dispatch.client.MeshClient`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping

from coordinator.member_connection import Watcher
from coordinator.messages import (
    ExpertBalance,
    Role,
    State,
    View,
    ranks_by_class,
)
from coordinator.numerics import Numerics
from engine.messages import InstanceReport
from router.dispatch.chooser import Chooser
from router.dispatch.ledger import Flight
from router.dispatch.mover import RequestMover
from router.dispatch.policy import eligible
from router.dispatch.pool import InstanceHealth, Pool
from router.dispatch.shadow.shadowing import Shadowing
from router.mesh import ServedModel


class RouterFacts:
    """The :class:`router.mesh.MeshFacts` of a router, and what its own status shows."""

    _watcher: Watcher
    _pool: Pool
    _chooser: Chooser
    _mover: RequestMover
    _model: ServedModel | None
    _shadowing: Shadowing | None

    @property
    def model(self) -> ServedModel | None:
        return self._model

    @property
    def healthy(self) -> bool:
        now = time.monotonic()
        return any(eligible([instance.candidate(now)]) for instance in self._pool)

    @property
    def num_ready(self) -> int:
        """Instances that take requests now."""
        return sum(instance.ready for instance in self._pool)

    @property
    def view(self) -> View | None:
        """The newest view of the world that the coordinator sent."""
        return self._watcher.view

    @property
    def coordinator_silent_for(self) -> float | None:
        """Seconds since the coordinator was heard; None if it never was."""
        return self._watcher.silent_for

    @property
    def num_in_flight(self) -> int:
        return sum(1 for _ in self._mover.of_clients())

    def choices(self) -> Mapping[str, int]:
        """Outcomes of routing so far: see :class:`router.mesh.MeshFacts`."""
        return {**self._chooser.counts, "moves": self._mover.num_moves}

    def numerics_changes(self) -> Mapping[str, int]:
        """Requests that went on in another numerics class: see :class:`router.mesh.MeshFacts`."""
        return self._mover.num_class_changes

    def shadow_checks(self) -> Mapping[str, int]:
        """Shadow checks so far, by result."""
        return {} if self._shadowing is None else self._shadowing.counts

    def shadow_differences(self) -> Mapping[str, int]:
        """Shadow checks that name an instance, by its rank."""
        return {} if self._shadowing is None else self._shadowing.differences

    def reports(self) -> Mapping[int, InstanceReport]:
        """The newest report of each instance, by rank."""
        return {instance.rank: instance.report for instance in self._pool if instance.report is not None}

    def epoch(self) -> int | None:
        """Epoch of the newest view."""
        return self._watcher.head.epoch if self._watcher.head else None

    def block_size(self) -> int | None:
        """Tokens of a KV block."""
        head = self._watcher.head
        return head.settings.block_size if head and head.settings else None

    def instances_by_state(self) -> Mapping[str, int]:
        """Number of instances in each state."""
        members = self.view.members if self.view else []
        return {state.value: sum(member.state is state for member in members) for state in State}

    def numerics(self) -> Mapping[Numerics, list[int]]:
        """Ranks of the instances in each numerics class: see :class:`router.mesh.MeshFacts`."""
        return ranks_by_class(self.view.members if self.view else [])

    def roles(self) -> Mapping[int, Role]:
        """Role of each instance, by rank."""
        return {member.rank: member.role for member in (self.view.members if self.view else [])}

    def refused_peers(self) -> Mapping[str, int]:
        """Connections that were refused, by the process that did it."""
        if self.view is None:
            return {}
        refused = {str(member.rank): member.load.refused_peers for member in self.view.members}
        return {"coordinator": self.view.refused_peers, **refused}

    def balance(self) -> ExpertBalance | None:
        """How the load of experts is balanced: see :class:`router.mesh.MeshFacts`."""
        return self.view.balance if self.view is not None else None

    def instance_health(self) -> Mapping[int, InstanceHealth]:
        """Health of each instance as this router sees it, by rank."""
        counts = self._mover.num_at_instances()
        return {
            instance.rank: InstanceHealth(
                attached=instance.attached,
                failures=instance.breaker.failures,
                in_flight=counts[instance.name],
            )
            for instance in self._pool
        }

    def flights(self, most: int) -> list[Flight]:
        """The oldest requests in flight, at most so many."""
        now = time.monotonic()
        return [
            Flight(
                request_id=entry.prompt.request_id,
                rank=self._mover.rank_of(entry),
                prompt_tokens=len(entry.prompt.prompt_ids),
                output_tokens=len(entry.emitted),
                attempts=entry.attempts,
                age=now - entry.begun_at,
            )
            for entry in itertools.islice(self._mover.of_clients(), most)
        ]
