"""Errors in the shape of text-embeddings-inference: ``{"error": message, "error_type": kind}``."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from router.errors import ApiError

PATHS = frozenset({"/embed", "/predict", "/similarity"})
"""Paths whose clients expect this shape; at ``/rerank`` those that send ``texts``."""
RERANK = "/rerank"
TEXTS = re.compile(rb'"texts"\s*:')
"""Field by which a body is known before it is decoded.

Within a string its quotes would have backslashes before them.
"""
KINDS = {429: "Overloaded", 503: "Unhealthy"}
"""``error_type`` by status; below 500 else Validation, and Backend from there."""


class TeiError(msgspec.Struct):
    """Body of an error."""

    error: str
    error_type: str


def expect_by_body(request: Request, body: bytes) -> None:
    """Answer later errors of a request in this shape if its body has the field."""
    request.state.has_tei_errors = request.scope["path"].endswith(RERANK) and bool(TEXTS.search(body))


def has_shape(scope: Scope) -> bool:
    """Whether errors of a request are answered in this shape."""
    return scope["path"] in PATHS or bool(scope.get("state", {}).get("has_tei_errors"))


def error_response(error: ApiError) -> Response:
    """The response, with the status that the other APIs have, too."""
    kind = KINDS.get(error.status, "Validation" if error.status < 500 else "Backend")
    body = msgspec.json.encode(TeiError(str(error), kind))
    return Response(body, error.status, error.headers, media_type="application/json")
