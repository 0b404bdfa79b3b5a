"""Errors that clients receive: one exception, one body.

Every error of the HTTP layer has the body ``{"error": {message, type, param, code}}``. ``Retry-After`` is
sent where waiting helps. OpenAI clients retry 408, 409, 429 and 5xx by themselves. Where a retry cannot help,
``x-should-retry: false`` prevents it.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import NoReturn

import msgspec
from starlette.responses import Response

from engine.messages import Delta
from router.mesh import MeshError

MAX_LOGGED = 300
"""Characters of an error's message in the log."""
ITEM = re.compile(r"\binput\[(\d{1,9})\]", re.ASCII)
"""An item of a conversation, in an error."""


class ErrorKind(enum.StrEnum):
    """The ``type`` of an error body."""

    BAD_REQUEST = "BadRequestError"
    AUTHENTICATION = "AuthenticationError"
    NOT_FOUND = "NotFoundError"
    METHOD_NOT_ALLOWED = "MethodNotAllowedError"
    REQUEST_TIMEOUT = "RequestTimeoutError"
    REQUEST_TOO_LARGE = "RequestTooLargeError"
    UNSUPPORTED_MEDIA_TYPE = "UnsupportedMediaTypeError"
    INTERNAL = "InternalServerError"
    UNAVAILABLE = "ServiceUnavailableError"
    TOO_LATE = "TimeoutError"
    RATE_LIMIT = "RateLimitError"


KIND_OF_STATUS = {
    400: ErrorKind.BAD_REQUEST,
    401: ErrorKind.AUTHENTICATION,
    404: ErrorKind.NOT_FOUND,
    405: ErrorKind.METHOD_NOT_ALLOWED,
    408: ErrorKind.REQUEST_TIMEOUT,
    413: ErrorKind.REQUEST_TOO_LARGE,
    415: ErrorKind.UNSUPPORTED_MEDIA_TYPE,
    429: ErrorKind.RATE_LIMIT,
    500: ErrorKind.INTERNAL,
    503: ErrorKind.UNAVAILABLE,
    504: ErrorKind.TOO_LATE,
}


class ApiError(Exception):
    """Error response to a client.

    ``param`` names the field at fault as the client spells it. ``reason`` is a word that Anthropic's clients
    act on. ``logged`` stands in the log in place of a message that may quote the prompt.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        reason: str | None = None,
        headers: dict[str, str] | None = None,
        logged: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or KIND_OF_STATUS.get(status) or HTTPStatus(status).phrase
        self.param = param
        self.reason = reason
        self.logged = logged
        self.headers = headers or {}
        if "retry-after" in self.headers:
            self.headers.setdefault("x-should-retry", "true")

    def __repr__(self) -> str:
        return f"<ApiError {self.status} {self.kind}: {self}>"


class AsSent(ApiError):
    """Error that names fields as the client sent them; :func:`in_terms_of` leaves it as it is."""


class ClientGone(Exception):
    """The client hung up, or stopped reading: there is no one to answer."""


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def refuse(message: str, param: str | None = None) -> NoReturn:
    """End the request with a 400."""
    raise bad_request(message, param)


def refuse_misnamed(request: object, names: Mapping[str, str]) -> None:
    """Refuse set fields of other endpoints; ``names``: what to use here instead.

    Values that ask for nothing pass: clients send them to every endpoint.
    """
    for name, instead in names.items():
        if getattr(request, name, None) not in (None, False, 0, "", [], {}, {"type": "text"}):
            raise AsSent(400, f"{name} is not supported here: {instead}.", param=name)


@contextlib.contextmanager
def in_terms_of(names: Mapping[str, str]) -> Iterator[None]:
    """Raise errors about fields again under the names that the client knows them by."""
    try:
        yield
    except AsSent:
        raise
    except ApiError as error:
        message = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), str(error))
        param = names.get(error.param, error.param) if error.param else None
        raise _renamed(error, message, param) from error


@contextlib.contextmanager
def behind_items(count: int, field: str) -> Iterator[None]:
    """Raise errors about a conversation's items again by their places in the input.

    ``count``: items before the client's own input, which it named by ``field``.
    """

    def place(found: re.Match[str]) -> str:
        number = int(found[1])
        return f"{field}[{number}]" if number < count else f"input[{number - count}]"

    try:
        yield
    except ApiError as error:
        if not count:
            raise
        message, param = (ITEM.sub(place, text) for text in (str(error), error.param or ""))
        raise _renamed(error, message, param or None) from error


def _renamed(error: ApiError, message: str, param: str | None) -> ApiError:
    return ApiError(
        error.status,
        message,
        kind=error.kind,
        param=param,
        reason=error.reason,
        headers=error.headers,
        logged=error.logged,
    )


def from_mesh(error: MeshError) -> ApiError:
    """Error response for a request that the mesh did not take."""
    headers = {}
    if error.retry_after is not None:
        headers = {"retry-after": str(error.retry_after)}
    return ApiError(error.status, str(error), kind=error.kind, param=error.param, headers=headers)


def from_failure(delta: Delta) -> ApiError:
    """Error response for a request that failed at its instance.

    Nothing of the mesh does that (who loses an instance goes on at another), only what was asked for: a
    grammar that turns out to be too complex, or to lead nowhere.
    """
    message = delta.error or "the request failed"
    return ApiError(400, message, headers={"x-should-retry": "false"})


def too_late(timeout: float) -> ApiError:
    """Error response after the client's own time limit (504)."""
    message = f"The answer took longer than the {timeout:g} seconds that the request allows."
    return ApiError(504, message, param="timeout", headers={"x-should-retry": "false"})


def short_of(error: BaseException) -> ApiError:
    """Error response while the host lacks files or memory (503)."""
    message = "The server is short of files or memory now: try again in a moment."
    return ApiError(503, message, headers={"retry-after": "1"}, logged=f"{message[:-1]} ({error}).")


def unexpected() -> ApiError:
    """Error response for an internal error; the log has the details."""
    return ApiError(500, "Internal server error.")


class _Details(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    error: _Details


def error_body(error: ApiError) -> bytes:
    return msgspec.json.encode(
        ErrorBody(_Details(message=str(error), type=error.kind, param=error.param, code=error.status))
    )


def error_response(error: ApiError) -> Response:
    return Response(error_body(error), error.status, error.headers, media_type="application/json")


def one_line(text: str, most: int) -> str:
    """Text from a client, shortened and escaped to fit into one line."""
    cut = text if len(text) <= most else text[:most] + "..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in cut)
