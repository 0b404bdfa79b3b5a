"""The way of nearly every token of an answer: what the mesh brings is dealt with at once, without a task.

The task of a request opens its answer, ends it, and does whatever takes waiting. In between it leaves a
shortcut with its generation (:meth:`router.mesh.Generation.hand_over`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from engine.messages import Delta
from router.answers import Answer, encode
from router.connection import BodyWriter
from router.mesh import Generation
from router.metrics import Meter
from router.sample import Piece, Sample

Take = Callable[[Delta], bool]
"""What is handed over: see :meth:`router.mesh.Generation.hand_over`."""


class Sink(Protocol):
    """Where the deltas of a request's only sample can go without waiting."""

    def shortcut(self, sample: Sample, generation: Generation, meter: Meter) -> Take:
        """For a sample whose text does not end it (no stop strings). The last delta is never taken."""
        ...


class BodySink:
    """Writes events into an answer that has begun, while its client keeps up."""

    def __init__(self, answer: Answer, writer: BodyWriter) -> None:
        self._answer = answer
        self._writer = writer

    def __repr__(self) -> str:
        return f"<BodySink of {self._answer!r} to {self._writer!r}>"

    def shortcut(self, sample: Sample, generation: Generation, meter: Meter) -> Take:
        """See :class:`Sink`."""
        frame = self._answer.frame(sample) if sample.is_text_alone else None
        if frame is not None:
            return self._of_texts(sample, generation, meter, frame)
        is_open, write, chunk = self._writer.is_open, self._writer.write, self._answer.chunk

        def take(delta: Delta) -> bool:
            if delta.finish_reason is not None or not is_open():
                return False
            meter.delta(0, generation, time.perf_counter(), delta.times)
            if events := chunk(sample, sample.take(delta), first=False):
                write(events)
            return True

        return take

    def _of_texts(
        self, sample: Sample, generation: Generation, meter: Meter, frame: tuple[bytes, bytes]
    ) -> Take:
        """The same where events differ in their text only. This is what a token costs."""
        is_open, fill, read = self._writer.is_open, self._writer.filling(*frame), sample.read
        observe, clock = meter.delta, time.perf_counter

        def take(delta: Delta) -> bool:
            if delta.finish_reason is not None or delta.times is not None or not is_open():
                return False  # times: the first one of an instance, which has more to tell
            observe(0, generation, clock())
            if text := read(delta.token_ids):
                fill(encode(text))
            return True

        return take


class ListSink:
    """Keeps pieces for an answer that is given as a whole."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def __repr__(self) -> str:
        return f"<ListSink of {len(self._pieces)} pieces>"

    def shortcut(self, sample: Sample, generation: Generation, meter: Meter) -> Take:
        """See :class:`Sink`."""

        def take(delta: Delta) -> bool:
            if delta.finish_reason is not None:
                return False
            meter.delta(0, generation, time.perf_counter(), delta.times)
            self._pieces.append(sample.take(delta))
            return True

        return take
