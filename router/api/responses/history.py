"""The input of a /v1/responses request as the messages of a chat (pure).

Conversations may have begun at another server. Items of tools that ran there are kept as far as they have
content. They are left out where all they have is an id or a text that only that server can read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.api.responses.custom_input import custom_arguments
from router.api.responses.tools import flat_name
from router.errors import refuse
from router.images.parts import located

LEFT_OUT = frozenset(
    {
        "code_interpreter_call", "compaction", "computer_call", "computer_call_output", "context_compaction",
        "file_search_call", "image_generation_call", "mcp_approval_request", "mcp_approval_response",
        "mcp_list_tools", "tool_search_call", "tool_search_output", "web_search_call",
    }
)  # fmt: skip
"""Types of items with nothing that a model without these tools could use."""

TOOLS_OF_CALLS = {"local_shell_call": "action", "shell_call": "action", "apply_patch_call": "operation"}
"""Field of the arguments, by the type of calls whose tools have no name."""

OUTPUTS = frozenset(
    {
        "apply_patch_call_output", "custom_tool_call_output", "function_call_output",
        "local_shell_call_output", "shell_call_output",
    }
)  # fmt: skip

UNFINISHED = ("in_progress", "incomplete")
"""States of an assistant's last message that the answer continues."""


@dataclass
class ReadInput:
    """Messages of an input, and the types of items that are not among them."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Types of items that the model does not see."""
    continues: bool = False
    """Whether the answer continues the last message."""


def history(instructions: str | None, given: str | list[dict[str, Any]]) -> ReadInput:
    """The messages of an input.

    Raises:
        ApiError: an item is malformed, or of an unknown type.
    """
    found = ReadInput()
    if instructions:
        found.messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        found.messages.append({"role": "user", "content": given})
        return found
    for index, item in enumerate(given):
        _add(found, f"input[{index}]", item)
    found.continues = bool(given) and _is_unfinished(f"input[{len(given) - 1}]", given[-1])
    return found


def _add(found: ReadInput, where: str, item: Mapping[str, Any]) -> None:
    """Add an item; adjacent reasoning, text and calls form one message of the assistant."""
    messages = found.messages
    match item.get("type", "message"):
        case "message":
            _add_message(messages, where, item)
        case "reasoning":
            if text := _reasoning(item):
                _assistant(messages, "reasoning", "content")["reasoning"] = text
            elif item.get("encrypted_content"):
                found.left_out.append("reasoning")
        case "function_call":
            call_id, arguments = _strings(where, item, "call_id", "arguments")
            _add_call(messages, call_id, arguments, _called(where, item))
        case "custom_tool_call":
            call_id, text = _strings(where, item, "call_id", "input")
            _add_call(messages, call_id, custom_arguments(text), _called(where, item))
        case "mcp_call":
            id, arguments = _strings(where, item, "id", "arguments")
            _add_call(messages, id, arguments, _called(where, item))
            _add_output(messages, id, item.get("output") or item.get("error"))
        case str() as kind if kind in TOOLS_OF_CALLS:
            (call_id,) = _strings(where, item, "call_id")
            arguments = msgspec.json.encode(item.get(TOOLS_OF_CALLS[kind])).decode()
            _add_call(messages, call_id, arguments, kind.removesuffix("_call"))
        case str() as kind if kind in OUTPUTS:
            by_id = kind == "local_shell_call_output" and "call_id" not in item
            (call_id,) = _strings(where, item, "id" if by_id else "call_id")
            _add_output(messages, call_id, located(item.get("output"), f"{where}.output"))
        case str() as kind if kind in LEFT_OUT:
            found.left_out.append(kind)
        case kind:
            refuse(f"{where} has type {str(kind)[:60]!r}, which is not supported.", "input")


def _add_message(messages: list[dict[str, Any]], where: str, item: Mapping[str, Any]) -> None:
    (role,) = _strings(where, item, "role")
    content = located(item.get("content"), f"{where}.content")
    if role == "assistant":
        _assistant(messages, "content")["content"] = content or ""
    else:
        messages.append({"role": "system" if role == "developer" else role, "content": content})


def _add_call(messages: list[dict[str, Any]], id: str, arguments: str, name: str) -> None:
    call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
    _assistant(messages).setdefault("tool_calls", []).append(call)


def _add_output(messages: list[dict[str, Any]], call_id: str, output: Any) -> None:
    is_content = output is None or isinstance(output, str | list)
    content = output if is_content else msgspec.json.encode(output).decode()
    messages.append({"role": "tool", "tool_call_id": call_id, "content": content})


def _assistant(messages: list[dict[str, Any]], *unless_set: str) -> dict[str, Any]:
    """The assistant's message that an item is added to.

    It is the last one, unless such an item or a later part of a message is there.
    """
    last = messages[-1] if messages else {}
    taken = [*unless_set, "tool_calls"] if unless_set else []
    if last.get("role") != "assistant" or any(last.get(name) is not None for name in taken):
        messages.append({"role": "assistant", "content": None})
    return messages[-1]


def _reasoning(item: Mapping[str, Any]) -> str:
    """The text of reasoning, or its summary where that is all there is."""
    return _joined(item.get("content")) or _joined(item.get("summary"))


def _joined(parts: Any) -> str:
    texts = [part.get("text") for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return "".join([text for text in texts if isinstance(text, str)])


def _is_unfinished(where: str, item: Mapping[str, Any]) -> bool:
    if item.get("status") not in UNFINISHED:
        return False
    if item.get("type") == "reasoning":
        refuse(f"{where} is unfinished reasoning: only an answer that has begun can be continued.", "input")
    return item.get("type", "message") == "message" and item.get("role") == "assistant"


def _called(where: str, item: Mapping[str, Any]) -> str:
    """The name in chat of the tool that a call names."""
    _strings(where, item, "name")
    return flat_name(item)


def _strings(where: str, item: Mapping[str, Any], *names: str) -> list[str]:
    """Values of text fields that an item must have."""
    for name in names:
        if not isinstance(item.get(name), str):
            refuse(f"{where}.{name} must be a string.", "input")
    return [item[name] for name in names]
