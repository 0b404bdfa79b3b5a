"""Errors in Ollama's shape: ``{"error": message}``."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from router.errors import ApiError

PREFIX = "/api/"
"""Prefix of paths whose clients expect this shape."""


class OllamaError(msgspec.Struct):
    """Body of an error, and the last line of a stream that fails."""

    error: str


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(OllamaError(str(error)))


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, media_type="application/json")
