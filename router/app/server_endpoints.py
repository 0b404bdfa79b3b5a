"""Endpoints about the server itself: health, version, settings, faults, OpenAPI, metrics."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from coordinator.messages import View
from router.api.answers import json_response
from router.app.fault_status import fault_status
from router.app.openapi import document
from router.app.server_info import Sleeping, is_scaling, server_config, server_info, version_of
from router.config import HttpConfig
from router.errors import ApiError
from router.mesh import Mesh
from router.metrics.metrics import Metrics


class ServerEndpoints:
    """Handlers of the endpoints about the server itself."""

    def __init__(
        self, mesh: Mesh, config: HttpConfig, metrics: Metrics, view: Callable[[], View | None], prefix: str
    ) -> None:
        """``view`` is the coordinator's newest one; ``prefix`` stands before all paths."""
        self._mesh = mesh
        self._config = config
        self._metrics = metrics
        self._view = view
        self._prefix = prefix

    async def health(self, _request: Request) -> Response:
        return Response(status_code=200 if self._mesh.healthy else 503)

    async def nothing(self, _request: Request) -> Response:
        """SkyRL's ``/finish_session``: sessions hold nothing that could be given back."""
        return json_response(b"{}")

    async def alive(self, _request: Request) -> Response:
        """``GET /livez``: 200 from any router whose event loop runs.

        Nothing more is checked.
        """
        return Response()

    async def version(self, _request: Request) -> Response:
        return json_response(msgspec.json.encode({"version": version_of("lockstep")}))

    async def info(self, request: Request) -> Response:
        seen = self._view()
        settings = None if seen is None else seen.settings
        num_reports = len(self._metrics.reports())
        info = server_info(self._mesh.model, settings, num_reports, self._mesh.numerics(), self._config)
        answer = server_config(info) if "config_format" in request.query_params else info
        return json_response(msgspec.json.encode(answer))

    async def is_sleeping(self, _request: Request) -> Response:
        seen = self._view()
        return json_response(
            msgspec.json.encode(Sleeping(seen is not None and seen.orders.sleep is not None))
        )

    async def scales(self, _request: Request) -> Response:
        return json_response(msgspec.json.encode(is_scaling(self._mesh.instances_by_state())))

    async def faults(self, _request: Request) -> Response:
        return json_response(msgspec.json.encode(fault_status(self._view())))

    async def openapi(self, _request: Request) -> Response:
        with_keys = bool(self._config.keys)
        return json_response(document(version_of("lockstep"), with_keys=with_keys, prefix=self._prefix))

    async def exposition(self, request: Request) -> Response:
        page, content_type = self._metrics.exposition(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    async def not_kept(self, _request: Request) -> Response:
        raise ApiError(404, "Answers are not kept: take them from the request that makes them.")
