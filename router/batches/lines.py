"""Lines of batch files: requests, and their answers in OpenAI's format (pure)."""

from __future__ import annotations

import hashlib
from typing import NoReturn

import msgspec

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
POOLED = ("/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank")
ENDPOINTS = (*GENERATING, *POOLED)
"""Endpoints that lines may name."""
MOST_ID = 512
"""Most characters of a ``custom_id``."""


class BatchLine(msgspec.Struct, frozen=True):
    """One request of a batch file."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class LineProblem(Exception):
    """Reason why a batch file cannot be used, with OpenAI's word for it."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class LineAnswer(msgspec.Struct, frozen=True):
    """Line of an output file, or of an error file."""

    is_error: bool
    text: bytes
    """The line, without its end."""


class _Streamed(msgspec.Struct):
    stream: bool | None = None


class _HttpResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _LineError(msgspec.Struct):
    code: str
    message: str


class _AnsweredLine(msgspec.Struct):
    id: str
    custom_id: str
    response: _HttpResponse | None
    error: _LineError | None


_decode = msgspec.json.Decoder(BatchLine).decode
_read_streamed = msgspec.json.Decoder(_Streamed).decode


def read_line(text: bytes, endpoint: str | None = None) -> BatchLine:
    """The request of a line; ``endpoint``: the one that it must name.

    Raises:
        LineProblem: it is no such request.
    """
    try:
        line = _decode(text)
        streamed = _read_streamed(line.body).stream
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise LineProblem("invalid_json_line", f"This line is no request of a batch: {error}") from error
    if not 0 < len(line.custom_id) <= MOST_ID:
        _refuse("invalid_custom_id", f"custom_id must have 1 to {MOST_ID} characters.", "custom_id")
    if line.method != "POST":
        _refuse("invalid_method", f"method must be POST, got {line.method[:20]!r}.", "method")
    if line.url not in ENDPOINTS:
        _refuse("invalid_url", f"url must be one of {', '.join(ENDPOINTS)}, got {line.url[:80]!r}.", "url")
    if endpoint is not None and line.url != endpoint:
        _refuse("mismatched_url", f"url must be the batch's endpoint, {endpoint}.", "url")
    if streamed:
        _refuse("invalid_body", "Lines of a batch cannot be streamed.", "body.stream")
    return line


def _refuse(code: str, message: str, param: str) -> NoReturn:
    raise LineProblem(code, message, param)


def digest_of(batch: str, number: int) -> bytes:
    """Bytes that are a line's own, and the same at each router."""
    return hashlib.sha256(f"{batch} {number}".encode()).digest()


def request_id_of(batch: str, number: int) -> str:
    """Request id of a line."""
    return digest_of(batch, number).hex()[:32]


def answered(batch: str, number: int, custom_id: str, status: int, body: bytes) -> LineAnswer:
    """The line of a request that has an HTTP response."""
    request_id = request_id_of(batch, number)
    response = _HttpResponse(status, request_id, msgspec.Raw(body))
    line = _AnsweredLine(f"batch_req_{request_id}", custom_id, response, None)
    return LineAnswer(status >= 400, msgspec.json.encode(line))


def unanswered(batch: str, number: int, custom_id: str, code: str, message: str) -> LineAnswer:
    """The line of a request that was not run."""
    line = _AnsweredLine(
        f"batch_req_{request_id_of(batch, number)}", custom_id, None, _LineError(code, message)
    )
    return LineAnswer(True, msgspec.json.encode(line))
