"""Reading a request's body: bounded in size and in time, then decoded into a struct."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Receive

from router.config import HttpConfig
from router.errors import ApiError, ClientGone, bad_request, refuse
from router.http.json_values import num_values, too_many

DRAIN_FACTOR = 8
"""A body too large is read and discarded up to so many times the limit.

A client that is still sending would not see an answer that comes with a closed connection.
"""

FIELD_OF_ERROR = re.compile(r"\$\.(\w+)|field `(\w+)`")

FLOAT_FOR_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")

HALF_A_CHARACTER = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]{0,5}\Z)")
"""The first half of a surrogate pair, with no room behind it for the second."""

SMALL = 50_000
"""Body size in bytes below which values need not be counted."""

MOST_WITH_POINT = 65_536
"""Most values of a body in which integers may be written with a point.

Such a body is decoded again, in Python.
"""

GIVEN_BODY = "given_body"
"""Attribute of a request's state: its JSON body, where this router made it."""

CLOSE = {"connection": "close"}

Body = TypeVar("Body", bound=msgspec.Struct)


async def read_body(request: Request, config: HttpConfig, *, any_type: bool = False) -> bytes:
    """Read the whole body; sets ``request.state.arrival`` once it is complete.

    ``any_type``: no Content-Type is wrong, unless a web page sends it.

    Raises:
        ApiError: it is no JSON (400), compressed (415), too large (413) or too slow (408).
        ClientGone: the client hung up while sending.
    """
    max_bytes, timeout = config.max_request_bytes, config.request_timeout
    given: bytes | None = getattr(request.state, GIVEN_BODY, None)
    if given is not None and len(given) <= max_bytes:
        request.state.arrival = time.perf_counter()
        return given
    _check_type(request.headers, any_type=any_type)
    _check_encoding(request.headers)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        waits_for_us = request.headers.get("expect", "").lower() == "100-continue"
        if waits_for_us or int(declared) > DRAIN_FACTOR * max_bytes:
            raise _too_large(max_bytes)
    try:
        async with asyncio.timeout(timeout):
            body = await _receive_all(request.receive, max_bytes)
    except TimeoutError as error:
        raise ApiError(408, f"The body did not arrive within {timeout:g} seconds.", headers=CLOSE) from error
    request.state.arrival = time.perf_counter()
    return body


async def _receive_all(receive: Receive, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size <= max_bytes:
            chunks.append(chunk)
        if size > max_bytes:
            chunks.clear()
        if size > DRAIN_FACTOR * max_bytes or (size > max_bytes and not message.get("more_body", False)):
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _check_type(headers: Headers, *, any_type: bool) -> None:
    """Refuse bodies that web pages of other origins can send without a CORS check.

    Browsers send forms, plain text, and bytes without a type to any address without asking; JSON they do not.
    """
    content_type = headers.get("content-type")
    is_page = "origin" in headers or headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if content_type is None and is_page:
        refuse("Web pages must say that the body is JSON (Content-Type: application/json).", "Content-Type")
    if content_type is None or (any_type and not is_page):
        return
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        refuse(f"The body must be JSON (Content-Type: application/json), not {media_type!r}.", "Content-Type")


def _check_encoding(headers: Headers) -> None:
    encoding = headers.get("content-encoding", "").strip()
    if encoding and encoding.lower() != "identity":
        raise ApiError(
            415,
            f"Compressed bodies are not read (Content-Encoding: {encoding[:40]}): send it as it is.",
            param="Content-Encoding",
            headers={"accept-encoding": "identity"},
        )


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"The body exceeds {max_bytes} bytes.", headers=CLOSE)


def decoder(kind: type[Body]) -> Callable[[bytes], Body]:
    """A function that reads a JSON body as ``kind``.

    Whole numbers may be written with a point, as some languages do. A large body is read in a thread
    (:func:`router.http.large_bodies.run_sized`): counting its values takes long as well.
    """
    decode = msgspec.json.Decoder(kind).decode

    def read(body: bytes) -> Body:
        if len(body) > SMALL and (many := too_many(body)):
            raise bad_request(f"The body holds more than {many}.")
        try:
            try:
                return decode(body)
            except msgspec.ValidationError as error:
                if not FLOAT_FOR_INTEGER.match(str(error)) or num_values(body) > MOST_WITH_POINT:
                    raise
            return _read_floats(msgspec.json.decode(body), kind)
        except msgspec.ValidationError as error:
            raise bad_request(str(error), _field_of(error)) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise bad_request(f"The body is not valid JSON: {_why(body, error)}") from error
        except RecursionError as error:
            raise bad_request("The body is nested too deeply.") from error

    return read


def _why(body: bytes, error: Exception) -> str:
    """The error with its place in the whole body."""
    if isinstance(error, UnicodeDecodeError):
        try:
            body.decode()
        except UnicodeDecodeError as whole:
            return f"byte {whole.start} (0x{body[whole.start]:02x}) is not UTF-8: {whole.reason}"
    elif half := HALF_A_CHARACTER.search(body):  # with so little behind it, the library calls it truncated
        return f"half of a surrogate pair stands alone (byte {half.start()})"
    return str(error)


def _read_floats(given: Any, kind: type[Body]) -> Body:
    """A body converted to ``kind``; whole-numbered floats are accepted where integers are expected."""
    rounded: set[str] = set()
    while True:
        try:
            return msgspec.convert(given, kind, str_keys=True)
        except msgspec.ValidationError as error:
            field = _field_of(error)
            is_float = FLOAT_FOR_INTEGER.match(str(error)) and isinstance(given, dict)
            if not is_float or field is None or field not in given or field in rounded:
                raise
            rounded.add(field)
            given[field] = _rounded(given[field])


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _field_of(error: msgspec.ValidationError) -> str | None:
    """Field of the body that a decoding error is about."""
    match = FIELD_OF_ERROR.search(str(error))
    return (match[1] or match[2]) if match else None
