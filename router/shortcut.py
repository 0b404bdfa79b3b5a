"""The way of nearly every token of an answer: what the mesh brings is dealt with at once, without a task.

The task of a request opens its answer, ends it, and does whatever takes waiting. In between it leaves a
shortcut with its generation (:meth:`router.mesh.Generation.hand_over`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from engine.messages import Delta
from router.answers import Answer
from router.connection import BodyWriter
from router.mesh import Generation
from router.metrics import Meter
from router.sample import Piece, Sample


class Sink(Protocol):
    """Where pieces of a request with one sample can go without waiting."""

    @property
    def is_open(self) -> bool:
        """Whether it takes one now. If not, the piece goes through the request's task."""
        ...

    def put(self, sample: Sample, piece: Piece) -> None:
        """The next piece, never the last one; only while open."""
        ...


class BodySink:
    """Writes the events of pieces into an answer that has begun."""

    def __init__(self, answer: Answer, writer: BodyWriter) -> None:
        self._answer = answer
        self._writer = writer

    def __repr__(self) -> str:
        return f"<BodySink of {self._answer!r} to {self._writer!r}>"

    @property
    def is_open(self) -> bool:
        return self._writer.is_open

    def put(self, sample: Sample, piece: Piece) -> None:
        if events := self._answer.chunk(sample, piece, first=False):
            self._writer.write(events)


class ListSink:
    """Keeps pieces for an answer that is given as a whole."""

    is_open = True

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def __repr__(self) -> str:
        return f"<ListSink of {len(self._pieces)} pieces>"

    def put(self, sample: Sample, piece: Piece) -> None:
        self._pieces.append(piece)


def shortcut(sample: Sample, generation: Generation, meter: Meter, sink: Sink) -> Callable[[Delta], bool]:
    """What to hand over for the only sample of a request. The last delta is the task's, and so are all where
    any may turn out to be the last one (stop strings)."""

    def take(delta: Delta) -> bool:
        if delta.finish_reason is not None or sample.may_stop or not sink.is_open:
            return False
        meter.delta(0, generation, time.perf_counter(), delta.times)
        sink.put(sample, sample.take(delta))
        return True

    return take
