"""Answers of /v1/responses."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET

from engine.messages import FinishReason
from router.api.answers import Answer, AnswerFacts, encode, named_event
from router.api.items import Closed, Item, ItemEvent, ItemKind, ItemSequence, More, Opened
from router.api.logprobs import LogprobShapes
from router.api.responses import wire
from router.api.responses.custom_input import InputReader, custom_input
from router.api.responses.logprobs import TextLogprobs, by_token
from router.api.responses.tools import ToolName
from router.api.understanding import Understood
from router.errors import ApiError
from router.openai_api import TokenLogprob
from router.text.output_stream import OutputStream, Piece

ID_PREFIX = {ItemKind.REASONING: "rs", ItemKind.TEXT: "msg", ItemKind.CALL: "fc"}
CUSTOM_CALL = "ctc"

NO_LOGPROBS: list[TokenLogprob] = []

IN_PROGRESS, COMPLETED, INCOMPLETE, FAILED = "in_progress", "completed", "incomplete", "failed"


class ResponsesAnswer(Answer):
    """A response: output items, each with events of its own in a stream."""

    def __init__(
        self,
        request: wire.ResponsesRequest,
        understood: Understood,
        names: Mapping[str, ToolName],
        facts: AnswerFacts,
    ) -> None:
        """``names``: the client's names of its tools, by their names in chat."""
        super().__init__(facts)
        params, turn_format = understood.params, understood.turn_format
        (self._sample,) = self.samples
        self._request = request
        self._params = params
        self._names = names
        self._sequence = ItemSequence(turn_format.reader(self._sample.prompt_text))
        self._item_ids: list[str] = []
        self._num_events = 0
        self._inputs: dict[int, InputReader] = {}
        """Readers for calls of custom tools in a stream, by the index of their item."""
        self._shapes = LogprobShapes(understood.model.tokenizer, params.logprobs or 0)
        self._text_logprobs = TextLogprobs() if params.logprobs is not None else None
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        """Log-probabilities of texts, by the index of their item."""

    def whole(self, outputs: Sequence[Sequence[Piece]]) -> bytes:
        for piece in outputs[0]:
            self._read(piece)
        return encode(self._response(self._status()))

    def chunk(self, sample: OutputStream, piece: Piece, *, first: bool) -> bytes:
        opening = self._opening() if first else b""
        return opening + b"".join([self._of_item(event, logprobs) for event, logprobs in self._read(piece)])

    def closing(self) -> bytes:
        status = self._status()
        kind = wire.Completed if status == COMPLETED else wire.Incomplete
        return self._event(kind(response=self._response(status)))

    def failure(self, error: ApiError) -> bytes:
        opening = b"" if self._num_events else self._opening()
        response = self._response(FAILED)
        response.error = wire.ResponseError("server_error", str(error))
        return opening + self._event(wire.Failed(response=response))

    def _opening(self) -> bytes:
        response = self._response(IN_PROGRESS)
        return self._event(wire.Created(response=response)) + self._event(wire.InProgress(response=response))

    # ---- items

    def _read(self, piece: Piece) -> list[tuple[ItemEvent, list[TokenLogprob]]]:
        """Events of the items for a piece, with the log-probabilities of its shown tokens."""
        ended = piece.finish_reason is not None
        if self._text_logprobs is None:
            found = [(event, NO_LOGPROBS) for event in self._sequence.read(piece.parts, ended=ended)]
        else:
            found = self._read_logprobs(piece, self._text_logprobs, ended=ended)
        for item in self._sequence.items[len(self._item_ids) :]:
            prefix = CUSTOM_CALL if self._is_custom(item) else ID_PREFIX[item.kind]
            self._item_ids.append(f"{prefix}_{uuid.uuid4().hex}")
        return found

    def _read_logprobs(
        self, piece: Piece, texts: TextLogprobs, *, ended: bool
    ) -> list[tuple[ItemEvent, list[TokenLogprob]]]:
        found = []
        parts = list(by_token(piece))
        for position, (part, entries) in enumerate(parts):
            events = self._sequence.read([part], ended=ended and position == len(parts) - 1)
            for event, taken in zip(events, texts.of(part[0], entries, events), strict=True):
                logprobs = self._shapes.chat(taken).content
                if logprobs:
                    self._logprobs.setdefault(event.item.index, []).extend(logprobs)
                found.append((event, logprobs))
        return found

    def _status(self) -> str:
        return INCOMPLETE if self._sample.finish_reason == FinishReason.LENGTH else COMPLETED

    def _item(self, item: Item, status: str, text: str) -> wire.OutputItem:
        id = self._item_ids[item.index]
        match item.kind:
            case ItemKind.REASONING:
                return wire.ReasoningItem(id, status, [wire.ReasoningText(text)] if text else [])
            case ItemKind.TEXT:
                return wire.OutputMessage(id, status, [self._part(item, text)] if text else [])
            case ItemKind.CALL:
                return self._call(item, id, status, text)

    def _call(self, item: Item, id: str, status: str, arguments: str) -> wire.OutputItem:
        called = self._names.get(item.name, ToolName(item.name))
        namespace = UNSET if called.namespace is None else called.namespace
        if called.is_custom:
            text = custom_input(arguments)
            return wire.CustomCallItem(id, status, item.call_id, called.name, text, namespace)
        return wire.FunctionCallItem(id, status, item.call_id, called.name, arguments, namespace)

    def _is_custom(self, item: Item) -> bool:
        return item.name in self._names and self._names[item.name].is_custom

    def _status_of(self, item: Item, status: str) -> str:
        """Status of an item of a finished response.

        The last item of an answer cut short was cut with it.
        """
        is_last = item is self._sequence.items[-1]
        return INCOMPLETE if is_last and status != COMPLETED else COMPLETED

    # ---- events

    def _event(self, event: wire.WireEvent) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        return named_event(event)

    def _of_item(self, event: ItemEvent, logprobs: list[TokenLogprob]) -> bytes:
        match event:
            case Opened(item):
                events = self._opened(item)
            case More(item, text):
                events = self._more(item, text, logprobs)
            case Closed(item):
                events = self._closed(item)
        return b"".join([self._event(each) for each in events])

    def _opened(self, item: Item) -> list[wire.WireEvent]:
        added = wire.ItemAdded(output_index=item.index, item=self._item(item, IN_PROGRESS, ""))
        if item.kind is ItemKind.CALL:
            return [added]
        return [added, wire.PartAdded(**self._position(item), part=self._part(item, ""))]

    def _more(self, item: Item, text: str, logprobs: list[TokenLogprob]) -> list[wire.WireEvent]:
        position = self._position(item)
        match item.kind:
            case ItemKind.REASONING:
                return [wire.ReasoningDelta(**position, delta=text)]
            case ItemKind.TEXT:
                return [wire.TextDelta(**position, delta=text, logprobs=logprobs)]
            case ItemKind.CALL if self._is_custom(item):
                return self._input_delta(item, self._inputs.setdefault(item.index, InputReader()).feed(text))
            case ItemKind.CALL:
                return [wire.ArgumentsDelta(**position, delta=text)]

    def _closed(self, item: Item) -> list[wire.WireEvent]:
        status = self._status_of(item, self._status())
        done = wire.ItemDone(output_index=item.index, item=self._item(item, status, item.text))
        if item.kind is ItemKind.CALL:
            return [*self._call_done(item), done]
        return [
            self._text_done(item),
            wire.PartDone(**self._position(item), part=self._part(item, item.text)),
            done,
        ]

    def _text_done(self, item: Item) -> wire.WireEvent:
        if item.kind is ItemKind.REASONING:
            return wire.ReasoningDone(**self._position(item), text=item.text)
        return wire.TextDone(**self._position(item), text=item.text, logprobs=self._logprobs_of(item))

    def _call_done(self, item: Item) -> list[wire.WireEvent]:
        position = self._position(item)
        if self._is_custom(item):
            rest = self._inputs[item.index].end() if item.index in self._inputs else ""
            done = wire.InputDone(**position, input=custom_input(item.text))
            return [*self._input_delta(item, rest), done]
        called = self._names.get(item.name, ToolName(item.name))
        return [wire.ArgumentsDone(**position, name=called.name, arguments=item.text)]

    def _input_delta(self, item: Item, text: str) -> list[wire.WireEvent]:
        return [wire.InputDelta(**self._position(item), delta=text)] if text else []

    def _position(self, item: Item) -> dict[str, Any]:
        return {"item_id": self._item_ids[item.index], "output_index": item.index}

    def _part(self, item: Item, text: str) -> wire.Part:
        """A part with this text, all of its item's or none."""
        if item.kind is ItemKind.REASONING:
            return wire.ReasoningText(text)
        return wire.OutputText(text, logprobs=self._logprobs_of(item) if text else NO_LOGPROBS)

    def _logprobs_of(self, item: Item) -> list[TokenLogprob]:
        return self._logprobs.get(item.index, NO_LOGPROBS)

    # ---- the response

    def _response(self, status: str) -> wire.ResponseObject:
        request, params = self._request, self._params
        is_over = status in (COMPLETED, INCOMPLETE)
        items = self._sequence.items if status != IN_PROGRESS else []
        return wire.ResponseObject(
            id=self.id,
            created_at=self.created,
            model=self.model,
            status=status,
            output=[self._item(item, self._status_of(item, status), item.text) for item in items],
            usage=self._response_usage() if is_over else None,
            incomplete_details=wire.IncompleteDetails("max_output_tokens") if status == INCOMPLETE else None,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            parallel_tool_calls=request.parallel_tool_calls is not False,
            temperature=params.temperature,
            top_p=params.top_p,
            top_logprobs=params.logprobs or 0,
            tools=request.tools or [],
            tool_choice=request.tool_choice or "auto",
            text=request.text or {"format": {"type": "text"}},
            reasoning=request.reasoning or {"effort": None, "summary": None},
            metadata=request.metadata or {},
            user=request.user,
            system_fingerprint=self.fingerprint,
        )

    def _response_usage(self) -> wire.ResponseUsage:
        usage = self.usage()
        details = usage.prompt_tokens_details
        return wire.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=wire.InputTokensDetails(details.cached_tokens if details else 0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=wire.OutputTokensDetails(self._sequence.num_reasoning_tokens),
            total_tokens=usage.total_tokens,
            numerics_changes=usage.numerics_changes,
        )
