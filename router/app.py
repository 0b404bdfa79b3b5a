"""The HTTP door: which path leads where, who may enter, and what errors look like.

Knows the mesh as :class:`router.mesh.Mesh` only; :mod:`router.server` gives it the real one and a socket.
"""

from __future__ import annotations

import hmac
import importlib.metadata
from collections.abc import Sequence

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.config import HttpConfig
from router.endpoints import Endpoints
from router.errors import ApiError, ClientGone, error_response, from_mesh, unexpected
from router.mesh import Mesh, MeshError
from router.metrics import Metrics

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
"""What needs no key: nothing there costs or changes anything."""


def make_app(mesh: Mesh, config: HttpConfig, metrics: Metrics | None = None) -> Starlette:
    """The ASGI application in front of a mesh. ``metrics`` may tell of the instances, too."""
    metrics = metrics or Metrics(mesh)
    endpoints = Endpoints(mesh, config, metrics)

    async def health(request: Request) -> Response:
        return Response(status_code=200 if mesh.healthy else 503)

    async def version(request: Request) -> Response:
        return Response(msgspec.json.encode({"version": _version()}), media_type="application/json")

    async def exposition(request: Request) -> Response:
        page, content_type = metrics.exposition(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    return Starlette(
        routes=[
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
            Route("/v1/models", endpoints.models, methods=["GET"]),
            Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
            Route("/tokenize", endpoints.tokenize, methods=["POST"]),
            Route("/detokenize", endpoints.detokenize, methods=["POST"]),
            Route("/health", health, methods=["GET"]),
            Route("/ping", health, methods=["GET", "POST"]),
            Route("/version", version, methods=["GET"]),
            Route("/metrics", exposition, methods=["GET"]),
        ],
        middleware=[Middleware(KeyCheck, keys=config.api_key)] if config.api_key else [],
        exception_handlers={
            ApiError: _on_api_error,
            MeshError: _on_mesh_error,
            ClientGone: _on_client_gone,
            HTTPException: _on_http_exception,
            Exception: _on_unexpected,
        },
    )


class KeyCheck:
    """Lets requests in that present one of the keys, as ``Authorization: Bearer <key>``."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "Give a valid API key (Authorization: Bearer ...).", headers={"www-authenticate": "Bearer"}
        )
        await error_response(error)(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, presented = header.partition(b" ")
        matches = [hmac.compare_digest(presented.strip(), key) for key in self._keys]
        return scheme.lower() == b"bearer" and any(matches)


class _NoAnswer(Response):
    """For a client that is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _on_mesh_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshError)
    return error_response(from_mesh(error))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return _NoAnswer()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: no such path, no such method."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    return error_response(ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    return error_response(unexpected())


def _version() -> str:
    try:
        return importlib.metadata.version("lockstep")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
