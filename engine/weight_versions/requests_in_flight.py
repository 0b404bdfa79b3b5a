"""Requests of an instance when its weights change (pure: no torch).

Whatever becomes of them, blocks of two versions have different names. A request that keeps its old keys and
values gets names that no other request has: what it adds is of neither version.
"""

from __future__ import annotations

from coordinator.messages import InFlight
from engine.core.admission import Admission
from engine.core.cache_sharing import CacheSharing
from engine.scheduling.request import Request, Status
from engine.scheduling.scheduler import Scheduler


class RequestsInFlight:
    """Takes the requests of one instance from a version of the weights to the next."""

    def __init__(self, scheduler: Scheduler, admission: Admission, sharing: CacheSharing) -> None:
        self._scheduler = scheduler
        self._admission = admission
        self._sharing = sharing
        self._changes = 0

    def __repr__(self) -> str:
        return f"<RequestsInFlight of {self._scheduler!r}, {self._changes} changes>"

    def go_over(self, weights: str, in_flight: InFlight) -> None:
        """Name blocks by other weights from now on, between two steps.

        Requests that are to end were ended before. Those that have not begun, or were preempted, are computed
        by the new weights alone.
        """
        self._changes += 1
        self._sharing.change_weights(weights)
        self._admission.weights = weights
        for request in self._admission.beside:
            request.name_by(weights)
        queues = self._scheduler.queues
        for request in list(queues.waiting):
            queues.leave(request)
            request.name_by(weights)
            queues.enqueue(request)
        for request in list(queues.running):
            queues.expected_blocks.settle(request)
            if in_flight is InFlight.RECOMPUTE:
                request.name_by(weights)
                self._scheduler.set_back(request)
            else:
                request.name_by(self._name_of_its_own(weights, request))
                request.num_named = 0
        self._admission.encode_again()

    def _name_of_its_own(self, weights: str, request: Request) -> str:
        assert request.status is Status.RUNNING
        peer, number = request.key
        return f"{weights}/{self._changes}/{peer.hex()}/{number}"
