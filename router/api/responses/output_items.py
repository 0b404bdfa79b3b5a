"""Output items of a response: a turn's items with their ids and tools (pure)."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET

from router.api.items import Item, ItemEvent, ItemKind, ItemSequence
from router.api.logprobs import LogprobShapes
from router.api.responses import wire
from router.api.responses.custom_input import custom_input
from router.api.responses.logprobs import TextLogprobs, by_token
from router.api.responses.tools import ToolName
from router.ids import hex_id
from router.openai_api import TokenLogprob
from router.text.output_stream import TextPiece
from router.turns.assistant_turns import TurnReader

ID_PREFIX = {ItemKind.REASONING: "rs", ItemKind.TEXT: "msg", ItemKind.CALL: "fc"}
CUSTOM_CALL = "ctc"

NO_LOGPROBS: list[TokenLogprob] = []

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"


class OutputItems:
    """Items of one response, as far as they have been generated."""

    def __init__(
        self, reader: TurnReader, names: Mapping[str, ToolName], logprobs: LogprobShapes | None
    ) -> None:
        """``names``: the client's names of its tools, by their names in chat.

        ``logprobs`` shapes the log-probabilities of texts; None if they are not asked for.
        """
        self._sequence = ItemSequence(reader)
        self._names = names
        self._shapes = logprobs
        self._text_logprobs = TextLogprobs()
        self._ids: list[str] = []
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        """Log-probabilities of texts, by the index of their item."""

    def __repr__(self) -> str:
        return f"<OutputItems {self._ids}>"

    @property
    def num_reasoning_tokens(self) -> int:
        return self._sequence.num_reasoning_tokens

    def read(self, piece: TextPiece) -> list[tuple[ItemEvent, list[TokenLogprob]]]:
        """Events of the items for a piece, with the log-probabilities of its shown tokens."""
        ended = piece.finish_reason is not None
        if self._shapes is None:
            found = [(event, NO_LOGPROBS) for event in self._sequence.read(piece.parts, ended=ended)]
        else:
            found = self._read_logprobs(piece, self._shapes, ended=ended)
        for item in self._sequence.items[len(self._ids) :]:
            prefix = CUSTOM_CALL if self.called(item).is_custom else ID_PREFIX[item.kind]
            self._ids.append(f"{prefix}_{hex_id()}")
        return found

    def _read_logprobs(
        self, piece: TextPiece, shapes: LogprobShapes, *, ended: bool
    ) -> list[tuple[ItemEvent, list[TokenLogprob]]]:
        found = []
        parts = list(by_token(piece))
        for position, (part, entries) in enumerate(parts):
            events = self._sequence.read([part], ended=ended and position == len(parts) - 1)
            for event, taken in zip(events, self._text_logprobs.of(part[0], entries, events), strict=True):
                logprobs = shapes.chat(taken).content
                if logprobs:
                    self._logprobs.setdefault(event.item.index, []).extend(logprobs)
                found.append((event, logprobs))
        return found

    def id_of(self, item: Item) -> str:
        return self._ids[item.index]

    def logprobs_of(self, item: Item) -> list[TokenLogprob]:
        return self._logprobs.get(item.index, NO_LOGPROBS)

    def called(self, item: Item) -> ToolName:
        """The client's name of the tool that a call names."""
        return self._names.get(item.name) or ToolName(item.name)

    def status_of(self, item: Item, status: str) -> str:
        """Status of an item of a finished response.

        The last item of an answer cut short was cut with it.
        """
        is_last = item is self._sequence.items[-1]
        return INCOMPLETE if is_last and status != COMPLETED else COMPLETED

    def output(self, status: str) -> list[wire.OutputItem]:
        """All items as they stand in a response of this status."""
        return [self.written(item, self.status_of(item, status), item.text) for item in self._sequence.items]

    def written(self, item: Item, status: str, text: str) -> wire.OutputItem:
        """An item on the wire, with its text or an empty one."""
        id = self.id_of(item)
        match item.kind:
            case ItemKind.REASONING:
                return wire.ReasoningItem(id, status, [wire.ReasoningText(text)] if text else [])
            case ItemKind.TEXT:
                return wire.OutputMessage(id, status, [self.part(item, text)] if text else [])
            case ItemKind.CALL:
                return self._call(item, status, text)

    def part(self, item: Item, text: str) -> wire.Part:
        """The content part of an item, with its text or an empty one."""
        if item.kind is ItemKind.REASONING:
            return wire.ReasoningText(text)
        return wire.OutputText(text, logprobs=self.logprobs_of(item) if text else NO_LOGPROBS)

    def _call(self, item: Item, status: str, arguments: str) -> wire.OutputItem:
        id, called = self.id_of(item), self.called(item)
        namespace = UNSET if called.namespace is None else called.namespace
        if called.is_custom:
            text = custom_input(arguments)
            return wire.CustomCallItem(id, status, item.call_id, called.name, text, namespace)
        return wire.FunctionCallItem(id, status, item.call_id, called.name, arguments, namespace)
