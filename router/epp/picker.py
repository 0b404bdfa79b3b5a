"""Picks an endpoint and an instance for a request.

The instance is chosen as a router chooses it: by what each has cached, and by what waits there. The endpoint
is a router on the instance's host, if that one is not busier than others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from router.dispatch.client import MeshClient
from router.dispatch.reservations import Reservation
from router.epp.endpoint_watch import EndpointWatch
from router.epp.endpoints import Endpoint, host_of, pick
from router.epp.exchange import Pick
from router.epp.prompts import PromptReader
from router.mesh import MeshError

logger = logging.getLogger(__name__)

NO_ENDPOINT = "no router of the mesh is ready"


class Picked:
    """One choice, counted until it is released."""

    def __init__(self, endpoint: Endpoint, reservation: Reservation | None) -> None:
        self.endpoint = endpoint
        self.reservation = reservation
        endpoint.in_flight += 1
        endpoint.chosen += 1

    def __repr__(self) -> str:
        return f"<Picked {self.endpoint.address}, {self.reservation}>"

    @property
    def pick(self) -> Pick:
        rank = None if self.reservation is None else self.reservation.instance.rank
        return Pick(self.endpoint.address, rank)


class Picker:
    """Chooses the endpoint and the instance for each request of gateways."""

    def __init__(self, mesh: MeshClient, watch: EndpointWatch, prompts: PromptReader) -> None:
        self._mesh = mesh
        self._watch = watch
        self._prompts = prompts
        self._reservations = mesh.reservations()

    def __repr__(self) -> str:
        return f"<Picker {self._reservations!r} {self._watch!r}>"

    @property
    def is_ready(self) -> bool:
        """Whether the picker has a view of the mesh and a healthy endpoint."""
        return self._mesh.view is not None and self._watch.has_ready

    async def pick(
        self, headers: Mapping[str, str], body: bytes, subset: tuple[str, ...] | None = None
    ) -> Picked | None:
        """Endpoint and instance for a request; None if no endpoint is ready.

        ``subset``: the only endpoints that the gateway takes.
        """
        reservation = await self._reserve(headers, body)
        near = "" if reservation is None else host_of(reservation.instance.member.address)
        endpoint = pick(self._watch.endpoints.values(), near, subset)
        if endpoint is None:
            if reservation is not None:
                self._reservations.end(reservation, time.monotonic())
            return None
        return Picked(endpoint, reservation)

    def served_by(self, picked: Picked, address: str) -> None:
        """Note that another endpoint than the chosen one served a request, as after a retry."""
        endpoint = self._watch.endpoints.get(address)
        if endpoint is not None and endpoint is not picked.endpoint:
            picked.endpoint.in_flight -= 1
            endpoint.in_flight += 1
            picked.endpoint = endpoint

    def release(self, picked: Picked) -> None:
        """Note that a request has ended."""
        picked.endpoint.in_flight -= 1
        if picked.reservation is not None:
            self._reservations.end(picked.reservation, time.monotonic())

    async def _reserve(self, headers: Mapping[str, str], body: bytes) -> Reservation | None:
        """Choose the instance; None where the router that gets the request chooses."""
        prompt = await self._prompts.read(headers, body)
        if prompt is None:
            return None
        try:
            return self._reservations.make(prompt, time.monotonic())
        except MeshError as error:
            logger.debug("no instance is chosen for a request: %s", error)
            return None
