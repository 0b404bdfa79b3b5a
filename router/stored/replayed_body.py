"""Requests whose body has been read already, for the handler that reads it again."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Message


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
