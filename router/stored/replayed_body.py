"""Requests that no connection brings to a handler: read before, or made here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Scope

from router.api.stored_terms import StoredTerms
from router.http.body import GIVEN_BODY

Handler = Callable[[Request], Awaitable[Response]]


def inner_request(
    body: bytes,
    request_id: str,
    key: int,
    terms: StoredTerms,
    headers: Sequence[tuple[bytes, bytes]] = (),
    path: str = "/",
) -> Request:
    """A request whose client never hangs up; ``key``: number of its API key."""
    scope: Scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"), (b"x-request-id", request_id.encode()), *headers
        ],
        "state": {"key": key, "request_id": request_id, "stored": terms, GIVEN_BODY: body},
    }  # fmt: skip
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.get_running_loop().create_future()  # nobody hangs up
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(scope, receive)


def with_body(request: Request, body: bytes) -> Request:
    """The same request, whose body can be read again."""
    receive, sent = request.receive, False

    async def again() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, again)
