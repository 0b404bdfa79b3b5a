"""A request to /v1/messages as a chat request (pure)."""

from __future__ import annotations

import json
from typing import Any

from router.api.anthropic_messages.tools import CHANGES, REFERENCE, offered
from router.api.anthropic_messages.wire import CountTokensRequest, MessagesRequest
from router.errors import ApiError, refuse, refuse_misnamed
from router.images.parts import LocatedPart
from router.openai_api import MOST, ChatRequest, MoreFields

NAMES = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_format",
    "thinking_token_budget": "thinking",
}
"""Fields that have another name in a chat request."""

UNSUPPORTED = {
    "mcp_servers": "call them yourself, and offer their tools in tools",
    "container": "nothing is run here",
    "compaction": "ask for a summary in a message",
}
"""Fields refused when their value would matter, with what to do instead."""
MISNAMED = {
    "stop": "use stop_sequences",
    "max_completion_tokens": "use max_tokens",
    "logprobs": "ask /v1/chat/completions for them",
    "response_format": "use output_config.format",
    "reasoning_effort": "use output_config.effort",
}
"""Fields of chats that are refused, with what to use instead."""
BILLING_LINE = "x-anthropic-billing-header:"
"""Beginning of the first line of Claude Code's instructions.

It differs between sessions, so that no two prompts would have a prefix in common.
"""

THINKING = ("enabled", "disabled", "adaptive")
DISPLAYS = (None, "summarized", "updates", "omitted")
CLEAR_THINKING = "clear_thinking_20251015"

SAME = ("stream", "temperature", "top_p", *MoreFields.__struct_fields__)


def chat_request(request: CountTokensRequest) -> ChatRequest:
    """The request as one to /v1/chat/completions; to count tokens, only its prompt.

    Raises:
        ApiError: it asks for what chat does not have.
    """
    _check(request)
    tools = offered(request.tools or [], request.messages)
    chat = ChatRequest(
        messages=_remembered(_messages(request), request.context_management or {}),
        model=request.model,
        tools=[_tool(index, tool) for index, tool in enumerate(tools)] or None,
        chat_template_kwargs=_template_kwargs(request),
    )
    _choose_tools(chat, request)
    chat.continue_final_message = _is_begun(request.messages, chat.messages) or None
    chat.reasoning_effort = (request.output_config or {}).get("effort") or None
    if isinstance(request, MessagesRequest):
        chat.max_completion_tokens = request.max_tokens
        chat.stop = request.stop_sequences
        chat.response_format = _response_format(request)
        chat.include_reasoning = _shows_thinking(request.thinking)
        for name in SAME:
            setattr(chat, name, getattr(request, name))
        if chat.thinking_token_budget is None and _kind(request.thinking) == "enabled":
            chat.thinking_token_budget = _budget(request.thinking)
    return chat


def _check(request: CountTokensRequest) -> None:
    """Refuse fields that would change the answer and are not supported."""
    match _kind(request.thread):
        case "continue":  # clients then send all of it, as a new thread
            message = "Threads are not kept: send the whole conversation, with a thread of type create."
            raise ApiError(404, message, param="thread", reason="thread_not_found")
        case kind if request.thread is not None and kind != "create":
            refuse("thread.type must be create or continue.", "thread")
    if request.thinking is not None and _kind(request.thinking) not in THINKING:
        refuse("thinking.type must be enabled, disabled or adaptive.", "thinking")
    if (request.thinking or {}).get("display") not in DISPLAYS:
        refuse("thinking.display must be summarized, updates or omitted.", "thinking")
    refuse_misnamed(request, MISNAMED)
    if getattr(request, "n", None) not in (None, 1):
        refuse("n must be 1: a message has one answer.", "n")
    for name, instead in UNSUPPORTED.items():
        if getattr(request, name):
            refuse(f"{name} is not supported: {instead}.", name)
    if (request.output_config or {}).get("task_budget"):
        refuse("output_config.task_budget is not supported: use max_tokens.", "output_config")
    if not isinstance((request.output_config or {}).get("effort"), str | None):
        refuse("output_config.effort must be a string.", "output_config")


def _shows_thinking(thinking: dict[str, Any] | None) -> bool:
    return _kind(thinking) != "disabled" and (thinking or {}).get("display") != "omitted"


