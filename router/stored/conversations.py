"""Items of the conversation that a response answers (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from router.errors import refuse

Item = dict[str, Any]


def items_of(given: str | list[Item], before: Sequence[Item], id: str) -> list[Item]:
    """All items of a conversation: those ``before``, then the input of the response ``id``.

    Each has an id.
    """
    new = [{"role": "user", "content": given}] if isinstance(given, str) else given
    found = list(before)
    for item in new:
        if not isinstance(item, dict):
            refuse("input must be a string or a list of items, which are objects.", "input")
        found.append(_whole(item, f"{id} {len(found)}"))
    return found


def _whole(item: Item, name: str) -> Item:
    """An item with its type, its id, and content in parts."""
    whole = {"type": "message", **item}
    if not whole.get("id"):
        whole["id"] = f"msg_{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    if whole["type"] == "message" and isinstance(content := whole.get("content"), str):
        kind = "output_text" if whole.get("role") == "assistant" else "input_text"
        whole["content"] = [{"type": kind, "text": content}]
    return whole
