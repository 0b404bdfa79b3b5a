"""Token sinks of an answer, which write or keep each token without waking a task.

The task of a request opens its answer, ends it, and does all that has to wait. After the first delta it hands
a sink over to its generation (:meth:`router.mesh.Generation.hand_over`), which gets nearly every token.
"""

from __future__ import annotations

import time
from typing import Protocol

from engine.messages import Delta
from router.api.answers import Answer, encode
from router.http.connection import BodyWriter
from router.mesh import Generation, TokenSink
from router.metrics.meter import Meter
from router.text.output_stream import OutputStream, TextPiece

MOST_KEPT = 64
"""Tokens whose text is read together."""


class Outlet(Protocol):
    """Destination of a request's only sample: makes the sink once the sample has begun."""

    def sink(self, sample: OutputStream, generation: Generation, meter: Meter) -> TokenSink:
        """The sink of a sample without stop strings, after its first delta.

        It refuses the last delta, which is the reader's.
        """
        ...


class BodyOutlet:
    """Outlet into an answer that has begun."""

    def __init__(self, answer: Answer, writer: BodyWriter) -> None:
        self._answer = answer
        self._writer = writer

    def __repr__(self) -> str:
        return f"<BodyOutlet of {self._answer!r} to {self._writer!r}>"

    def sink(self, sample: OutputStream, generation: Generation, meter: Meter) -> TokenSink:
        """See :class:`Outlet`."""
        frame = self._answer.frame(sample) if sample.is_text_alone else None
        if frame is None:
            return EventSink(self._answer, self._writer, sample, generation, meter)
        return TextEventSink(self._answer, self._writer, sample, generation, meter, frame)


class ListOutlet:
    """Outlet into a list, for an answer that is sent as a whole."""

    def __init__(self, pieces: list[TextPiece]) -> None:
        self._pieces = pieces

    def __repr__(self) -> str:
        return f"<ListOutlet of {len(self._pieces)} pieces>"

    def sink(self, sample: OutputStream, generation: Generation, meter: Meter) -> TokenSink:
        """See :class:`Outlet`."""
        return PieceSink(self._pieces, sample, generation, meter)


class EventSink:
    """A :class:`router.mesh.TokenSink` that writes events while the client keeps up."""

    def __init__(
        self, answer: Answer, writer: BodyWriter, sample: OutputStream, generation: Generation, meter: Meter
    ) -> None:
        self._answer = answer
        self._writer = writer
        self._sample = sample
        self._generation = generation
        self._meter = meter

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._sample!r} to {self._writer!r}>"

    def take(self, delta: Delta) -> bool:
        """See :class:`router.mesh.TokenSink`."""
        if delta.finish_reason is not None or not self._writer.is_open():
            return False
        self._meter.delta(0, self._generation, time.perf_counter(), delta.times)
        if events := self._answer.chunk(self._sample, self._sample.take(delta), first=False):
            self._writer.write(events)
        return True

    def take_token(self, token_id: int, _now: float) -> bool:
        """See :class:`router.mesh.TokenSink`."""
        return self.take(Delta(0, [token_id]))


class TextEventSink(EventSink):
    """Event sink of a sample whose events differ in their text only.

    Its :meth:`take_token` is what nearly every token costs.
    """

    def __init__(
        self,
        answer: Answer,
        writer: BodyWriter,
        sample: OutputStream,
        generation: Generation,
        meter: Meter,
        frame: tuple[bytes, bytes],
    ) -> None:
        """``frame``: bytes before and after the text of each event."""
        super().__init__(answer, writer, sample, generation, meter)
        self._before, self._after = frame
        self._part = writer.part(*frame)
        self._detokenizer = sample.detokenizer
        self._gaps = meter.gaps(0)

    def take_token(self, token_id: int, now: float) -> bool:
        """See :class:`router.mesh.TokenSink`."""
        json_text = self._detokenizer.json_texts.get(token_id)
        if json_text is not None:
            if not self._part.write(json_text):
                return False
            self._sample.num_tokens += 1
        elif not self._writer.is_open():
            return False
        elif text := self._sample.read([token_id]):
            self._writer.write(self._before + encode(text) + self._after)
        if self._gaps is not None:
            self._gaps.tick(now)
        return True


class PieceSink:
    """A :class:`router.mesh.TokenSink` that keeps pieces."""

    def __init__(
        self, pieces: list[TextPiece], sample: OutputStream, generation: Generation, meter: Meter
    ) -> None:
        self._pieces = pieces
        self._sample = sample
        self._generation = generation
        self._meter = meter
        self._gaps = meter.gaps(0)
        self._is_text_alone, self._keep = sample.is_text_alone, sample.keep

    def __repr__(self) -> str:
        return f"<PieceSink of {self._sample!r}, {len(self._pieces)} pieces>"

    def take(self, delta: Delta) -> bool:
        """See :class:`router.mesh.TokenSink`."""
        if delta.finish_reason is not None:
            return False
        self._meter.delta(0, self._generation, time.perf_counter(), delta.times)
        self._pieces.append(self._sample.take(delta))
        return True

    def take_token(self, token_id: int, now: float) -> bool:
        """See :class:`router.mesh.TokenSink`."""
        if self._is_text_alone:
            if self._gaps is not None:
                self._gaps.tick(now)
            if self._keep(token_id) == MOST_KEPT:
                self._pieces.append(self._sample.take(Delta(0, [])))
            return True
        return self.take(Delta(0, [token_id]))
