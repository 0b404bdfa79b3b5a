"""A request to /v1/responses as a chat request (pure)."""

from __future__ import annotations

from typing import Any

from router.errors import refuse
from router.openai_api import ChatRequest, MoreFields
from router.responses.wire import ResponsesRequest

KEPT = ("previous_response_id", "conversation", "background", "prompt")
"""They refer to what a server keeps."""

UNSUPPORTED = {
    "context_management": "nothing of a conversation is taken out",
    "enable_response_messages": "",
    "previous_input_messages": "send them as input",
}
"""Refused when set to anything that would matter, with why, or what to do instead."""

NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
"""What a chat request calls otherwise."""

SAME = (
    "model", "parallel_tool_calls", "temperature", "top_p", "stream", "user", "stop", "include_reasoning",
    "chat_template_kwargs", *MoreFields.__struct_fields__,
)  # fmt: skip


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """The same request to /v1/chat/completions.

    Raises:
        ApiError: it asks for what chat does not have, or needs answers that are kept.
    """
    _check(request)
    return ChatRequest(
        messages=_messages(request),
        tools=None if not request.tools else [_tool(i, tool) for i, tool in enumerate(request.tools)],
        tool_choice=_tool_choice(request.tool_choice) if request.tools else None,
        max_completion_tokens=request.max_output_tokens,
        reasoning_effort=(request.reasoning or {}).get("effort"),
        verbosity=(request.text or {}).get("verbosity"),
        response_format=_response_format(request.text),
        **{name: getattr(request, name) for name in SAME},
    )


def _check(request: ResponsesRequest) -> None:
    for name in KEPT:
        if getattr(request, name):
            refuse(f"{name} is not supported: answers are not kept, send the whole conversation.", name)
    for name, instead in UNSUPPORTED.items():
        if getattr(request, name):
            refuse(f"{name} is not supported{f': {instead}' if instead else ''}.", name)
    if request.truncation not in (None, "disabled"):
        refuse("truncation other than disabled is not supported.", "truncation")
    if request.top_logprobs or "message.output_text.logprobs" in (request.include or []):
        refuse("log-probabilities are not supported here, use /v1/chat/completions.", "top_logprobs")
    if not isinstance((request.reasoning or {}).get("effort"), str | None):
        refuse("reasoning.effort must be a string.", "reasoning")
    if not isinstance((request.text or {}).get("verbosity"), str | None):
        refuse("text.verbosity must be a string.", "text")


def _messages(request: ResponsesRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.instructions:
        messages.append({"role": "system", "content": request.instructions})
    if isinstance(request.input, str):
        return [*messages, {"role": "user", "content": request.input}]
    for index, item in enumerate(request.input):
        _add(messages, index, item)
    return messages


def _add(messages: list[dict[str, Any]], index: int, item: dict[str, Any]) -> None:
    """Reasoning, text and calls that follow one another are one message of the assistant."""
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if not isinstance(role, str):
                refuse(f"input[{index}].role must be a string.", "input")
            content = item.get("content")
            if role == "assistant":
                _assistant(messages, "content")["content"] = content
            else:
                messages.append({"role": "system" if role == "developer" else role, "content": content})
        case "reasoning":
            _assistant(messages, "reasoning", "content")["reasoning"] = _reasoning(item.get("content"))
        case "function_call":
            if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
                refuse(f"input[{index}] needs call_id, name and arguments, all strings.", "input")
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            if not isinstance(item.get("call_id"), str):
                refuse(f"input[{index}].call_id must be a string.", "input")
            result = {"role": "tool", "tool_call_id": item["call_id"], "content": item.get("output")}
            messages.append(result)
        case kind:
            refuse(f"input[{index}] has type {str(kind)[:60]!r}, which is not supported.", "input")


def _assistant(messages: list[dict[str, Any]], *unless_set: str) -> dict[str, Any]:
    """The assistant's message that an item goes into: the last one, unless such an item or a later part
    of a message is there."""
    last = messages[-1] if messages else {}
    taken = [*unless_set, "tool_calls"] if unless_set else []
    if last.get("role") != "assistant" or any(last.get(name) is not None for name in taken):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _reasoning(parts: Any) -> str:
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join([text for text in texts if isinstance(text, str)])


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    """Flat here, nested in chat."""
    if tool.get("type") != "function":
        refuse(
            f"tools[{index}] has type {str(tool.get('type'))[:60]!r}, only function is supported.", "tools"
        )
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type", "function") == "function" and "name" in choice:
        return {"type": "function", "function": {"name": choice["name"]}}
    return choice


def _response_format(text: dict[str, Any] | None) -> Any:
    """``text.format``: flat here, nested in chat."""
    wanted = (text or {}).get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        schema = {key: value for key, value in wanted.items() if key != "type"}
        return {"type": "json_schema", "json_schema": schema}
    return wanted
