"""The way of nearly every token of an answer: what the mesh brings is dealt with at once, without a task.

The task of a request opens its answer, ends it, and does whatever takes waiting. In between it leaves a
shortcut with its generation (:meth:`router.mesh.Generation.hand_over`).
"""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

from engine.messages import Delta
from router.api.answers import Answer, encode
from router.http.connection import BodyWriter
from router.mesh import Generation, Take, TakeSingle
from router.metrics.meter import Meter
from router.text.output_stream import OutputStream, Piece


class Shortcut(NamedTuple):
    """What is handed over: see :meth:`router.mesh.Generation.hand_over`."""

    take: Take
    take_single: TakeSingle | None = None


class Sink(Protocol):
    """Where the deltas of a request's only sample can go without waiting."""

    def shortcut(self, sample: OutputStream, generation: Generation, meter: Meter) -> Shortcut:
        """For a sample whose text does not end it (no stop strings), after its first delta. The last delta is
        never taken."""
        ...


class BodySink:
    """Writes events into an answer that has begun, while its client keeps up."""

    def __init__(self, answer: Answer, writer: BodyWriter) -> None:
        self._answer = answer
        self._writer = writer

    def __repr__(self) -> str:
        return f"<BodySink of {self._answer!r} to {self._writer!r}>"

    def shortcut(self, sample: OutputStream, generation: Generation, meter: Meter) -> Shortcut:
        """See :class:`Sink`."""
        is_open, write, chunk = self._writer.is_open, self._writer.write, self._answer.chunk

        def take(delta: Delta) -> bool:
            if delta.finish_reason is not None or not is_open():
                return False
            meter.delta(0, generation, time.perf_counter(), delta.times)
            if events := chunk(sample, sample.take(delta), first=False):
                write(events)
            return True

        frame = self._answer.frame(sample) if sample.is_text_alone else None
        return Shortcut(take, None if frame is None else self._of_texts(sample, meter, frame))

    def _of_texts(self, sample: OutputStream, meter: Meter, frame: tuple[bytes, bytes]) -> TakeSingle:
        """Where events differ in their text only. This is what a token costs."""
        is_open, write, fill = self._writer.is_open, self._writer.write, self._writer.filling(*frame)
        detokenizer, tick = sample.detokenizer, meter.ticker(0)

        def take_single(token_id: int, now: float) -> bool:
            json_text = detokenizer.json_texts.get(token_id)
            if json_text is not None:
                if not fill(json_text):
                    return False
                sample.num_tokens += 1
            elif not is_open():
                return False
            elif text := sample.read([token_id]):
                write(frame[0] + encode(text) + frame[1])
            tick(now)
            return True

        return take_single


class ListSink:
    """Keeps pieces for an answer that is given as a whole."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._pieces = pieces

    def __repr__(self) -> str:
        return f"<ListSink of {len(self._pieces)} pieces>"

    def shortcut(self, sample: OutputStream, generation: Generation, meter: Meter) -> Shortcut:
        """See :class:`Sink`."""
        keep, tick = self._pieces.append, meter.ticker(0)

        def take(delta: Delta) -> bool:
            if delta.finish_reason is not None:
                return False
            meter.delta(0, generation, time.perf_counter(), delta.times)
            keep(sample.take(delta))
            return True

        def take_single(token_id: int, now: float) -> bool:
            tick(now)
            token_ids = [token_id]
            keep(Piece(sample.read(token_ids), token_ids))
            return True

        return Shortcut(take, take_single if sample.is_text_alone else None)
