"""The admin API under ``/admin``: the mesh, requests, faults, drain, scale, roles, rebalancing.

JSON in and out. It has a port of its own (``--admin-port``), or a key of its own (``--admin-api-key``), or
both; clients of the endpoint never get in by accident. Commands go through the coordinator, like ``lockstep
drain``, ``scale`` and ``role``.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from coordinator.commands import has_size
from coordinator.config import MAX_INSTANCES
from coordinator.membership.operations import ACCEPTED, FAILED
from coordinator.messages import (
    Drain,
    ExpertBalance,
    Load,
    OperatorAnswer,
    OperatorCommand,
    Rebalance,
    Role,
    Scale,
    SetRole,
    View,
)
from engine.messages import InstanceReport
from router.app.adapters import ADAPTER_PATHS, AdapterEndpoints
from router.app.app import exception_handlers
from router.app.middleware import OPEN_PATHS, KeyCheck, RequestIds, foreign_host
from router.app.paths import ELASTIC, REBALANCE, RESET, is_admin
from router.app.refusals import Refusals
from router.app.rollouts import RolloutEndpoints
from router.app.sleeping import SleepEndpoints
from router.app.weight_transfers import TransferEndpoints
from router.app.weights_in_use import TransferMesh
from router.config import HttpConfig
from router.dispatch.ledger import Flight
from router.dispatch.pool import InstanceHealth
from router.errors import ApiError, error_response
from router.faults import Fault, FaultEvent, Faults
from router.http.body import decoder, read_body

BODY_LIMITS = HttpConfig(max_request_bytes=10_000, request_timeout=10.0)
"""Limits of a command's body: bytes and seconds."""
RETRY_AFTER = "1"
ELASTIC_TIMEOUT = 600.0
"""Seconds for which ``/scale_elastic_ep`` waits for the new number of instances."""
LOOK_INTERVAL = 0.5
"""Seconds between two checks whether the new number of instances is reached."""
RESET_TIMEOUT = 30.0
"""Seconds for all instances to forget cached prefixes, in memory and in files."""
MAX_REQUESTS = 1000
"""Most requests that ``/admin/requests`` lists."""


class AdminMesh(TransferMesh, Protocol):
    """Interface of the mesh that the admin API uses."""

    @property
    def coordinator_silent_for(self) -> float | None:
        """Seconds since the coordinator was heard; None if it never was."""
        ...

    def reports(self) -> Mapping[int, InstanceReport]: ...
    def instance_health(self) -> Mapping[int, InstanceHealth]: ...
    @property
    def num_in_flight(self) -> int: ...
    def flights(self, most: int) -> Sequence[Flight]: ...
    async def end_requests(
        self, request_ids: Sequence[str], timeout: float, *, everything: bool = False
    ) -> list[str]:
        """Have all instances end requests; returns those that did not answer in time."""
        ...

    async def reset_caches(self, timeout: float) -> list[str]:
        """Have all instances forget cached prefixes; returns those that did not in time."""
        ...


Command = Callable[[OperatorCommand], Awaitable[OperatorAnswer]]
"""Sends a command to the coordinator, and returns its answer.

Raises TimeoutError if no answer comes, which a launcher gives to a wish to scale when it has started all.
"""


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INSTANCES)]
    timeout: Annotated[float, msgspec.Meta(ge=0)] | None = None
    """Seconds; None for the instance's own --drain-timeout."""
    force: bool = False


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_INSTANCES)]
    force: bool = False


class RoleRequest(msgspec.Struct, forbid_unknown_fields=True):
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_INSTANCES)]
    role: Role


class ElasticRequest(msgspec.Struct):
    """Body of vLLM's ``/scale_elastic_ep``."""

    new_data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_INSTANCES)]
    drain_timeout: float | None = None
    """Refused: each instance has its own --drain-timeout."""


class RebalanceRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``/eplb/rebalance``: an empty object."""


class ElasticAnswer(msgspec.Struct, frozen=True):
    message: str


class InstanceAnswer(msgspec.Struct, frozen=True):
    """Instance in ``/admin/world``; ``router`` is its health as this router sees it."""

    rank: int
    state: str
    phase: str
    address: str
    host: str
    pid: int
    role: Role
    load: Load
    odd: int
    """Shadow checks in which it computed otherwise than two others."""
    router: InstanceHealth | None
    kv_cache_dir_hung: float | None = None
    """Seconds for which the disk of its KV blocks has not answered.

    0: it answers. None: it keeps no blocks in files.
    """


class WorldAnswer(msgspec.Struct, frozen=True):
    mesh: str
    model: str | None
    epoch: int
    size: int | None
    waiting_for: str
    coordinator_silent_for: float | None
    """Seconds; this answer is at least so old."""
    front_end: int
    instances: list[InstanceAnswer]
    balance: ExpertBalance | None
    """None where the load of experts is not balanced."""


class RequestsAnswer(msgspec.Struct, frozen=True):
    """Requests in flight in this router, oldest first."""

    front_end: int
    in_flight: int
    requests: list[Flight]
    """At most the first 1,000."""


class CommandAnswer(msgspec.Struct, frozen=True):
    accepted: bool
    text: str


class ForgottenPrefixes(msgspec.Struct, frozen=True):
    """Answer of vLLM's ``/reset_prefix_cache``."""

    success: bool = True