def _template_kwargs(request: CountTokensRequest) -> dict[str, Any] | None:
    """Template variables for the request's thinking, under both names in use."""
    kind = _kind(request.thinking)
    wants = {"enabled": True, "disabled": False}.get(kind)
    switches = {} if wants is None else {"enable_thinking": wants, "thinking": wants}
    return switches | (request.chat_template_kwargs or {})


def _budget(thinking: dict[str, Any] | None) -> int | None:
    budget = (thinking or {}).get("budget_tokens")
    if budget is not None and (type(budget) is not int or not 1 <= budget <= MOST):
        refuse(
            f"thinking.budget_tokens must be a whole number of at least 1, and at most {MOST}.", "thinking"
        )
    return budget


def _choose_tools(chat: ChatRequest, request: CountTokensRequest) -> None:
    choice = request.tool_choice
    if choice is None:
        return
    match _kind(choice):
        case "auto" | "none" as kind:
            chat.tool_choice = kind if chat.tools else None
        case "any":
            chat.tool_choice = "required"
        case "tool":
            chat.tool_choice = {"type": "function", "function": {"name": choice.get("name")}}
        case _:
            refuse("tool_choice.type must be auto, any, tool or none.", "tool_choice")
    if choice.get("disable_parallel_tool_use") is True:
        chat.parallel_tool_calls = False


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = str(tool["type"])[:60]
        refuse(f"tools[{index}] has type {kind!r}: only tools of your own can be used.", "tools")
    if tool.get("input_examples"):
        refuse(f"tools[{index}].input_examples is not supported: put them into the description.", "tools")
    callers = tool.get("allowed_callers") or ["direct"]
    if not isinstance(callers, list) or "direct" not in callers:
        refuse(f"tools[{index}].allowed_callers leaves out direct: nothing else calls tools here.", "tools")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    if tool.get("strict") is True:
        function["strict"] = True
    return {"type": "function", "function": function}


def _response_format(request: MessagesRequest) -> Any:
    wanted = request.output_format or (request.output_config or {}).get("format")
    if isinstance(wanted, dict) and wanted.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema")}}
    return wanted


# ---- messages


def _messages(request: CountTokensRequest) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if text := _instructions(request.system, "system"):
        messages.append({"role": "system", "content": text})
    for index, message in enumerate(request.messages):
        content = message.get("content")
        match message.get("role"):
            case "assistant" if isinstance(content, list):
                messages.append(_assistant(index, content))
            case "user" if isinstance(content, list):
                messages += _user(index, content)
            case "system":
                if text := _instructions(content, f"messages[{index}]"):
                    messages.append({"role": "system", "content": text})
            case ("user" | "assistant") as role:
                messages.append({"role": role, "content": content})
            case _:
                refuse(f"messages[{index}].role must be user or assistant.", "messages")
    return messages


def _instructions(content: Any, where: str) -> str:
    """Text of the instructions, without the billing line that a block may begin with."""
    if isinstance(content, list):
        content = [block for block in content if _kind(block) not in CHANGES]
    return "\n".join(filter(None, map(_without_billing, _texts(content or "", where))))


