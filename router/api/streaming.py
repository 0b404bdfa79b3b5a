"""Last stage of a request: its answer, whole or as a stream of events.

What arrives together is written together. When the client goes, or stops reading, every sample is closed at
once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.process.process import shortage_of
from router.api.answers import Answer, json_response
from router.api.headers import numerics_changed
from router.api.request_run import Batch, RequestRun
from router.api.shortcut import BodyOutlet, Outlet
from router.api.stored_terms import WaitForTurn
from router.errors import ApiError, ClientGone, from_mesh, short_of, unexpected
from router.http.connection import TimedWriter, cut_off, writer_of
from router.mesh import MeshError
from router.text.output_stream import OutputStream, TextPiece

logger = logging.getLogger(__name__)

SEND_TIMEOUT = 60.0
"""Seconds that a client may take nothing of its stream."""

HEAVY = 4096
"""Tokens and log-probabilities above which a part of an answer is made in a thread.

Other clients' streams do not wait for it.
"""

EVENT_STREAM = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
"""Headers of a stream.

The last one makes nginx and others pass events on at once.
"""

Result = TypeVar("Result")

Write = Callable[[bytes], Coroutine[Any, Any, None]]


async def whole_response(
    run: RequestRun, answer: Answer, receive: Receive | None, wait_for_turn: WaitForTurn | None = None
) -> Response:
    """An answer that is not streamed. Raises as :func:`whole_answer`."""
    response = json_response(await whole_answer(run, answer.body, receive, wait_for_turn))
    changes = (change for sample in run.samples for change in sample.numerics_changes)
    response.headers.update(numerics_changed(changes))
    return response


async def whole_answer(
    run: RequestRun,
    body_of: Callable[[Sequence[Sequence[TextPiece]]], bytes],
    receive: Receive | None,
    wait_for_turn: WaitForTurn | None = None,
) -> bytes:
    """The body of a request's answer, once the request has run to its end.

    ``body_of`` makes it of the pieces of each sample; before that, one that stop strings may have ended waits
    for its turn. Other ends are the mesh's to spread. ``receive`` is None where no client can hang up.

    Raises:
        MeshError, ApiError: it cannot be answered.
        ClientGone: the client has disconnected.
    """

    async def answer() -> bytes:
        async with run.deadline():
            outputs = await run.outputs()
            if wait_for_turn is not None and any(sample.may_stop for sample in run.samples):
                await wait_for_turn()
            return await made_of(run.samples, lambda: body_of(outputs))

    try:
        return await (answer() if receive is None else unless_gone(receive, answer()))
    finally:
        run.end()


class EventStream(Response):
    """A streamed answer, whose status goes out with the first tokens.

    An early failure still has its own status. With ``keep_alive`` a comment goes out when nothing has for so
    many seconds, for proxies that would close the connection. The status goes with the first comment, and a
    later failure is an event.
    """

    def __init__(
        self, run: RequestRun, answer: Answer, *, send_timeout: float = SEND_TIMEOUT, keep_alive: float = 0.0
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({**EVENT_STREAM, "content-type": answer.content_type})
        self._run = run
        self._answer = answer
        self._send_timeout = send_timeout
        self._keep_alive = keep_alive if answer.comment else 0.0
        self._wrote_at = time.perf_counter()
        self._timed_writer: TimedWriter | None = None
        self._waits_since: float | None = None
        """Start of the write in progress, None if there is none.

        It waits while the client does not take the writes before.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            writer = writer_of(scope)
            if writer is not None and self._keep_alive:
                writer = self._timed_writer = TimedWriter(writer)
            outlet = BodyOutlet(self._answer, writer) if writer is not None else None
            await unless_gone(receive, self._stream(send, outlet), self._is_stuck, self._send_timeout / 4)
        except ClientGone:
            cut_off(scope)
        finally:
            self._run.end()

    def _is_stuck(self) -> bool:
        since = self._waits_since
        return since is not None and time.perf_counter() - since > self._send_timeout

    async def _stream(self, send: Send, outlet: Outlet | None) -> None:
        started = False
        writing = asyncio.Lock()

        async def write(body: bytes, more: bool = True) -> None:
            nonlocal started
            async with writing:
                self._waits_since = time.perf_counter()
                if not started:
                    changes = (change for sample in self._run.samples for change in sample.known_changes)
                    self.headers.update(numerics_changed(changes))
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": more})
                self._waits_since = None
                self._wrote_at = time.perf_counter()

        try:
            async with self._run.deadline(), self._kept_alive(write):
                await self._write_pieces(write, outlet)
            last = await made_of(self._run.samples, self._answer.ending)
        except Exception as error:
            if not started:
                raise
            last = self._answer.failure(_as_api_error(error))
        await write(last, more=False)

    @contextlib.asynccontextmanager
    async def _kept_alive(self, write: Write) -> AsyncIterator[None]:
        if not self._keep_alive:
            yield
            return

        async def comment() -> None:
            while True:
                written_at = self._timed_writer.wrote_at if self._timed_writer else 0.0
                silence_left = max(self._wrote_at, written_at) + self._keep_alive - time.perf_counter()
                if silence_left > 0:
                    await asyncio.sleep(silence_left)
                else:
                    await write(self._answer.comment)

        commenting = asyncio.create_task(comment())
        try:
            yield
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)

    async def _write_pieces(self, write: Write, outlet: Outlet | None) -> None:
        begun: set[int] = set()
        async with contextlib.aclosing(self._run.pieces(outlet)) as batches:
            async for batch in batches:
                opened = [sample for sample, _ in batch if sample.index not in begun]
                await write(await made_of(opened, partial(self._events, batch, begun)))

    def _events(self, batch: Batch, begun: set[int]) -> bytes:
        events = []
        for sample, piece in batch:
            events.append(self._answer.chunk(sample, piece, first=sample.index not in begun))
            begun.add(sample.index)
        return b"".join(events)


async def made_of(samples: Sequence[OutputStream], make: Callable[[], bytes]) -> bytes:
    """Part of an answer, made in a thread if these samples have much for it."""
    is_heavy = sum(sample.num_values for sample in samples) > HEAVY
    is_heavy = is_heavy or any(sample.records_images for sample in samples)
    return await asyncio.to_thread(make) if is_heavy else make()


def _as_api_error(error: Exception) -> ApiError:
    """The error that ends a stream which has begun."""
    if isinstance(error, MeshError):
        return from_mesh(error)
    if isinstance(error, ApiError):
        return error
    if shortage_of(error) is not None:
        return short_of(error)
    logger.error("a stream ended with an unexpected error", exc_info=error)
    return unexpected()


async def unless_gone(
    receive: Receive,
    work: Coroutine[Any, Any, Result],
    is_stuck: Callable[[], bool] = lambda: False,
    interval: float | None = None,
) -> Result:
    """Do the work unless the client disconnects, or does not read (``is_stuck``).

    Raises:
        ClientGone: the work was given up.
    """
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_disconnected(receive))
    try:
        while not working.done():
            await asyncio.wait((working, watching), timeout=interval, return_when=asyncio.FIRST_COMPLETED)
            if not working.done() and (watching.done() or is_stuck()):
                raise ClientGone
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
