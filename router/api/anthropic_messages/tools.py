"""Tools that the model may call at the end of a conversation (pure).

Tools may be declared for later (``defer_loading``), and come and go on the way. Templates show one list of
tools, so it is the list that holds where the answer begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.errors import refuse

Tool = dict[str, Any]
Block = dict[str, Any]

CHANGES = ("tool_addition", "tool_removal")
"""Blocks of instructions that offer a tool, or no longer do."""
REFERENCE = "tool_reference"


def offered(tools: list[Tool], messages: list[dict[str, Any]]) -> list[Tool]:
    """Tools that may be called now, in the order of their declaration.

    Raises:
        ApiError: a change names no tool that was declared.
    """
    declared = {str(tool.get("name")): tool for tool in tools}
    waiting = {name for name, tool in declared.items() if tool.get("defer_loading")}
    if len(declared) < len(tools):
        refuse("tools has two tools of one name.", "tools")
    for index, message in enumerate(messages):
        for block in blocks_of(message.get("content")):
            if message.get("role") == "system" and block.get("type") in CHANGES:
                _change(index, block, declared, waiting)
            elif message.get("role") == "user" and block.get("type") == "tool_result":
                waiting -= {str(found.get("tool_name")) for found in references(block.get("content"))}
    return [tool for name, tool in declared.items() if name not in waiting]


def references(content: Any) -> Iterator[Block]:
    """Tools that a tool search has found, by the content of its result."""
    return (block for block in blocks_of(content) if block.get("type") == REFERENCE)


def blocks_of(content: Any) -> Iterator[Block]:
    return (block for block in content if isinstance(block, dict)) if isinstance(content, list) else iter(())


def _change(index: int, block: Block, declared: dict[str, Tool], waiting: set[str]) -> None:
    tool = block.get("tool")
    change: Block = tool if isinstance(tool, dict) else {}
    definition = change.get("definition")
    adds = block["type"] == "tool_addition"
    if change.get("type") == REFERENCE:
        name = str(change.get("name"))
        if name not in declared:
            refuse(f"messages[{index}] names tool {name[:60]!r}, which tools does not have.", "messages")
    elif change.get("type") == "tool_definition" and isinstance(definition, dict) and adds:
        name = str(definition.get("name"))
        declared[name] = definition
    else:
        refuse(
            f"messages[{index}]: {block['type']} needs a tool of your own, by name or definition.", "messages"
        )
    if adds:
        waiting.discard(name)
    else:
        waiting.add(name)
