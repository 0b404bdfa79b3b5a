"""Handlers of the dashboard: its files without authentication, its feed with the endpoint's key."""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.api.streaming import EVENT_STREAM
from router.app.dashboard.feed import Feed, FeedStream
from router.app.dashboard.frame import DashboardMesh, frame_of
from router.errors import ApiError
from router.faults import Faults

STATIC = Path(__file__).parent / "static"
PREFIX = "/dashboard/"
FEED_PATH = "/dashboard/feed"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; "
    "base-uri 'none'; form-action 'none'; object-src 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
"""Headers by which browsers load nothing from elsewhere, and show no frame of it."""


@functools.cache
def files() -> dict[str, tuple[bytes, str]]:
    """Content and media type of each file of the page, by URL path."""
    found = {}
    for file in sorted(STATIC.rglob("*")):
        if file.suffix in KINDS:
            name = file.relative_to(STATIC).as_posix()
            path = "/" if name == "index.html" else PREFIX + name
            found[path] = (file.read_bytes(), f"{KINDS[file.suffix]}; charset=utf-8")
    return found


def open_paths() -> frozenset[str]:
    """Paths without authentication: files that are the same for all users."""
    return frozenset(files())


class Dashboard:
    """Handlers of the dashboard of one router."""

    def __init__(
        self,
        mesh: DashboardMesh,
        faults: Callable[[], Faults],
        num_requests: Callable[[], int],
        front_end: int = 0,
    ) -> None:
        encoder = msgspec.json.Encoder()

        def make_frame() -> bytes:
            return encoder.encode(frame_of(mesh, faults(), num_requests(), front_end, time.time()))

        self.feed = Feed(make_frame)

    def __repr__(self) -> str:
        return f"<Dashboard {self.feed!r}>"

    def routes(self) -> list[Route]:
        found = [Route(path, self._file, methods=["GET"]) for path in files()]
        return [*found, Route(FEED_PATH, self._feed, methods=["GET"])]

    async def _file(self, request: Request) -> Response:
        path = request.scope["path"]
        if path not in files():  # a route also takes what has a line break behind it
            raise HTTPException(404)
        content, kind = files()[path]
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = HEADERS | {"etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers | {"content-type": kind})

    async def _feed(self, request: Request) -> Response:
        # A page of another site must not make this one work; browsers say where a request is from.
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            raise ApiError(403, "Only the page of this router may read its feed.")
        if request.method == "HEAD":
            return Response(headers=EVENT_STREAM)
        self.feed.enter()
        return FeedStream(self.feed)
