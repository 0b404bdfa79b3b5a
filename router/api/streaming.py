"""Runs the samples of one request, and brings their pieces to the client.

One request may have many samples (prompts times ``n``). What arrives together is written together. When the
client goes, or stops reading, every sample is closed at once. Nothing of a request is left behind, however it
ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from coordinator.process.process import shortage_of
from engine.messages import Delta, FinishReason
from router.api.answers import Answer
from router.api.capsules import with_capsule
from router.api.headers import numerics_changed
from router.api.shortcut import BodyOutlet, ListOutlet, Outlet
from router.api.tracing import UNTRACED, RequestTrace
from router.errors import ApiError, ClientGone, from_mesh, short_of, too_late, unexpected
from router.http.connection import TimedWriter, cut_off, writer_of
from router.http.quotas import Lease
from router.mesh import Generation, Mesh, MeshError
from router.metrics.meter import Meter
from router.metrics.metrics import Metrics
from router.text.output_stream import OutputStream, Piece

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

Batch = list[tuple[OutputStream, Piece]]
Write = Callable[[bytes], Coroutine[Any, Any, None]]


class RequestRun:
    """The samples of one request, ready to be generated."""

    def __init__(
        self,
        mesh: Mesh,
        metrics: Metrics,
        samples: Sequence[OutputStream],
        arrival: float,
        timeout: float | None = None,
        trace: RequestTrace = UNTRACED,
    ) -> None:
        """``arrival``: when the request came, on the clock of ``time.perf_counter``.

        The answer must be complete ``timeout`` seconds later.
        """
        self.samples = samples
        self._mesh = mesh
        self._metrics = metrics
        self._arrival = arrival
        self._timeout = timeout
        self._trace = trace
        self.refused = False
        """The mesh refused a sample, and no token was generated."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.samples)} samples>"

    @contextlib.asynccontextmanager
    async def deadline(self) -> AsyncIterator[None]:
        """Context that is cancelled when the request's time is over.

        Raises:
            ApiError: it was cancelled (504).
        """
        if self._timeout is None:
            yield
            return
        left = self._arrival + self._timeout - time.perf_counter()
        try:
            async with asyncio.timeout(left) as timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise too_late(self._timeout) from error

    async def pieces(self, outlet: Outlet | None = None) -> AsyncGenerator[Batch, None]:
        """Pieces of the samples as they come, until all have finished.

        While the reader waits, deltas of a request's only sample may go to the ``outlet`` instead.

        Raises:
            MeshError: the mesh does not take a sample.
            ApiError: a sample failed.
        """
        if not any(sample.needs_mesh for sample in self.samples):
            yield self._echoes()
            return
        meter = Meter(self._metrics, self.samples, self._arrival)
        generations: list[Generation] = []
        unfinished = len(self.samples)
        try:
            for position, sample in enumerate(self.samples):
                generations.append(self._mesh.generate(sample.prompt))
                meter.begin(position, generations[position])
            if len(self.samples) == 1:
                # The same as below in fewer steps.
                (sample,), (generation,) = self.samples, generations
                hands_over = outlet is not None and not sample.may_stop
                async for delta in generation:
                    piece = self._take(meter, 0, generation, delta, time.perf_counter())
                    yield [(sample, piece)]
                    if piece.finish_reason is not None:
                        return
                    if outlet is not None and hands_over:  # not before there is more than one
                        generation.hand_over(outlet.sink(sample, generation, meter))
                        hands_over = False
                raise ApiError(500, "The request ended without a last token.")
            async with contextlib.aclosing(merged(generations)) as batches:
                async for batch in batches:
                    now = time.perf_counter()
                    pieces: Batch = []
                    for position, delta in batch:
                        sample = self.samples[position]
                        if sample.finish_reason is not None:
                            continue
                        piece = self._take(meter, position, generations[position], delta, now)
                        pieces.append((sample, piece))
                        unfinished -= piece.finish_reason is not None
                    yield pieces
                    if not unfinished:
                        return
            raise ApiError(500, "The request ended without a last token.")
        except (MeshError, ApiError) as error:
            self.refused = isinstance(error, MeshError) and not any(
                sample.num_tokens for sample in self.samples
            )
            for sample in self.samples:
                sample.finish_reason = sample.finish_reason or FinishReason.ERROR
            raise
        finally:
            for generation in generations:
                generation.close()
            ended = time.perf_counter()
            meter.close(ended, len(generations))
            self._trace.end(self.samples, self._arrival, meter.first_at, ended)

    def _take(self, meter: Meter, position: int, generation: Generation, delta: Delta, now: float) -> Piece:
        """The piece that a delta gives; a sample that has its last one is closed."""
        sample = self.samples[position]
        if not sample.num_tokens:
            sample.fingerprint = generation.fingerprint
            sample.known_changes = generation.numerics_changes
        if delta.token_ids:  # else it is an error
            meter.delta(position, generation, now, delta.times)
        piece = sample.take(delta)
        if piece.finish_reason is not None:
            generation.close()
        return piece

    def _echoes(self) -> Batch:
        """Pieces of prompts that are only echoed, which count like other requests."""
        meter = Meter(self._metrics, self.samples, self._arrival)
        nothing = Delta(0, [], FinishReason.LENGTH)
        pieces = [(sample, sample.take(nothing)) for sample in self.samples]
        ended = time.perf_counter()
        meter.close(ended, len(self.samples))
        self._trace.end(self.samples, self._arrival, None, ended)
        return pieces

    async def outputs(self) -> list[list[Piece]]:
        """All pieces of each sample, in the order of the samples. Raises as :meth:`pieces`."""
        outputs: list[list[Piece]] = [[] for _ in self.samples]
        async with contextlib.aclosing(self.pieces(ListOutlet(outputs[0]))) as batches:
            async for batch in batches:
                for sample, piece in batch:
                    outputs[sample.index].append(piece)
        return outputs


