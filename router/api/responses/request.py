"""A request to /v1/responses as a chat request (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from router.api.responses.history import history
from router.api.responses.tools import ChatTools, ToolName, chat_tool_choice, chat_tools
from router.api.responses.wire import ResponsesRequest
from router.errors import refuse, refuse_misnamed
from router.openai_api import ChatRequest, MoreFields

KEPT = ("previous_response_id", "previous_response", "conversation", "background", "prompt")
"""Fields that refer to answers kept by a server."""

REFERRING_ELSEWHERE = ("previous_response", "prompt")
"""Those of them that no store of answers holds."""

UNSUPPORTED = {
    "context_management": "nothing of a conversation is taken out",
    "enable_response_messages": "",
    "previous_input_messages": "send them as input",
}
"""Fields refused when their value would matter, with why, or what to do instead."""

MISNAMED = {
    "messages": "use input",
    "max_tokens": "use max_output_tokens",
    "max_completion_tokens": "use max_output_tokens",
    "logprobs": "use top_logprobs",
    "response_format": "use text.format",
    "reasoning_effort": "use reasoning.effort",
}
"""Fields of chats that are refused, with what to use instead."""

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""Fields that have another name in a chat request."""

SAME = (
    "model", "parallel_tool_calls", "temperature", "top_p", "stream", "user", "stop", "include_reasoning",
    "chat_template_kwargs", *MoreFields.__struct_fields__,
)  # fmt: skip

LOGPROBS = "message.output_text.logprobs"
"""Entry of ``include`` that requests log-probabilities."""


class Translated(NamedTuple):
    """A request to /v1/responses as a chat request."""

    chat: ChatRequest
    names: Mapping[str, ToolName]
    """The client's names of its tools, by their names in chat."""
    left_out: list[str]
    """Types of tools and items that the model does not get, sorted."""


def translated(request: ResponsesRequest, *, is_resolved: bool = False) -> Translated:
    """The request as one to /v1/chat/completions.

    ``is_resolved``: what it refers to is in its input already.

    Raises:
        ApiError: it asks for what chat does not have, or needs answers that are kept.
    """
    _check(request, REFERRING_ELSEWHERE if is_resolved else KEPT)
    given = history(request.instructions, request.input)
    tools = chat_tools(request.tools or (), request.tool_choice)
    wants_logprobs = bool(request.top_logprobs) or LOGPROBS in (request.include or [])
    chat = ChatRequest(
        messages=given.messages,
        continue_final_message=given.continues or None,
        tools=tools.functions or None,
        tool_choice=_tool_choice(request, tools),
        max_completion_tokens=request.max_output_tokens,
        logprobs=wants_logprobs or None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        reasoning_effort=(request.reasoning or {}).get("effort"),
        verbosity=(request.text or {}).get("verbosity"),
        response_format=_response_format(request.text),
        **{name: getattr(request, name) for name in SAME},
    )
    return Translated(chat, tools.names, sorted({*given.left_out, *tools.left_out}))


def _check(request: ResponsesRequest, refused: Sequence[str]) -> None:
    refuse_misnamed(request, MISNAMED)
    if request.n not in (None, 1):
        refuse("n must be 1: a response has one answer.", "n")
    for name in refused:
        if getattr(request, name):
            refuse(f"{name} is not supported: answers are not kept, send the whole conversation.", name)
    for name, instead in UNSUPPORTED.items():
        if getattr(request, name):
            refuse(f"{name} is not supported{f': {instead}' if instead else ''}.", name)
    if request.truncation not in (None, "disabled"):
        refuse("truncation other than disabled is not supported.", "truncation")
    if not isinstance((request.reasoning or {}).get("effort"), str | None):
        refuse("reasoning.effort must be a string.", "reasoning")
    if not isinstance((request.text or {}).get("verbosity"), str | None):
        refuse("text.verbosity must be a string.", "text")


def _tool_choice(request: ResponsesRequest, tools: ChatTools) -> Any:
    """The choice in chat's form; None if no tool may be called."""
    choice = chat_tool_choice(request.tool_choice)
    return None if not tools.functions and choice in ("auto", "none") else choice


def _response_format(text: dict[str, Any] | None) -> Any:
    """``text.format``: flat here, nested in chat."""
    wanted = (text or {}).get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = {key: value for key, value in wanted.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return wanted
