"""Runner of batch lines at the handlers of their endpoints, below all other work."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import Counter
from collections.abc import Mapping

from router.api.stored_terms import StoredTerms
from router.batches.batch_mesh import BatchMesh, pauses
from router.batches.line_window import LineWindow
from router.batches.lines import BatchLine, LineAnswer, answered, digest_of, request_id_of
from router.errors import ApiError, error_body, from_mesh, unexpected
from router.ids import repeat_ids
from router.mesh import Mesh, MeshError
from router.metrics.request_histograms import CountedRequests
from router.stored.replayed_body import Handler, inner_request

logger = logging.getLogger(__name__)


class LineRunner:
    """Answers lines, however often instances refuse them; a wrong line's error is its answer."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        mesh: Mesh,
        counts: CountedRequests,
        events: Counter[str],
        per_instance: int,
    ) -> None:
        """``handlers``: by endpoint. ``counts`` are of requests, without their times; ``events`` of lines.

        All lines together have ``per_instance`` requests on the mesh for each instance.
        """
        self._handlers = handlers
        self._counts = counts.without_times()
        self._events = events
        self._mesh = mesh
        self._window = LineWindow(mesh, per_instance)
        self._turns = itertools.count()

    def __repr__(self) -> str:
        return f"<LineRunner {dict(self._events)}>"

    async def answer(self, batch: str, created: int, number: int, line: BatchLine) -> LineAnswer:
        """The answer of a line, the same at each try.

        Its ids, its time and its seeds come from its batch.
        """
        mesh = BatchMesh(self._mesh, self._window, next(self._turns), self._events)
        for pause in pauses():
            try:
                status, body = 200, await self._tried(mesh, batch, created, number, line)
                break
            except ApiError as raised:
                error, is_final = raised, raised.status not in (429, 503)
            except MeshError as raised:
                error, is_final = from_mesh(raised), raised.is_final or raised.status != 503
            except Exception:
                logger.exception("line %d of batch %s failed", number, batch)
                error, is_final = unexpected(), True
            if is_final:
                status, body = error.status, error_body(error)
                break
            self._events["line_tried_again"] += 1
            await asyncio.sleep(pause)
        found = answered(batch, number, line.custom_id, status, body)
        self._events["line_failed" if found.is_error else "line_done"] += 1
        return found

    async def _tried(self, mesh: BatchMesh, batch: str, created: int, number: int, line: BatchLine) -> bytes:
        seed = int.from_bytes(digest_of(batch, number)[:7])
        repeat_ids(seed)
        terms = StoredTerms(
            created,
            seed,
            mesh,
            is_whole=True,
            is_limited=False,
            counts=self._counts,
            wait_for_turn=self._window.spread,
        )
        request = inner_request(bytes(line.body), request_id_of(batch, number), 0, terms, path=line.url)
        return bytes((await self._handlers[line.url](request)).body)
