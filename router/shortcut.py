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

Put = Callable[[Delta], None]


class Sink(Protocol):
    """Where the deltas of a request's only sample can go without waiting."""

    def is_open(self) -> bool:
        """Whether it takes one now. If not, the delta goes through the request's task."""
        ...

    def put_for(self, sample: Sample) -> Put:
        """What takes the deltas of a sample while this is open: never the last one."""
        ...


class BodySink:
    """Writes events into an answer that has begun."""

    def __init__(self, answer: Answer, writer: BodyWriter) -> None:
        self._answer = answer
        self._write = writer.write
        self.is_open = writer.is_open

    def __repr__(self) -> str:
        return f"<BodySink of {self._answer!r}, {'open' if self.is_open() else 'closed'}>"

    def put_for(self, sample: Sample) -> Put:
        """See :class:`Sink`. Where events differ in their text only, the rest of them is made once."""
        answer, write = self._answer, self._write
        frame = answer.frame(sample) if sample.is_text_alone else None

        def put(delta: Delta) -> None:
            if events := answer.chunk(sample, sample.take(delta), first=False):
                write(events)

        if frame is None:
            return put
        before, after = frame

        def put_text(delta: Delta) -> None:
            if delta.num_cached_tokens or delta.prompt_logprobs is not None:  # the first one after a resume
                put(delta)
            elif text := sample.read(delta.token_ids):
                write(before + encode(text) + after)

        return put_text


class ListSink:
    """Keeps pieces for an answer that is given as a whole."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def __repr__(self) -> str:
        return f"<ListSink of {len(self._pieces)} pieces>"

    def is_open(self) -> bool:
        return True

    def put_for(self, sample: Sample) -> Put:
        """See :class:`Sink`."""
        return lambda delta: self._pieces.append(sample.take(delta))


def shortcut(sample: Sample, generation: Generation, meter: Meter, sink: Sink) -> Callable[[Delta], bool]:
    """What to hand over for the only sample of a request, whose text does not end it (no stop strings)."""
    is_open, put, clock = sink.is_open, sink.put_for(sample), time.perf_counter

    def take(delta: Delta) -> bool:
        if delta.finish_reason is not None or not is_open():
            return False
        meter.delta(0, generation, clock(), delta.times)
        put(delta)
        return True

    return take
