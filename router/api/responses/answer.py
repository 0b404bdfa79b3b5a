"""Answers of /v1/responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.messages import FinishReason
from router.api.answers import Answer, AnswerFacts, encode, named_event
from router.api.logprobs import LogprobShapes
from router.api.responses import wire
from router.api.responses.item_events import ItemEvents
from router.api.responses.output_items import COMPLETED, FAILED, IN_PROGRESS, INCOMPLETE, OutputItems
from router.api.responses.tools import ToolName
from router.api.understanding import Understood
from router.errors import ApiError
from router.text.output_stream import OutputStream, TextPiece


class ResponsesAnswer(Answer):
    """A response: output items, each with events of its own in a stream."""

    def __init__(
        self,
        request: wire.ResponsesRequest,
        understood: Understood,
        names: Mapping[str, ToolName],
        facts: AnswerFacts,
        *,
        stored: bool = False,
    ) -> None:
        """``names``: the client's names of its tools, by their names in chat."""
        super().__init__(facts)
        (self._sample,) = self.samples
        self._request = request
        self._stored = stored
        self._params = params = understood.params
        shapes = LogprobShapes(understood.model.tokenizer, params.logprobs or 0)
        reader = understood.turn_format.reader(self._sample.prompt_text)
        self._items = OutputItems(reader, names, None if params.logprobs is None else shapes)
        self._item_events = ItemEvents(self._items)
        self._num_events = 0

    def whole(self, outputs: Sequence[Sequence[TextPiece]]) -> bytes:
        for piece in outputs[0]:
            self._items.read(piece)
        return encode(self._response(self._status()))

    def chunk(self, sample: OutputStream, piece: TextPiece, *, first: bool) -> bytes:
        events = [self._opening()] if first else []
        for event, logprobs in self._items.read(piece):
            events += map(self._event, self._item_events.of(event, logprobs, self._status()))
        return b"".join(events)

    def closing(self) -> bytes:
        status = self._status()
        kind = wire.Completed if status == COMPLETED else wire.Incomplete
        return self._event(kind(response=self._response(status)))

    def failure(self, error: ApiError) -> bytes:
        opening = b"" if self._num_events else self._opening()
        response = self._response(FAILED)
        response.error = wire.ResponseError("server_error", str(error))
        return opening + self._event(wire.ResponseFailed(response=response))

    def _opening(self) -> bytes:
        response = self._response(IN_PROGRESS)
        return self._event(wire.Created(response=response)) + self._event(wire.InProgress(response=response))

    def _status(self) -> str:
        return INCOMPLETE if self._sample.finish_reason == FinishReason.LENGTH else COMPLETED

    def _event(self, event: wire.WireEvent) -> bytes:
        event.sequence_number = self._num_events
        self._num_events += 1
        return named_event(event)

    def _response(self, status: str) -> wire.ResponseObject:
        request, params = self._request, self._params
        is_over = status in (COMPLETED, INCOMPLETE)
        return wire.ResponseObject(
            id=self.id,
            created_at=self.created,
            model=self.model,
            status=status,
            output=[] if status == IN_PROGRESS else self._items.output(status),
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
            store=self._stored and request.store is not False,
            background=self._stored and bool(request.background),
            previous_response_id=request.previous_response_id,
            conversation=request.conversation,
            system_fingerprint=self.fingerprint,
            weight_version=self.weight_version,
            weight_versions=self.weight_versions,
        )

    def _response_usage(self) -> wire.ResponseUsage:
        usage = self.usage()
        details = usage.prompt_tokens_details
        return wire.ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=wire.InputTokensDetails(details.cached_tokens if details else 0),
            output_tokens=usage.completion_tokens,
            output_tokens_details=wire.OutputTokensDetails(self._items.num_reasoning_tokens),
            total_tokens=usage.total_tokens,
            numerics_changes=usage.numerics_changes,
        )
