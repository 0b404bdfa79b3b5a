"""HTTP response that streams the events of a run, from a number on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from router.api.streaming import EVENT_STREAM, SEND_TIMEOUT, unless_gone
from router.errors import ClientGone
from router.http.connection import cut_off
from router.stored.runs import RouterEnds, Run

KEEP_ALIVE = b": keep-alive\n\n"


class LogResponse(Response):
    """Stream of a run's events behind the first ``count``.

    The run does not end with it. An error before the first event has its own status.
    """

    def __init__(self, run: Run, count: int, *, keep_alive: float = 0.0, send_timeout: float = SEND_TIMEOUT):
        self.status_code = 200
        self.background = None
        self.init_headers(EVENT_STREAM)
        self._run = run
        self._count = count
        self._keep_alive = keep_alive
        self._send_timeout = send_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with self._run.reader():
                await unless_gone(receive, self._stream(send))
        except (ClientGone, RouterEnds, TimeoutError):
            cut_off(scope)

    async def _stream(self, send: Send) -> None:
        async def bounded(message: Message) -> None:
            async with asyncio.timeout(self._send_timeout):  # for a client that takes nothing
                await send(message)

        started = False
        async with contextlib.aclosing(self._bodies()) as bodies:
            async for body in bodies:
                if not started:
                    started = True
                    headers = self._run.headers or self.raw_headers
                    await bounded({"type": "http.response.start", "status": 200, "headers": headers})
                await bounded({"type": "http.response.body", "body": body, "more_body": True})
        if not started:
            await bounded({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        await bounded({"type": "http.response.body", "body": b"", "more_body": False})

    async def _bodies(self) -> AsyncGenerator[bytes, None]:
        async for body in self._run.log.after(self._count, self._keep_alive or None):
            yield body or KEEP_ALIVE
