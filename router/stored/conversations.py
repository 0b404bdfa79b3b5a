"""Items of the conversation that a response answers (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from router.errors import refuse

Item = dict[str, Any]

MOST_LISTED = 100


class ItemList(msgspec.Struct):
    """A page of items, in OpenAI's form."""

    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


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


def page_of(items: Sequence[Item], limit: str | None, order: str | None, after: str | None) -> ItemList:
    """The page that a client asks for.

    Raises:
        ApiError: a parameter is wrong (400).
    """
    is_number = limit is None or (limit.isascii() and limit.isdecimal())
    if not is_number or not 1 <= int((limit or "20")[:9]) <= MOST_LISTED:
        refuse(f"limit must be a whole number from 1 to {MOST_LISTED}, got {(limit or '')[:20]!r}.", "limit")
    if order not in (None, "asc", "desc"):
        refuse("order must be asc or desc.", "order")
    found = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [each["id"] for each in found]
        if after not in ids:
            refuse("after must be the id of an item of this response.", "after")
        found = found[ids.index(after) + 1 :]
    count = int(limit or 20)
    shown = found[:count]
    ids = [each["id"] for each in shown]
    return ItemList(shown, ids[0] if ids else None, ids[-1] if ids else None, len(found) > count)
