"""Feed of the dashboard: frames computed once for all viewers, while there are any.

The first viewer starts the clock, the last one stops it. Each frame is made and encoded once; a viewer that
reads slowly misses frames instead of piling them up, and one that does not read at all is let go.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.streaming import EVENT_STREAM, SEND_TIMEOUT, unless_gone
from router.errors import ApiError, ClientGone
from router.http.connection import cut_off

INTERVAL = 1.0
"""Seconds between two frames."""
MAX_VIEWERS = 64
"""Browsers that follow the feed of one router; more are refused with 503."""


class Feed:
    """Frames for any number of viewers up to :data:`MAX_VIEWERS`."""

    def __init__(
        self, make_frame: Callable[[], bytes], *, interval: float = INTERVAL, max_viewers: int = MAX_VIEWERS
    ) -> None:
        self._make_frame = make_frame
        self._interval = interval
        self._max_viewers = max_viewers
        self._num_viewers = 0
        self._frame = b""
        self._number = 0
        self._fresh = asyncio.Event()
        self._clock: asyncio.Task[None] | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Feed {self._num_viewers} viewers, {self._number} frames>"

    def enter(self) -> None:
        """Take a viewer's place; :meth:`leave` gives it back.

        Raises:
            ApiError: there are too many viewers (503).
        """
        if self._num_viewers >= self._max_viewers:
            raise ApiError(
                503, f"{self._max_viewers} browsers look at the page already.", headers={"retry-after": "5"}
            )
        self._num_viewers += 1

    def leave(self) -> None:
        self._num_viewers -= 1
        if not self._num_viewers and self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def close(self) -> None:
        """End every stream: the process is about to."""
        self._is_closed = True
        self._fresh.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Frames for a viewer that has entered, until :meth:`close`.

        The newest frame comes at once. Then comes each one that is new when the reader asks again.
        """
        if self._clock is None or self._clock.done():
            self._make()
            self._clock = asyncio.create_task(self._tick())
        seen = 0
        while not self._is_closed:
            if self._number == seen:
                await self._fresh.wait()
                continue
            seen = self._number
            yield self._frame

    async def _tick(self) -> None:
        while not self._is_closed:
            await asyncio.sleep(self._interval)
            self._make()

    def _make(self) -> None:
        self._frame = self._make_frame()
        self._number += 1
        self._fresh.set()
        self._fresh = asyncio.Event()
        if self._is_closed:
            self._fresh.set()


class FeedStream(Response):
    """The frames as server-sent events for one viewer, which leaves when the response ends."""

    def __init__(self, feed: Feed, *, send_timeout: float = SEND_TIMEOUT) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(EVENT_STREAM)
        self._feed = feed
        self._send_timeout = send_timeout
        self._waits_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._run(send), self._is_stuck, self._send_timeout / 4)
        except ClientGone:
            cut_off(scope)
        finally:
            self._feed.leave()

    def _is_stuck(self) -> bool:
        since = self._waits_since
        return since is not None and time.perf_counter() - since > self._send_timeout

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with contextlib.aclosing(self._feed.frames()) as frames:
            async for frame in frames:
                self._waits_since = time.perf_counter()
                body = b"data: " + frame + b"\n\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
                self._waits_since = None
        await send({"type": "http.response.body", "body": b"", "more_body": False})
