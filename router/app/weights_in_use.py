"""Endpoints that tell of the weights in use, and name them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from coordinator.messages import InFlight, OperatorAnswer, OperatorCommand, UpdateWeights, View
from coordinator.numerics import Numerics
from engine.weight_versions.assembled import first_numbers, homes_of
from router.app.ordered import BODY_LIMITS, OrderedCommands, json_answer, unavailable
from router.app.rollouts import UPDATE_TIMEOUT
from router.app.transfer_bodies import (
    NAMES_LIMITS,
    Checksums,
    Comparison,
    Relabelled,
    WeightInfo,
    read_check,
    read_label,
    read_name,
)  # fmt: skip
from router.errors import ApiError
from router.http.body import read_body
from router.mesh import ServedModel

IN_USE_PATHS = frozenset(
    {
        "/weight_info",
        "/update_weight_version",
        "/weight_checker",
        "/weights_checker",
        "/get_weights_by_name",
    }
)
"""Paths of these endpoints; under the admin API's access check."""
UNLABELLED = "default"
"""Label of the weights that a mesh was started with."""


class TransferMesh(Protocol):
    """Interface of the mesh that these endpoints use."""

    @property
    def view(self) -> View | None: ...
    @property
    def model(self) -> ServedModel | None: ...
    def numerics(self) -> Mapping[Numerics, list[int]]: ...


class VersionInUse:
    """Handlers of the endpoints, and what is known of the version in use."""

    def __init__(
        self, mesh: TransferMesh, command: Callable[[OperatorCommand], Awaitable[OperatorAnswer]]
    ) -> None:
        self._mesh = mesh
        self._commands = OrderedCommands(mesh, command)

    def routes(self) -> list[Route]:
        both = ["GET", "POST"]
        return [
            Route("/update_weight_version", self.rename, methods=["POST"]),
            Route("/weight_info", self.weight_info, methods=["GET"]),
            Route("/weight_checker", self.check, methods=both),
            Route("/weights_checker", self.check, methods=both),
            Route("/get_weights_by_name", self.weights_by_name, methods=both),
        ]

    @property
    def source(self) -> Path:
        """Directory of the version in use."""
        weights, model = self._commands.orders.weights, self._mesh.model
        if weights.number:
            return Path(weights.source)
        if model is None:
            raise unavailable("the mesh has not begun")
        return Path(model.directory)

    async def weight_info(self, _request: Request) -> Response:
        weights = self._commands.orders.weights
        return json_answer(
            WeightInfo(weights.label or UNLABELLED, weights.number, weights.digest or self._loaded_digest())
        )

    async def rename(self, request: Request) -> Response:
        """Give the weights in use another label, on all instances.

        They are read again, so that a number stands for one label, also after deaths.
        """
        wanted = read_label(await read_body(request, BODY_LIMITS))
        wish = UpdateWeights(
            command=uuid.uuid4().hex,
            source=str(self.source),
            label=wanted.new_version,
            in_flight=InFlight.ABORT if wanted.abort_all_requests else InFlight.KEEP,
        )
        text = await self._commands.carry_out(request, wish, UPDATE_TIMEOUT)
        await self._commands.see(lambda orders: orders.weights.update == wish.command)
        return json_answer(Relabelled(new_version=wanted.new_version, message=text))

    async def check(self, request: Request) -> Response:
        """Digest of the weights that all instances have read, or a comparison with one."""
        wanted = read_check(await read_body(request, NAMES_LIMITS) or b"{}")
        digest = self._commands.orders.weights.digest or self._loaded_digest()
        if wanted.action == "checksum":
            return json_answer(Checksums({"weights": digest}))
        if wanted.action == "compare" and wanted.baseline is not None:
            mismatches = sorted(name for name, each in wanted.baseline.items() if each != digest)
            return json_answer(Comparison(match=not mismatches, mismatches=mismatches))
        raise ApiError(
            400,
            "action is checksum, or compare with a baseline: weights in use are never overwritten",
            param="action",
        )

    async def weights_by_name(self, request: Request) -> Response:
        """The first numbers of a tensor, read where the version in use was read."""
        wanted = read_name(await read_body(request, BODY_LIMITS))
        source = self.source
        try:
            homes = await asyncio.to_thread(homes_of, source)
            numbers = await asyncio.to_thread(first_numbers, homes, wanted.name, wanted.truncate_size)
        except KeyError as error:
            raise ApiError(400, f"{source} has no floats named {wanted.name!r}", param="name") from error
        except (OSError, ValueError) as error:
            raise ApiError(400, str(error)) from error
        return Response(msgspec.json.encode(numbers), media_type="application/json")

    def _loaded_digest(self) -> str:
        """Digest of the weights that the mesh was started with; empty while unknown."""
        return next((each.weights for each in self._mesh.numerics()), "")