class FaultsAnswer(msgspec.Struct, frozen=True):
    """Counts by kind over all routers and the launcher, and the latest events, oldest first."""

    detections: dict[str, int]
    restarts: dict[str, int]
    resumes: dict[str, int]
    recent: list[Fault]


_read_drain = decoder(DrainRequest)
_read_scale = decoder(ScaleRequest)
_read_role = decoder(RoleRequest)
_read_elastic = decoder(ElasticRequest)
_read_rebalance = decoder(RebalanceRequest)


class AdminEndpoints:
    """Handlers of the admin API: answers from the view, commands to the coordinator."""

    def __init__(
        self, mesh: AdminMesh, faults: Callable[[], Faults], command: Command, front_end: int
    ) -> None:
        self._mesh = mesh
        self._faults = faults
        self._command = command
        self._front_end = front_end

    async def world(self, request: Request) -> Response:
        view = self._mesh.view
        if view is None:
            raise _unavailable("the coordinator has not answered yet: is it running? see -dpa and -dpp")
        return _json(_world(view, self._mesh, self._front_end))

    async def requests(self, request: Request) -> Response:
        return _json(
            RequestsAnswer(self._front_end, self._mesh.num_in_flight, list(self._mesh.flights(MAX_REQUESTS)))
        )

    async def told_faults(self, request: Request) -> Response:
        total = self._faults()
        counts = {event: total.counts.get(event, {}) for event in FaultEvent}
        return _json(
            FaultsAnswer(
                counts[FaultEvent.DETECTION],
                counts[FaultEvent.RESTART],
                counts[FaultEvent.RESUME],
                total.recent,
            )
        )

    async def drain(self, request: Request) -> Response:
        wanted = _read_drain(await read_body(request, BODY_LIMITS))
        return await self._carry_out(
            Drain(command=_name(), rank=wanted.rank, timeout=wanted.timeout, force=wanted.force)
        )

    async def scale(self, request: Request) -> Response:
        wanted = _read_scale(await read_body(request, BODY_LIMITS))
        return await self._carry_out(Scale(command=_name(), size=wanted.n, force=wanted.force))

    async def role(self, request: Request) -> Response:
        wanted = _read_role(await read_body(request, BODY_LIMITS))
        return await self._carry_out(SetRole(command=_name(), rank=wanted.rank, role=wanted.role))

    async def scale_elastic_ep(self, request: Request) -> Response:
        wanted = _read_elastic(await read_body(request, BODY_LIMITS))
        if wanted.drain_timeout is not None:
            raise ApiError(400, "drain_timeout is not supported: start instances with --drain-timeout.")
        wish = Scale(command=_name(), size=wanted.new_data_parallel_size)
        text = await self._obtain(wish)
        mesh = self._mesh
        try:
            async with asyncio.timeout(ELASTIC_TIMEOUT):
                while mesh.view is None or not has_size(mesh.view, wish.size):
                    if await request.is_disconnected():
                        break
                    await asyncio.sleep(LOOK_INTERVAL)
                    await self._check(wish)
        except TimeoutError as error:
            raise ApiError(408, f"not done after {ELASTIC_TIMEOUT:g} s, though it goes on: {text}") from error
        return _json(ElasticAnswer(text))

    async def rebalance(self, request: Request) -> Response:
        _read_rebalance(await read_body(request, BODY_LIMITS) or b"{}")
        return await self._carry_out(Rebalance(command=_name()))

    async def reset_prefix_cache(self, _request: Request) -> Response:
        missing = await self._mesh.reset_caches(RESET_TIMEOUT)
        if missing:
            raise _unavailable(f"these instances have not reset their caches: {', '.join(sorted(missing))}")
        return _json(ForgottenPrefixes())

    async def _carry_out(self, wish: OperatorCommand) -> Response:
        return _json(CommandAnswer(True, await self._obtain(wish)), ACCEPTED)

    async def _check(self, wish: Scale) -> None:
        """Raise an error if what was begun for a command has failed."""
        try:
            answer = await self._command(wish)
        except TimeoutError:
            return  # the coordinator may be away for a moment
        if answer.status == FAILED:
            raise ApiError(answer.status, f"not done: {answer.text}")

    async def _obtain(self, wish: OperatorCommand) -> str:
        try:
            answer = await self._command(wish)
        except TimeoutError as error:
            text = "no answer yet, though it may have been done or begun: ask /admin/world, or once more"
            raise _unavailable(text) from error
        if answer.status == ACCEPTED:
            return answer.text
        headers = {"retry-after": RETRY_AFTER} if answer.status == 503 else None
        raise ApiError(answer.status, answer.text, headers=headers)


