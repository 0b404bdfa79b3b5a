"""Answers of /v1/messages."""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages import FinishReason
from router.api.answers import Answer, AnswerFacts, encode, named_event
from router.api.anthropic_messages import wire
from router.api.anthropic_messages.errors import error_body
from router.api.items import (
    Closed,
    Item,
    ItemEvent,
    ItemKind,
    ItemSequence,
    Opened,
    TextAdded,
    arguments_object,
)
from router.api.understanding import Understood
from router.errors import ApiError
from router.text.output_stream import OutputStream, TextPiece


class MessageAnswer(Answer):
    """A message of content blocks, each with events of its own in a stream."""

    def __init__(self, understood: Understood, facts: AnswerFacts) -> None:
        super().__init__(facts)
        (self._sample,) = self.samples
        self._sequence = ItemSequence(understood.turn_format.reader(self._sample.prompt_text))
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def whole(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        for piece in outputs[0]:
            self._read(piece)
        return encode(self._message([_block(item, item.text) for item in self._sequence.items]))

    def chunk(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> bytes:
        opening = [wire.MessageStart(self._message([])), wire.Ping()] if first else []
        events = [each for event in self._read(piece) for each in _events_of(event)]
        return b"".join(map(named_event, [*opening, *events]))

    def closing(self) -> bytes:
        delta = wire.StopDelta(self._stop_reason, self._stop_sequence)
        message = wire.MessageDelta(delta, self._message_usage())
        return named_event(message) + named_event(wire.MessageStop())

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    def _read(self, piece: TextPiece) -> list[ItemEvent]:
        ended = piece.finish_reason is not None
        events = self._sequence.read(piece.parts, ended=ended)
        if ended:
            self._stop_reason, self._stop_sequence = self._why_stopped(piece)
        return events

    def _why_stopped(self, piece: TextPiece) -> tuple[str, str | None]:
        if piece.finish_reason == FinishReason.LENGTH:
            return "max_tokens", None
        if isinstance(piece.stop_reason, str):
            return "stop_sequence", piece.stop_reason
        return ("tool_use" if self._sequence.calls_tools else "end_turn"), None

    def _message(self, content: list[wire.Block]) -> wire.Message:
        usage = self._message_usage()
        return wire.Message(self.id, self.model, content, self._stop_reason, self._stop_sequence, usage)

    def _message_usage(self) -> wire.MessageUsage:
        usage = self.usage()
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details else 0
        return wire.MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=cached,
            numerics_changes=usage.numerics_changes,
            weight_version=self.weight_version,
            weight_versions=self.weight_versions,
        )


def _block(item: Item, text: str) -> wire.Block:
    match item.kind:
        case ItemKind.REASONING:
            return wire.ThinkingBlock(text)
        case ItemKind.TEXT:
            return wire.TextBlock(text)
        case ItemKind.CALL:
            return wire.ToolUseBlock(item.call_id, item.name, arguments_object(text))


def _events_of(event: ItemEvent) -> list[wire.MessageEvent]:
    match event:
        case Opened(item):
            return [wire.BlockStart(item.index, _block(item, ""))]
        case TextAdded(item, text):
            return [wire.BlockDelta(item.index, _delta(item, text))]
        case Closed(item):
            signed = [wire.BlockDelta(item.index, wire.SignatureDelta(""))]
            return [*(signed if item.kind is ItemKind.REASONING else []), wire.BlockStop(item.index)]


def _delta(item: Item, text: str) -> wire.TextDelta | wire.ThinkingDelta | wire.InputDelta:
    match item.kind:
        case ItemKind.REASONING:
            return wire.ThinkingDelta(text)
        case ItemKind.TEXT:
            return wire.TextDelta(text)
        case ItemKind.CALL:
            return wire.InputDelta(text)
