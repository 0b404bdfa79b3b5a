"""The HTTP application: its routes, and its handling of errors.

Knows the mesh as :class:`router.mesh.Mesh` only; :mod:`router.server` gives it the real one and a socket.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from coordinator.messages import View
from coordinator.process.process import shortage_of
from coordinator.process.tracing import Tracing
from router.api.answering import Answering
from router.api.generating import Generating
from router.api.ollama.handlers import OllamaGenerating
from router.api.replaying import Replaying
from router.api.understanding import Understanding
from router.app.dashboard.page import Dashboard
from router.app.endpoints import Endpoints
from router.app.middleware import error_response, middleware
from router.app.ollama_models import ollama_routes
from router.app.paths import not_there
from router.app.published_keys import PublishedKeys
from router.app.refusals import Refusals
from router.app.server_endpoints import ServerEndpoints
from router.app.store_work import StoreWork
from router.batches.routes import batch_routes, batch_runs, line_handlers
from router.config import HttpConfig
from router.errors import ApiError, ClientGone, from_mesh, short_of, unexpected
from router.http.quotas import Quotas
from router.http.request_path import prefix_of
from router.mesh import Mesh, MeshError
from router.metrics.http_counts import Counting, Handlers
from router.metrics.metrics import Metrics
from router.pooled.routes import pooled_handlers
from router.signing.keys import KEYS_PATH, CapsuleKey
from router.stored.replayed_body import Handler
from router.stored.routes import stored_routes
from router.stored.runs import Runs
from router.stored.store import AnswerStore
from router.text.text_models import TextModels


def make_app(
    mesh: Mesh,
    config: HttpConfig,
    metrics: Metrics | None = None,
    quotas: Quotas | None = None,
    dashboard: Dashboard | None = None,
    tracing: Tracing | None = None,
    view: Callable[[], View | None] = lambda: None,
    store: AnswerStore | None = None,
) -> Starlette:
    """The ASGI application in front of a mesh.

    ``metrics`` may tell of the instances, too; ``quotas`` may be shared with other routers; without a
    ``dashboard`` there is no page. ``view`` is the coordinator's newest one. Without a ``store`` no answer
    outlives its connection; with one, ``state.work`` is to be kept and closed by the caller.
    """
    metrics = metrics or Metrics(mesh)
    models = TextModels(mesh, config)
    quotas = quotas or Quotas(config.key_limits)
    key = CapsuleKey.read(config.capsule_key) if config.capsule_key else None
    answering = Answering(mesh, config, metrics, quotas, tracing, key)
    understanding = Understanding(models, config)
    generating = Generating(config, understanding, answering, quotas)
    replaying = Replaying(mesh, models, answering)
    endpoints = Endpoints(config, metrics, models, quotas)
    refusals = Refusals()
    prefix = prefix_of(config.root_path)
    server = ServerEndpoints(mesh, config, metrics, view, prefix)
    handlers = _stored_handlers(generating)
    pooled = pooled_handlers(mesh, config, quotas, models, metrics.pooling)
    stored: list[Route] = []
    work: StoreWork | None = None
    if store is not None:
        runs = Runs(store, mesh, handlers, metrics, window=config.resume_window, ttl=config.store_ttl)
        lines = line_handlers(generating, pooled)
        batches = batch_runs(store.database, mesh, config, metrics, lines)
        stored = stored_routes(runs, config, models, handlers) + batch_routes(batches, config)
        work = StoreWork(runs, batches)
    routes = stored + _routes(generating, replaying, endpoints, server)
    routes += ollama_routes(OllamaGenerating(understanding, answering, models), config, models)
    routes += [Route(path, handler, methods=["POST"]) for path, handler in pooled.items()]
    routes.append(Route(KEYS_PATH, PublishedKeys([key.public] if key is not None else []).get))
    routes += dashboard.routes() if dashboard is not None else ()
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(Counting, counts=metrics.http, handlers=Handlers(routes)),
            *middleware(config, refusals, routes),
        ],
        exception_handlers=exception_handlers(),
    )
    app.state.refusals = refusals
    app.state.prefix = prefix
    app.state.work = work
    app.state.models = models
    app.router.redirect_slashes = False  # to a scheme and a host that a proxy in front may not have
    return app


def _stored_handlers(generating: Generating) -> dict[str, Handler]:
    """Handlers whose answers may be stored, by the name of their API."""
    return {
        "chat": generating.chat,
        "completions": generating.completions,
        "messages": generating.messages,
        "responses": generating.responses,
    }


def _routes(
    generating: Generating, replaying: Replaying, endpoints: Endpoints, server: ServerEndpoints
) -> list[Route]:
    """Routes of all endpoints but the dashboard's."""
    return [
        Route("/v1/completions", generating.completions, methods=["POST"]),
        Route("/v1/chat/completions", generating.chat, methods=["POST"]),
        Route("/invocations", generating.invocations, methods=["POST"]),
        Route("/v1/responses", generating.responses, methods=["POST"]),
        Route("/v1/responses/input_tokens", generating.input_tokens, methods=["POST"]),
        Route("/v1/responses/{id}", server.not_kept, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", server.not_kept, methods=["POST"]),
        Route("/v1/responses/{id}/input_items", server.not_kept, methods=["GET"]),
        Route("/v1/streams/{id}", server.not_kept, methods=["GET"]),
        Route("/v1/messages", generating.messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", generating.count_tokens, methods=["POST"]),
        Route("/v1/chat/completions/render", generating.render_chat, methods=["POST"]),
        Route("/v1/completions/render", generating.render_completion, methods=["POST"]),
        Route("/inference/v1/generate", generating.tokens, methods=["POST"]),
        Route("/skyrl/v1/generate", generating.tokens_with_experts, methods=["POST"]),
        Route("/finish_session", server.nothing, methods=["POST"]),
        Route("/generate", generating.native, methods=["POST", "PUT"]),
        Route("/v1/replay", replaying.replay, methods=["POST"]),
        Route("/v1/loads", endpoints.loads, methods=["GET"]),
        Route("/v1/models", endpoints.models, methods=["GET"]),
        Route("/v1/models/{name:path}", endpoints.model, methods=["GET"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
        Route("/tokenizer_info", endpoints.tokenizer_info, methods=["GET"]),
        Route("/get_load", endpoints.get_load, methods=["GET"]),
        Route("/load", endpoints.load, methods=["GET"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/health_generate", server.health, methods=["GET"]),
        Route("/livez", server.alive, methods=["GET"]),
        Route("/ping", server.health, methods=["GET", "POST"]),
        Route("/version", server.version, methods=["GET"]),
        Route("/server_info", server.info, methods=["GET"]),
        Route("/is_sleeping", server.is_sleeping, methods=["GET"]),
        Route("/is_scaling_elastic_ep", server.scales, methods=["POST"]),
        Route("/fault_tolerance/status", server.faults, methods=["GET"]),
        Route("/openapi.json", server.openapi, methods=["GET"]),
        Route("/metrics", server.exposition, methods=["GET"]),
    ]


def exception_handlers() -> dict[Any, Callable[[Request, Exception], Awaitable[Response]]]:
    """Exception handlers that answer each error in the API's own form."""
    return {
        ApiError: _on_api_error,
        MeshError: _on_mesh_error,
        ClientGone: _on_client_gone,
        HTTPException: _on_http_exception,
        OSError: _on_os_error,
        Exception: _on_unexpected,
    }


class _NoAnswer(Response):
    """Response that sends nothing, for a client that is gone."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _refused(request, error)


async def _on_mesh_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, MeshError)
    return _refused(request, from_mesh(error))


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return _NoAnswer()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer Starlette's errors: unknown path, or method not allowed."""
    assert isinstance(error, HTTPException)
    path, prefix = request.url.path, request.app.state.prefix
    message = f"{request.method} {prefix}{path}: {error.detail.rstrip('.')}."
    if error.status_code == 404:
        message = not_there(path, prefix)
    return _refused(request, ApiError(error.status_code, message, headers=dict(error.headers or {})))


async def _on_os_error(request: Request, error: Exception) -> Response:
    """Answer 503 where the host lacks files or memory, else as unexpected."""
    if shortage_of(error) is None:
        raise error
    return _refused(request, short_of(error))


async def _on_unexpected(request: Request, error: Exception) -> Response:
    return _refused(request, unexpected())


def _refused(request: Request, error: ApiError) -> Response:
    return error_response(error, request.scope, request.app.state.refusals)