def make_admin_app(
    mesh: AdminMesh,
    faults: Callable[[], Faults],
    command: Command,
    front_end: int = 0,
    prefix: str = "",
    weights_room: Path | None = None,
) -> Starlette:
    """The ASGI application of ``/admin``, behind :class:`AdminGate`.

    ``weights_room``: directory of weight versions that are put together; None: a temporary one.
    """
    room = weights_room or Path(tempfile.gettempdir()) / f"lockstep-weights-{os.getuid()}"
    admin = AdminEndpoints(mesh, faults, command, front_end)
    app = Starlette(
        routes=[
            Route("/admin/world", admin.world, methods=["GET"]),
            Route("/admin/requests", admin.requests, methods=["GET"]),
            Route("/admin/faults", admin.told_faults, methods=["GET"]),
            Route("/admin/drain", admin.drain, methods=["POST"]),
            Route("/admin/scale", admin.scale, methods=["POST"]),
            Route("/admin/role", admin.role, methods=["POST"]),
            Route(ELASTIC, admin.scale_elastic_ep, methods=["POST"]),
            Route(REBALANCE, admin.rebalance, methods=["POST"]),
            Route(RESET, admin.reset_prefix_cache, methods=["POST"]),
            *RolloutEndpoints(mesh, command).routes(),
            *SleepEndpoints(mesh, command).routes(),
            *TransferEndpoints(mesh, command, room).routes(),
            *AdapterEndpoints(mesh, command).routes(),
        ],
        middleware=[Middleware(RequestIds)],
        exception_handlers=exception_handlers(),
    )
    app.state.refusals = Refusals()
    app.state.prefix = prefix
    app.router.redirect_slashes = False
    return app


class AdminGate:
    """Routes ``/admin`` to the admin application after a key check, the rest to the endpoint's.

    Unless ``serves_all``, the admin port has nothing but the admin API and paths without authentication
    (health, metrics). On the endpoint's port the admin API exists only if it has keys.
    """

    def __init__(
        self,
        endpoint: ASGIApp,
        admin: ASGIApp,
        *,
        port: int | None,
        keys: Sequence[str],
        adapters: ASGIApp | None = None,
        serves_all: bool = False,
    ) -> None:
        """``adapters`` answers the paths of adapters on the endpoint's port, without ``keys``; None: 404.

        ``serves_all``: the admin port has the endpoint's paths, too.
        """
        self._serves_all = serves_all and not keys
        self._adapters = adapters
        self._endpoint = endpoint
        self._admin = admin
        self._port = port
        self._refusals = Refusals()
        self._checked = KeyCheck(admin, keys, self._refusals) if keys else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._choose(scope)(scope, receive, send)

    def _choose(self, scope: Scope) -> ASGIApp:
        if scope["type"] != "http":
            return self._endpoint
        path: str = scope["path"]
        on_admin_port = self._port is not None and (scope.get("server") or ("", 0))[1] == self._port
        if not is_admin(path):
            if not on_admin_port or path in OPEN_PATHS:
                return self._endpoint
            if not self._serves_all:
                return self._refused(scope, ApiError(404, f"{path} is not on the admin port."))
            return self._without_key(scope, self._endpoint)
        if self._checked is not None:
            return self._checked
        if not on_admin_port:
            is_open = self._adapters is not None and path in ADAPTER_PATHS
            return self._adapters if is_open and self._adapters is not None else self._endpoint
        return self._without_key(scope, self._admin)

    def _without_key(self, scope: Scope, app: ASGIApp) -> ASGIApp:
        """An application on the admin port, but for web pages.

        A page in the operator's browser can reach a loopback port, too; it cannot hide where it is from.
        """
        if any(name == b"origin" for name, _ in scope["headers"]) or foreign_host(scope) is not None:
            message = "Web pages, and other sites, may use the admin API only with --admin-api-key."
            return self._refused(scope, ApiError(403, message))
        return app

    def _refused(self, scope: Scope, error: ApiError) -> ASGIApp:
        self._refusals.add(scope["method"], scope["path"], error)
        return error_response(error)


def _world(view: View, mesh: AdminMesh, front_end: int) -> WorldAnswer:
    health, reports = mesh.instance_health(), mesh.reports()
    files = {rank: report.files for rank, report in reports.items() if report.files is not None}
    return WorldAnswer(
        mesh=view.mesh,
        model=view.settings.served_model_name[0] if view.settings else None,
        epoch=view.epoch,
        size=view.size,
        waiting_for=view.waiting_for,
        coordinator_silent_for=mesh.coordinator_silent_for,
        front_end=front_end,
        instances=[
            InstanceAnswer(
                rank=member.rank,
                state=member.state,
                phase=member.phase,
                address=member.address,
                host=member.host,
                pid=member.pid,
                role=member.role,
                load=member.load,
                odd=member.odd,
                router=health.get(member.rank),
                kv_cache_dir_hung=files[member.rank].hung_seconds if member.rank in files else None,
            )
            for member in view.members
        ],
        balance=view.balance,
    )


def _name() -> str:
    return uuid.uuid4().hex


def _json(answer: msgspec.Struct, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _unavailable(message: str) -> ApiError:
    return ApiError(503, message, headers={"retry-after": RETRY_AFTER})