def _without_billing(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(BILLING_LINE) else text


def _assistant(index: int, blocks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for block in blocks:
        match _kind(block):
            case "text":
                message["content"] = (message["content"] or "") + _given(
                    index, block, "text", may_be_empty=True
                )
            case "thinking":
                thought = _given(index, block, "thinking", may_be_empty=True)
                message["reasoning"] = message.get("reasoning", "") + thought
            case "redacted_thinking":
                pass  # nobody but its author can read it
            case "tool_use":
                name, arguments = _given(index, block, "name"), _arguments(index, block.get("input"))
                function = {"name": name, "arguments": arguments}
                call = {"id": _given(index, block, "id"), "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
            case kind:
                _refuse_block(index, kind)
    return message


def _remembered(messages: list[dict[str, Any]], management: dict[str, Any]) -> list[dict[str, Any]]:
    """Messages without the reasoning that context_management removes."""
    edits = management.get("edits") or []
    for index, edit in enumerate(edits if isinstance(edits, list) else [None]):
        where = f"context_management.edits[{index}]"
        if _kind(edit) != CLEAR_THINKING:
            refuse(f"{where}.type must be {CLEAR_THINKING}: nothing else is taken out.", "context_management")
        keep = edit.get("keep", {"type": "thinking_turns", "value": 1})
        if keep == "all" or _kind(keep) == "all":
            continue
        most = keep.get("value") if _kind(keep) == "thinking_turns" else None
        if type(most) is not int or most < 1:
            refuse(f"{where}.keep must be all, or thinking_turns of 1 or more.", "context_management")
        _forget_thinking(messages, most)
    return messages


def _forget_thinking(messages: list[dict[str, Any]], num_kept: int) -> None:
    """Remove the reasoning from all turns of the assistant but the last ones.

    A turn includes results of tools, and ends at the next words of the user.
    """
    num_turns, is_inside = 0, False
    for message in reversed(messages):
        if message["role"] == "assistant":
            num_turns += not is_inside
            is_inside = True
            if num_turns > num_kept:
                message.pop("reasoning", None)
        elif message["role"] == "user":
            is_inside = False


def _is_begun(asked: list[dict[str, Any]], messages: list[dict[str, Any]]) -> bool:
    """Whether the conversation ends with the beginning of its answer.

    ``asked`` may end with instructions that leave no message.
    """
    last = messages[-1] if messages else {}
    text = last.get("content")
    if not asked or asked[-1].get("role") != "assistant" or last.get("tool_calls"):
        return False
    return isinstance(text, str) and bool(text.strip())


def _user(index: int, blocks: list[Any]) -> list[dict[str, Any]]:
    """Messages of a user's turn: first the results of tools, one message each."""
    results: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        where = f"messages[{index}].content[{at}]"
        match _kind(block):
            case "text":
                parts.append({"type": "text", "text": block.get("text")})
            case "image":
                parts.append(_image(where, block))
            case "tool_result":
                content = _result(where, _named(block.get("content")) or "")
                call_id = _given(index, block, "tool_use_id")
                results.append({"role": "tool", "tool_call_id": call_id, "content": content})
            case kind:
                _refuse_block(index, kind)
    return [*results, {"role": "user", "content": parts}] if parts or not results else results


def _result(where: str, content: Any) -> str | list[dict[str, Any]]:
    """A tool's result: text, or parts where images are among it."""
    if not isinstance(content, list) or all(_kind(block) != "image" for block in content):
        return _text(content, where)
    parts: list[dict[str, Any]] = []
    for at, block in enumerate(content):
        if _kind(block) == "image":
            parts.append(_image(f"{where}.content[{at}]", block))
        else:
            parts += [{"type": "text", "text": text} for text in _texts([block], where)]
    return parts


def _image(where: str, block: dict[str, Any]) -> LocatedPart:
    """An image of a user's turn as a part of a chat message."""
    source = block.get("source")
    if not isinstance(source, dict):
        refuse(f"{where} is an image without source.", where)
    if source.get("type") not in ("base64", "url"):
        refuse(f"{where} is an image whose source is neither base64 nor url.", where)
    url = source.get("url")
    if source["type"] == "base64":
        url = f"data:{source.get('media_type')};base64,{source.get('data')}"
    return LocatedPart({"type": "image_url", "image_url": {"url": url}}, where)


def _given(index: int, block: dict[str, Any], field: str, *, may_be_empty: bool = False) -> str:
    """The text field that a block of its type must have."""
    value = block.get(field)
    if not isinstance(value, str) or not (value or may_be_empty):
        refuse(f"messages[{index}].content has a {block['type']} block without {field}.", "messages")
    return value


def _named(content: Any) -> Any:
    """Content with the names of tools that a search has found as text."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": block.get("tool_name")} if _kind(block) == REFERENCE else block
        for block in content
    ]


def _text(content: Any, where: str) -> str:
    """Content that is text, or blocks of text."""
    return "\n".join(_texts(content, where))


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    blocks = content if isinstance(content, list) else []
    texts = [block.get("text") for block in blocks if _kind(block) == "text"]
    if not isinstance(content, list) or len(texts) < len(content):
        refuse(f"{where} holds other content than text, but this model takes text only.", where.split("[")[0])
    if not all(isinstance(text, str) for text in texts):
        refuse(f"{where} has a text block without text.", where.split("[")[0])
    return texts


def _arguments(index: int, input: Any) -> str:
    try:
        return json.dumps(input or {}, ensure_ascii=False)
    except RecursionError:
        refuse(f"messages[{index}].content has an input that is nested too deeply.", "messages")


def _refuse_block(index: int, kind: str) -> None:
    refuse(
        f"messages[{index}].content has a block of type {kind[:60]!r}, but this model takes text only.",
        "messages",
    )


def _kind(block: Any) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if isinstance(kind, str) else ""


def _string(value: Any) -> str:
    return value if isinstance(value, str) else ""
