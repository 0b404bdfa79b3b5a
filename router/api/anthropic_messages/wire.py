"""Wire of /v1/messages: fields of requests, answers, their events and errors."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from router.openai_api import Int, MoreFields, NumericsChange, WeightRange

# ---- requests


class CountTokensRequest(MoreFields, kw_only=True):
    """Body of a request that counts tokens: the fields that make the prompt."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    # Refused when set to anything that would matter.
    mcp_servers: Any = None
    container: Any = None
    compaction: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Not Anthropic's, like the inherited fields."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: Int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    metadata: dict[str, Any] | None = None
    output_format: Any = None
    # Of chats: refused when set to anything that would matter.
    stop: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    logprobs: Any = None
    response_format: Any = None
    reasoning_effort: Any = None


# ---- answers


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw | dict[str, Any]
    """A JSON object, as the model wrote it."""


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct):
    """Usage; ``input_tokens`` leaves out those that came from the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0
    numerics_changes: list[NumericsChange] | UnsetType = UNSET
    """Not Anthropic's, like the next two; unset where there are none."""
    weight_version: str | UnsetType = UNSET
    weight_versions: list[WeightRange] | UnsetType = UNSET


class Message(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: str = "assistant"


class TokenCount(msgspec.Struct):
    input_tokens: int


# ---- events of a stream


class MessageEvent(msgspec.Struct, tag_field="type"): ...


class MessageStart(MessageEvent, tag="message_start"):
    message: Message


class Ping(MessageEvent, tag="ping"): ...


class BlockStart(MessageEvent, tag="content_block_start"):
    index: int
    content_block: Block


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(MessageEvent, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(MessageEvent, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(MessageEvent, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(MessageEvent, tag="message_stop"): ...
