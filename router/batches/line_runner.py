"""Runner of batch lines at the handlers of their endpoints, below all other work."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping

import msgspec

from engine.messages import BATCH_PRIORITY
from router.api.stored_terms import StoredTerms
from router.batches.lines import BatchLine, LineAnswer, answered, digest_of, request_id_of
from router.errors import ApiError, error_body, from_mesh, unexpected
from router.ids import repeat_ids
from router.mesh import Generates, Generation, Mesh, MeshError, Prompt, ServedModel
from router.metrics.request_histograms import CountedRequests
from router.stored.replayed_body import Handler, inner_request

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds before a line that no instance takes is tried again."""


class BatchMesh:
    """The mesh for batch lines: it takes their samples in the lowest class of priority."""

    def __init__(self, mesh: Generates) -> None:
        self._mesh = mesh

    @property
    def model(self) -> ServedModel | None:
        """See :class:`router.mesh.Mesh`."""
        return self._mesh.model

    def generate(self, prompt: Prompt) -> Generation:
        """See :class:`router.mesh.Mesh`."""
        return self._mesh.generate(msgspec.structs.replace(prompt, priority=BATCH_PRIORITY))


class LineRunner:
    """Answers lines, however often instances refuse them; a wrong line's error is its answer."""

    def __init__(
        self, handlers: Mapping[str, Handler], mesh: Mesh, counts: CountedRequests, events: Counter[str]
    ) -> None:
        """``handlers``: by endpoint. ``counts`` are of requests, without their times; ``events`` of lines."""
        self._handlers = handlers
        self._mesh = mesh
        self._counts = counts
        self._events = events

    def __repr__(self) -> str:
        return f"<LineRunner {dict(self._events)}>"

    async def answer(self, batch: str, created: int, number: int, line: BatchLine) -> LineAnswer:
        """The answer of a line, the same at each try.

        Its ids, its time and its seeds come from its batch.
        """
        pause = FIRST_PAUSE
        while True:
            try:
                status, body = 200, await self._tried(batch, created, number, line)
                break
            except (ApiError, MeshError) as raised:
                error = raised if isinstance(raised, ApiError) else from_mesh(raised)
            except Exception:
                logger.exception("line %d of batch %s failed", number, batch)
                error = unexpected()
            if error.status not in (429, 503):
                status, body = error.status, error_body(error)
                break
            self._events["line_tried_again"] += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        found = answered(batch, number, line.custom_id, status, body)
        self._events["line_failed" if found.is_error else "line_done"] += 1
        return found

    async def _tried(self, batch: str, created: int, number: int, line: BatchLine) -> bytes:
        seed = int.from_bytes(digest_of(batch, number)[:7])
        repeat_ids(seed)
        terms = StoredTerms(
            created,
            seed,
            BatchMesh(self._mesh),
            is_whole=True,
            is_limited=False,
            counts=(own := CountedRequests()),
        )
        request = inner_request(bytes(line.body), request_id_of(batch, number), 0, terms)
        try:
            response = await self._handlers[line.url](request)
        finally:
            self._counts.take(own)
        return bytes(response.body)
