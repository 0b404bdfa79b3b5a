"""Tools of a /v1/responses request as chat's functions, and the way back (pure).

Chat has functions in one flat list. Here functions may stand in namespaces, custom tools take free text, and
some tools are run by the server itself. No server runs them here, so they are left out or refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from router.api.responses.custom_input import INPUT
from router.errors import refuse

SEPARATOR = "__"
"""Separator of a namespace and the name of a function in it, as in vLLM."""

HOSTED = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use", "computer_use_preview", "file_search",
        "image_generation", "local_shell", "mcp", "shell", "tool_search", "web_search",
        "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    }
)  # fmt: skip
"""Types of tools that OpenAI's server runs, or whose use OpenAI's models were trained for."""


class ToolName(NamedTuple):
    """Name of a tool as the client wrote it."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass
class ChatTools:
    """Tools of a request as functions of a chat, with the client's names."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """The tools as chat takes them."""
    names: dict[str, ToolName] = field(default_factory=dict)
    """The client's names, by those that chat has."""
    left_out: list[str] = field(default_factory=list)
    """Types of the tools that cannot run here."""


def chat_tools(tools: Iterable[Mapping[str, Any]], choice: str | Mapping[str, Any] | None) -> ChatTools:
    """The tools of a request with this ``tool_choice``.

    Raises:
        ApiError: a tool is malformed, two have one name, or one cannot run here and a call is required.
    """
    found = ChatTools()
    for index, tool in enumerate(tools):
        _add(found, f"tools[{index}]", tool, None, may_leave_out=choice != "required")
    return found


def chat_tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    """``tool_choice`` in chat's form: flat here, nested there."""
    if not isinstance(choice, Mapping):
        return choice
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        return _allowed_tools(choice)
    if isinstance(kind, str) and kind in HOSTED:
        refuse(f"tool_choice names {kind}, which cannot run here.", "tool_choice")
    return _named(choice)


def _named(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type", "function")
    if kind in ("function", "custom") and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": flat_name(choice)}}
    return dict(choice)


def _allowed_tools(choice: Mapping[str, Any]) -> Any:
    """The choice in chat's form, without tools that cannot run here.

    None where no others are left.
    """
    named, mode = choice.get("tools"), choice.get("mode")
    if not isinstance(named, list) or not all(isinstance(tool, dict) for tool in named):
        refuse("tool_choice of type allowed_tools needs a list of tools.", "tool_choice")
    kinds = [tool.get("type") for tool in named]
    hosted = [kind for kind in kinds if isinstance(kind, str) and kind in HOSTED]
    if hosted and mode == "required":
        refuse(f"tool_choice allows {hosted[0]}, which cannot run here.", "tool_choice")
    if hosted and len(hosted) == len(named):
        return "none"
    tools = [_named(tool) for tool, kind in zip(named, kinds, strict=True) if kind not in hosted]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def flat_name(named: Mapping[str, Any]) -> str:
    """The name in chat of what a tool, a call or a choice names."""
    namespace = named.get("namespace")
    return f"{namespace}{SEPARATOR}{named['name']}" if isinstance(namespace, str) else str(named["name"])


def _add(
    found: ChatTools, where: str, tool: Mapping[str, Any], namespace: str | None, *, may_leave_out: bool
) -> None:
    kind = tool.get("type")
    match kind:
        case "function" | "custom":
            _add_named(found, where, tool, namespace)
        case "namespace" if namespace is None:
            name = _name(where, tool)
            for index, inner in enumerate(_inner(where, tool)):
                _add(found, f"{where}.tools[{index}]", inner, name, may_leave_out=may_leave_out)
        case str() if kind in HOSTED and may_leave_out:
            found.left_out.append(kind)
        case str() if kind in HOSTED:
            refuse(
                f"{where} has type {kind!r}, which cannot run here: leave it out, or use tool_choice auto.",
                "tools",
            )
        case _:
            refuse(
                f"{where} has type {str(kind)[:60]!r}; supported are function, custom and namespace.", "tools"
            )


def _add_named(found: ChatTools, where: str, tool: Mapping[str, Any], namespace: str | None) -> None:
    own = ToolName(_name(where, tool), namespace, is_custom=tool["type"] == "custom")
    flat = flat_name(own._asdict())
    if found.names.setdefault(flat, own) != own:
        refuse(f"{where}: two tools are called {flat[:60]!r}.", "tools")
    if own.is_custom:
        function = _custom_function(tool)
    else:
        function = {key: value for key, value in tool.items() if key != "type"}
    found.functions.append({"type": "function", "function": function | {"name": flat}})


def _custom_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function with one text argument, for a custom tool.

    The model is shown the grammar of that text; nothing enforces it.
    """
    description = str(tool.get("description") or "")
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        grammar = f"The input follows this grammar ({form.get('syntax')}):\n{form.get('definition')}"
        description = f"{description}\n\n{grammar}" if description else grammar
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return {"name": tool["name"], "description": description, "parameters": parameters}


def _name(where: str, tool: Mapping[str, Any]) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        refuse(f"{where}.name must be a string.", "tools")
    return name


def _inner(where: str, tool: Mapping[str, Any]) -> list[dict[str, Any]]:
    inner = tool.get("tools")
    if not isinstance(inner, list) or not all(isinstance(each, dict) for each in inner):
        refuse(f"{where}.tools must be a list of tools.", "tools")
    return inner
