"""Wire of /v1/responses: fields of requests, answers and their events."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.openai_api import Int, MoreFields, NumericsChange, TokenLogprob, WeightRange

# ---- requests


class ResponsesRequest(MoreFields, kw_only=True):
    """OpenAI's fields, and those of vLLM's that chat has too."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    store: bool | None = None
    truncation: str | None = None
    include: list[str] | None = None
    top_logprobs: Int | None = None
    stop: str | list[str] | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_tool_calls: Int | None = None
    """Most calls of tools that a server runs itself, of which there are none."""
    # Of chats: refused when set to anything that would matter.
    messages: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    logprobs: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    # Refused, too.
    context_management: Any = None
    enable_response_messages: Any = None
    previous_input_messages: Any = None
    # They need answers that are kept: refused.
    previous_response_id: str | None = None
    previous_response: Any = None
    conversation: Any = None
    background: bool | None = None
    prompt: Any = None


class InputTokens(msgspec.Struct, tag_field="object", tag="response.input_tokens"):
    input_tokens: int


# ---- output


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


Part = OutputText | ReasoningText


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[Part]
    role: str = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: None = None


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, tag_field="type", tag="custom_tool_call"):
    """A call whose input is free text."""

    id: str
    status: str
    call_id: str
    name: str
    input: str
    namespace: str | UnsetType = UNSET


OutputItem = OutputMessage | ReasoningItem | FunctionCallItem | CustomCallItem


class InputTokensDetails(msgspec.Struct):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    numerics_changes: list[NumericsChange] | UnsetType = UNSET
    """Not OpenAI's; unset where there are none."""


class ResponseError(msgspec.Struct):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    reason: str


class ResponseObject(msgspec.Struct, tag_field="object", tag="response", kw_only=True):
    id: str
    created_at: int
    model: str
    status: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    parallel_tool_calls: bool
    temperature: float
    top_p: float
    top_logprobs: int
    tools: list[dict[str, Any]]
    tool_choice: str | dict[str, Any]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    metadata: dict[str, Any]
    user: str | None
    truncation: str = "disabled"
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: Any = None
    system_fingerprint: str | None = None
    """Name of the numerics class, as in chat completions."""
    weight_version: str | UnsetType = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET


# ---- events of a stream


class WireEvent(msgspec.Struct, tag_field="type", kw_only=True):
    """An event, numbered from 0 within its stream."""

    sequence_number: int = 0


class ResponseEvent(WireEvent, kw_only=True):
    """An event with the response as it is by then."""

    response: ResponseObject


class Created(ResponseEvent, tag="response.created"): ...


class InProgress(ResponseEvent, tag="response.in_progress"): ...


class Completed(ResponseEvent, tag="response.completed"): ...


class Incomplete(ResponseEvent, tag="response.incomplete"): ...


class ResponseFailed(ResponseEvent, tag="response.failed"): ...


class ItemAdded(WireEvent, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class ItemDone(WireEvent, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class PartEvent(WireEvent, kw_only=True):
    item_id: str
    output_index: int
    content_index: int = 0


class PartAdded(PartEvent, tag="response.content_part.added", kw_only=True):
    part: Part


class PartDone(PartEvent, tag="response.content_part.done", kw_only=True):
    part: Part


class OutputTextDelta(PartEvent, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(PartEvent, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(PartEvent, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(PartEvent, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsDelta(WireEvent, tag="response.function_call_arguments.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(WireEvent, tag="response.function_call_arguments.done", kw_only=True):
    item_id: str
    output_index: int
    name: str
    arguments: str


class CustomInputDelta(WireEvent, tag="response.custom_tool_call_input.delta", kw_only=True):
    item_id: str
    output_index: int
    delta: str


class InputDone(WireEvent, tag="response.custom_tool_call_input.done", kw_only=True):
    item_id: str
    output_index: int
    input: str
