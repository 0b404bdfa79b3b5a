"""Fourth stage of a request: its samples run on the mesh.

One request may have many samples (prompts times ``n``). Nothing of a request is left behind, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from engine.messages import Delta, FinishReason
from router.api.shortcut import ListOutlet, Outlet
from router.api.tracing import UNTRACED, RequestTrace
from router.capsule import CapsuleAdapter, with_adapter
from router.errors import ApiError, too_late
from router.http.quotas import Lease
from router.mesh import Generates, Generation, MeshError
from router.metrics.meter import Meter
from router.metrics.request_histograms import CountedRequests
from router.text.output_stream import OutputStream, TextPiece

Batch = list[tuple[OutputStream, TextPiece]]
"""Pieces that came together, each with its sample."""


class RequestRun:
    """Run of one request: its samples on the mesh, with deadline, span and quota."""

    def __init__(
        self,
        mesh: Generates,
        metrics: CountedRequests,
        samples: Sequence[OutputStream],
        arrival: float,
        timeout: float | None = None,
        trace: RequestTrace = UNTRACED,
        lease: Lease | None = None,
    ) -> None:
        """``arrival``: when the request came, on the clock of ``time.perf_counter``.

        The answer must be complete ``timeout`` seconds later. ``lease``: the part of its client's quota that
        it holds until :meth:`end`.
        """
        self.samples = samples
        self._mesh = mesh
        self._metrics = metrics
        self._arrival = arrival
        self._timeout = timeout
        self._trace = trace
        self._lease = lease
        self._refused = False
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
            self._refused = isinstance(error, MeshError) and not any(
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

    def _take(
        self, meter: Meter, position: int, generation: Generation, delta: Delta, now: float
    ) -> TextPiece:
        """The piece that a delta gives; a sample that has its last one is closed."""
        sample = self.samples[position]
        if not sample.num_tokens:
            sample.first_token_at = now
            sample.fingerprint = self._fingerprint(generation, sample.prompt.adapter)
            sample.first_class = generation.first_class
            sample.known_changes = generation.numerics_changes
            sample.known_weights = generation.weight_spans
        if delta.token_ids:  # else it is an error
            meter.delta(position, generation, now, delta.times)
        piece = sample.take(delta)
        if piece.finish_reason is not None:
            generation.close()
        return piece

    def _fingerprint(self, generation: Generation, adapter: str) -> str | None:
        """``system_fingerprint`` of a sample; ``adapter``: digest of its low-rank adapter, if it has one."""
        model, numerics = self._mesh.model, generation.fingerprint
        if not adapter or not numerics or model is None:
            return numerics
        return with_adapter(numerics, CapsuleAdapter(adapter, model.ranks))

    def _echoes(self) -> Batch:
        """Empty pieces for prompts that are echoed alone; metrics count them as requests."""
        meter = Meter(self._metrics, self.samples, self._arrival)
        nothing = Delta(0, [], FinishReason.LENGTH)
        pieces = [(sample, sample.take(nothing)) for sample in self.samples]
        ended = time.perf_counter()
        meter.close(ended, len(self.samples))
        self._trace.end(self.samples, self._arrival, None, ended)
        return pieces

    async def outputs(self) -> list[list[TextPiece]]:
        """All pieces of each sample, in the order of the samples. Raises as :meth:`pieces`."""
        outputs: list[list[TextPiece]] = [[] for _ in self.samples]
        async with contextlib.aclosing(self.pieces(ListOutlet(outputs[0]))) as batches:
            async for batch in batches:
                for sample, piece in batch:
                    outputs[sample.index].append(piece)
        return outputs

    def end(self) -> None:
        """End the lease of the client's quota, however the request ended."""
        if self._lease is not None:
            self._lease.end(sum(sample.num_tokens for sample in self.samples), refused=self._refused)


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
