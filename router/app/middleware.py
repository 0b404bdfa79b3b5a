"""Middleware of every endpoint: slashes, keys, other sites, proxy prefix, request ids."""

from __future__ import annotations

import hmac
import ipaddress
import re
import uuid
from collections.abc import Collection, Sequence
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from coordinator.addresses import LOOPBACK_NAMES, is_loopback
from coordinator.process.process import REQUEST
from router import errors
from router.api.anthropic_messages import errors as anthropic_errors
from router.api.ollama import errors as ollama_errors
from router.api.validation import usable_id
from router.app.dashboard.page import open_paths
from router.app.refusals import Refusals
from router.config import HttpConfig
from router.errors import ApiError
from router.http.request_path import without_prefix, without_slash
from router.pooled import tei_errors
from router.signing.keys import KEYS_PATH

PROBES = frozenset({"/health", "/health_generate", "/ping", "/livez"})
"""Paths that probes may use with any host name of this server.

Their answers hold nothing else.
"""
OPEN_PATHS = PROBES | {"/version", "/metrics", "/load", "/is_sleeping", "/openapi.json", KEYS_PATH}
"""Paths without authentication: nothing there costs or changes anything."""

HOST = re.compile(r"(?:\[(?P<ipv6>[^\]]*)\]|(?P<name>[^:]*))(?::\d*)?")


def middleware(config: HttpConfig, refusals: Refusals, routes: Sequence[Route]) -> list[Middleware]:
    """Middleware of the endpoint, outermost first.

    A browser asks what it may do (CORS) before it presents a key, so CORS comes first.
    """
    found = [Middleware(Slashes), Middleware(RequestIds, tells=config.enable_request_id_headers)]
    if config.allowed_origins:
        found.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.allowed_origins,
                allow_methods=config.allowed_methods,
                allow_headers=config.allowed_headers,
                allow_credentials=config.allow_credentials,
            )
        )
    found.append(Middleware(Options, routes=routes))
    opened = open_paths() if config.dashboard else ()
    if keys := config.keys:
        found.append(Middleware(KeyCheck, keys=keys, refusals=refusals, open_paths=opened))
    elif config.uds is None and is_loopback(config.host):  # no page reaches a Unix socket
        found.append(Middleware(HostCheck, refusals=refusals))
    return found


class RequestIds:
    """Gives each request an id: the client's own, a handler's choice, or a new one.

    It stands in all log lines about the request, and, where asked for, in the answer's X-Request-Id.
    """

    def __init__(self, app: ASGIApp, *, tells: bool = False) -> None:
        """``tells``: whether answers carry the header X-Request-Id."""
        self._app = app
        self._tells = tells

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        given = Headers(scope=scope).get("x-request-id", "")
        state["request_id"] = given if usable_id(given) else uuid.uuid4().hex
        REQUEST.set(state["request_id"])
        if not self._tells:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-request-id", state["request_id"].encode())
                message = {**message, "headers": [*message["headers"], header]}
            await send(message)

        await self._app(scope, receive, send_with_id)


class RootPath:
    """Removes the prefix of a proxy (``--root-path``) from paths.

    Stands before everything that looks at paths.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := without_prefix(scope["path"], self._prefix)) != scope["path"]:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class Slashes:
    """Serves a path with a slash at its end like the one without.

    A redirect would lead to a scheme and a host that a proxy in front may not have, and many clients do not
    follow it with a POST.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (path := without_slash(scope["path"])) != scope["path"]:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)


class Options:
    """Answers OPTIONS with the methods of a path, for any client.

    Proxies check so whether a server is there (HAProxy: ``OPTIONS /``). Pages that ask what they may do hear
    it from what allows them something.
    """

    def __init__(self, app: ASGIApp, routes: Sequence[Route]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        is_asked = scope["type"] == "http" and scope["method"] == "OPTIONS" and not _is_preflight(scope)
        if is_asked and (methods := self._methods(scope["path"])):
            app = Response(status_code=204, headers={"allow": ", ".join(sorted(methods))})
        await app(scope, receive, send)

    def _methods(self, path: str) -> set[str]:
        """Methods of a path; empty for a path that does not exist."""
        found = {"OPTIONS"} if path == "/" else set()
        for route in self._routes:
            if route.path_regex.match(path):
                found |= {"OPTIONS", *(route.methods or ())}
        return found


def _is_preflight(scope: Scope) -> bool:
    return any(name == b"access-control-request-method" for name, _ in scope["headers"])


class KeyCheck:
    """Lets requests in that present one of the keys, as ``Authorization: Bearer <key>`` or ``X-Api-Key``."""

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], refusals: Refusals, open_paths: Collection[str] = ()
    ) -> None:
        """``open_paths`` need no key, besides :data:`OPEN_PATHS`."""
        self._app = app
        self._refusals = refusals
        self._open = OPEN_PATHS.union(open_paths)
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open:
            await self._app(scope, receive, send)
            return
        if (number := self._number(scope)) is not None:
            scope.setdefault("state", {})["key"] = number
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "Give a valid API key (Authorization: Bearer ...).", headers={"www-authenticate": "Bearer"}
        )
        await error_response(error, scope, self._refusals)(scope, receive, send)

    def _number(self, scope: Scope) -> int | None:
        """Index of the presented key; all are compared, so that timing reveals nothing."""
        headers = dict(reversed(scope["headers"]))  # the first of each name
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        presented = [token.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"")]
        matches = [
            any([hmac.compare_digest(each, key) for each in presented])  # noqa: C419
            for key in self._keys
        ]
        return matches.index(True) if True in matches else None


class HostCheck:
    """Refuses requests for other sites' names (DNS rebinding), on loopback without keys.

    Probes may ask for any.
    """

    def __init__(self, app: ASGIApp, refusals: Refusals) -> None:
        self._app = app
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        is_guarded = scope["type"] == "http" and scope["path"] not in PROBES
        if is_guarded and (host := foreign_host(scope)) is not None:
            message = (
                f"Without --api-key this server answers for localhost and for addresses, not for {host!r}: "
                "give it a key, or have the proxy in front of it say Host: localhost."
            )
            app = error_response(ApiError(421, message), scope, self._refusals)
        await app(scope, receive, send)


def foreign_host(scope: Scope) -> str | None:
    """Host that a request names, if it is neither an address nor localhost.

    A site may have its name mean 127.0.0.1 once its page is loaded (DNS rebinding). The browser then takes us
    for that site, and only the header Host still tells. An address is what it is."""
    for header, value in scope["headers"]:
        if header == b"host" and not _is_here(value):
            host: str = value.decode("latin-1")
            return host
    return None


@lru_cache(maxsize=64)  # clients say the same again and again, and to read an address takes 20 us
def _is_here(value: bytes) -> bool:
    match = HOST.fullmatch(value.decode("latin-1"))
    if match is None:
        return False
    host = match["ipv6"] or match["name"] or "localhost"
    name = host.lower().rstrip(".")
    if name in LOOPBACK_NAMES or name.endswith(".localhost"):
        return True  # no site can have these names
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def error_response(error: ApiError, scope: Scope, refusals: Refusals) -> Response:
    """Error response in the form of the API that the path belongs to.

    The log has it, too.
    """
    path = scope["path"]
    refusals.add(scope["method"], path, error)
    if path.startswith(anthropic_errors.PREFIX):
        return anthropic_errors.error_response(error)
    if path.startswith(ollama_errors.PREFIX):
        return ollama_errors.error_response(error)
    if tei_errors.has_shape(scope):
        return tei_errors.error_response(error)
    return errors.error_response(error)
