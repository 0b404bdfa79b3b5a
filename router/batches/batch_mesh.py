"""The mesh for batch lines: lowest priority, and a bounded number of requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from coordinator.numerics import Numerics
from engine.messages import BATCH_PRIORITY, Delta
from router.batches.line_window import LineWindow
from router.dispatch.ledger import MAX_FRUITLESS
from router.mesh import (
    Generates,
    Generation,
    MeshError,
    NumericsSwitch,
    Prompt,
    ServedModel,
    TokenSink,
    WeightSpan,
)

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
"""Seconds before what no instance takes is tried again."""


def pauses() -> Iterator[float]:
    """Seconds before each further try."""
    pause = FIRST_PAUSE
    while True:
        yield pause
        pause = min(2 * pause, LONGEST_PAUSE)


class LineLosses:
    """Instances that ended under one line, over all its tries on the mesh.

    The mesh counts those of one try, which ends where instances take long to come back.
    """

    def __init__(self) -> None:
        self.count = 0

    def __repr__(self) -> str:
        return f"<LineLosses {self.count}>"

    def judged(self, error: MeshError, before: int) -> MeshError:
        """The error of a try, final if the line has ended too many instances.

        ``before``: their count when the try began. Samples of one try may have lost the same instance.
        """
        self.count = max(self.count, before + error.num_lost)
        if error.status != 503 or error.is_final or self.count < MAX_FRUITLESS:
            return error
        text = f"{self.count} instances ended while they computed the request"
        return MeshError(503, error.kind, text, is_final=True)


class BatchMesh:
    """The mesh for one batch line, whose requests wait for places in the window."""

    def __init__(self, mesh: Generates, window: LineWindow, turn: int, events: Counter[str]) -> None:
        """``turn``: number of the line, of which earlier ones go first; ``events`` counts further tries."""
        self._mesh = mesh
        self._window = window
        self._turn = turn
        self._events = events
        self._losses = LineLosses()

    @property
    def model(self) -> ServedModel | None:
        """See :class:`router.mesh.Mesh`."""
        return self._mesh.model

    def generate(self, prompt: Prompt) -> Generation:
        """See :class:`router.mesh.Mesh`; sent once there is a place, and again if no instance takes it."""
        prompt = msgspec.structs.replace(prompt, priority=BATCH_PRIORITY)
        return LineGeneration(self._mesh, prompt, self._window, self._turn, self._events, self._losses)


class LineGeneration:
    """A :class:`router.mesh.Generation` that is begun when it is read, in a place of the window."""

    def __init__(
        self,
        mesh: Generates,
        prompt: Prompt,
        window: LineWindow,
        turn: int,
        events: Counter[str],
        losses: LineLosses,
    ) -> None:
        self._mesh = mesh
        self._prompt = prompt
        self._window = window
        self._turn = turn
        self._events = events
        self._losses = losses
        self._lost_before = losses.count
        self._generation: Generation | None = None
        self._has_place = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<LineGeneration of {self._prompt.request_id}, begun: {self._generation is not None}>"

    @property
    def rank(self) -> int | None:
        """See :class:`router.mesh.Generation`."""
        return None if self._generation is None else self._generation.rank

    @property
    def fingerprint(self) -> str | None:
        """See :class:`router.mesh.Generation`."""
        return None if self._generation is None else self._generation.fingerprint

    @property
    def first_class(self) -> Numerics | None:
        """See :class:`router.mesh.Generation`."""
        return None if self._generation is None else self._generation.first_class

    @property
    def numerics_changes(self) -> Sequence[NumericsSwitch]:
        """See :class:`router.mesh.Generation`."""
        return () if self._generation is None else self._generation.numerics_changes

    @property
    def weight_spans(self) -> Sequence[WeightSpan]:
        """See :class:`router.mesh.Generation`."""
        return () if self._generation is None else self._generation.weight_spans

    def hand_over(self, sink: TokenSink) -> None:
        """See :class:`router.mesh.Generation`; before the first delta there is nothing to hand over."""
        if self._generation is not None:
            self._generation.hand_over(sink)

    def close(self) -> None:
        """See :class:`router.mesh.Generation`."""
        self._is_closed = True
        self._leave()

    def _leave(self) -> None:
        """Give the place back, with nothing left on the mesh."""
        if self._generation is not None:
            self._generation.close()
        if self._has_place:
            self._has_place = False
            self._window.leave()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        has_begun = False
        for pause in pauses():
            await self._window.enter(self._turn)
            self._has_place = True
            if self._is_closed:
                self._leave()
                return
            try:
                generation = self._generation = self._mesh.generate(self._prompt)
                async for delta in generation:
                    has_begun = True
                    if delta.finish_reason is not None:
                        self._leave()  # others need the place while this one waits for its turn
                        await self._window.spread()
                    yield delta
                return
            except MeshError as raised:
                error = self._losses.judged(raised, self._lost_before)
                if error.status != 503 or error.is_final or has_begun:
                    raise error from raised.__cause__
                self._lost_before += raised.num_lost
            self._leave()
            self._events["line_tried_again"] += 1
            await asyncio.sleep(pause)