class Call(RequestRun):
    """A run whose client gets an answer."""

    def __init__(
        self,
        mesh: Mesh,
        metrics: Metrics,
        samples: Sequence[OutputStream],
        answer: Answer,
        arrival: float,
        timeout: float | None = None,
        lease: Lease | None = None,
        trace: RequestTrace = UNTRACED,
        capsule: Callable[[], bytes] | None = None,
    ) -> None:
        """``capsule`` makes the capsule of the finished samples, if the client asked for one."""
        super().__init__(mesh, metrics, samples, arrival, timeout, trace)
        self.answer = answer
        self._lease = lease
        self._capsule = capsule

    def whole(self, outputs: Sequence[Sequence[Piece]]) -> bytes:
        """Body of the answer, from the pieces of each sample."""
        body = self.answer.whole(outputs)
        return body if self._capsule is None else with_capsule(body, self._capsule())

    async def closing(self) -> bytes:
        """The last events of the answer's stream."""
        if self._capsule is None:
            return self.answer.closing()
        return self.answer.closing_with(await made_of(self.samples, self._capsule))

    def end(self) -> None:
        """End the lease of the client's quota, however the request ended."""
        if self._lease is not None:
            self._lease.end(sum(sample.num_tokens for sample in self.samples), refused=self.refused)


async def whole_answer(call: Call, receive: Receive) -> bytes:
    """Run a request to its end; returns the body of its answer.

    Raises:
        MeshError, ApiError: it cannot be answered.
        ClientGone: the client has disconnected.
    """

    async def run() -> bytes:
        async with call.deadline():
            outputs = await call.outputs()
            return await made_of(call.samples, lambda: call.whole(outputs))

    try:
        return await unless_gone(receive, run())
    finally:
        call.end()


class EventStream(Response):
    """A streamed answer, whose status goes out with the first tokens.

    An early failure still has its own status. With ``keep_alive`` a comment goes out when nothing has for so
    many seconds, for proxies that would close the connection. The status goes with the first comment, and a
    later failure is an event.
    """

    def __init__(self, call: Call, *, send_timeout: float = SEND_TIMEOUT, keep_alive: float = 0.0) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(EVENT_STREAM)
        self._call = call
        self._send_timeout = send_timeout
        self._keep_alive = keep_alive
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
            outlet = BodyOutlet(self._call.answer, writer) if writer is not None else None
            await unless_gone(receive, self._run(send, outlet), self._is_stuck, self._send_timeout / 4)
        except ClientGone:
            cut_off(scope)
        finally:
            self._call.end()

    def _is_stuck(self) -> bool:
        since = self._waits_since
        return since is not None and time.perf_counter() - since > self._send_timeout

    async def _run(self, send: Send, outlet: Outlet | None) -> None:
        started = False
        writing = asyncio.Lock()

        async def write(body: bytes, more: bool = True) -> None:
            nonlocal started
            async with writing:
                self._waits_since = time.perf_counter()
                if not started:
                    changes = (change for sample in self._call.samples for change in sample.known_changes)
                    self.headers.update(numerics_changed(changes))
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    started = True
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": more})
                self._waits_since = None
                self._wrote_at = time.perf_counter()

        try:
            async with self._call.deadline(), self._kept_alive(write):
                await self._write_pieces(write, outlet)
            last = await self._call.closing()
        except Exception as error:
            if not started:
                raise
            last = self._call.answer.failure(_as_api_error(error))
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
                    await write(b": keep-alive\n\n")

        commenting = asyncio.create_task(comment())
        try:
            yield
        finally:
            commenting.cancel()
            await asyncio.gather(commenting, return_exceptions=True)

    async def _write_pieces(self, write: Write, outlet: Outlet | None) -> None:
        begun: set[int] = set()
        async with contextlib.aclosing(self._call.pieces(outlet)) as batches:
            async for batch in batches:
                opened = [sample for sample, _ in batch if sample.index not in begun]
                await write(await made_of(opened, partial(self._events, batch, begun)))

    def _events(self, batch: Batch, begun: set[int]) -> bytes:
        events = []
        for sample, piece in batch:
            events.append(self._call.answer.chunk(sample, piece, first=sample.index not in begun))
            begun.add(sample.index)
        return b"".join(events)


async def made_of(samples: Sequence[OutputStream], make: Callable[[], bytes]) -> bytes:
    """A part of an answer with all pieces of these samples so far."""
    is_heavy = sum(sample.num_values for sample in samples) > HEAVY
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


async def merged(generations: Sequence[Generation]) -> AsyncGenerator[list[tuple[int, Delta]], None]:
    """Deltas of all generations in batches, each with its generation's position."""
    arrived: list[tuple[int, Delta]] = []
    wake = asyncio.Event()

    async def pump(position: int) -> None:
        async for delta in generations[position]:
            arrived.append((position, delta))
            wake.set()

    pumps = [asyncio.create_task(pump(position)) for position in range(len(generations))]
    for task in pumps:
        task.add_done_callback(lambda _: wake.set())
    try:
        while True:
            await wake.wait()
            wake.clear()
            if arrived:
                batch, arrived[:] = arrived[:], []
                yield batch
            ended = [task for task in pumps if task.done()]
            for task in ended:
                task.result()
            if len(ended) == len(pumps) and not arrived:
                return
    finally:
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
