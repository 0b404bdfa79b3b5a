"""Errors in Anthropic's shape.

That is ``{"type": "error", "error": {type, message}}``, with ``details`` where there are any.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from router.errors import ApiError

PREFIX = "/v1/messages"
"""Prefix of paths whose clients expect this shape."""

KIND_OF_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class _Reason(msgspec.Struct):
    error_code: str


class _Error(msgspec.Struct):
    type: str
    message: str
    details: _Reason | UnsetType = UNSET


class _Body(msgspec.Struct, tag_field="type", tag="error"):
    error: _Error


def error_body(error: ApiError) -> bytes:
    kind = KIND_OF_STATUS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    details = UNSET if error.reason is None else _Reason(error.reason)
    return msgspec.json.encode(_Body(_Error(kind, str(error), details)))


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, media_type="application/json")
