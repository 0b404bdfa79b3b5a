"""A turn as a sequence of items, each begun and ended: reasoning, text, calls (pure).

/v1/responses and /v1/messages both answer with such items, and stream them one after another.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.text.chat_template import INVALID_JSON
from router.turns.assistant_turns import TurnReader
from router.turns.turn_events import CallArguments, CallBegin, Content, Parsed, Reasoning


class ItemKind(enum.Enum):
    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()


@dataclass
class Item:
    """Reasoning, text or a call of a turn, as far as it has been generated."""

    index: int
    kind: ItemKind
    name: str = ""
    """Name of the function that is called."""
    call_id: str = ""
    text: str = ""
    """Reasoning, text, or the JSON text of arguments."""


class Opened(msgspec.Struct, frozen=True):
    item: Item


class TextAdded(msgspec.Struct, frozen=True):
    item: Item
    text: str


class Closed(msgspec.Struct, frozen=True):
    item: Item


ItemEvent = Opened | TextAdded | Closed


class ItemSequence:
    """Items of one turn, made of its text as it comes."""

    def __init__(self, reader: TurnReader) -> None:
        self._reader = reader
        self._is_open = False
        self.items: list[Item] = []

    def __repr__(self) -> str:
        return f"<ItemSequence of {len(self.items)} items>"

    @property
    def num_reasoning_tokens(self) -> int:
        return self._reader.num_reasoning_tokens

    @property
    def calls_tools(self) -> bool:
        return any(item.kind is ItemKind.CALL for item in self.items)

    def read(self, parts: Sequence[tuple[str, int]], *, ended: bool) -> list[ItemEvent]:
        """Events of the items for the next texts, each with its number of tokens.

        When ``ended``, all items are closed.
        """
        events: list[ItemEvent] = []
        for parsed in self._reader.read_parts(parts, ended=ended):
            self._take(parsed, events)
        if ended:
            self._close(events)
        return events

    def _take(self, parsed: Parsed, events: list[ItemEvent]) -> None:
        match parsed:
            case CallBegin(name, id):
                self._open(ItemKind.CALL, events, name, id or self._reader.new_call_id())
                return
            case Reasoning(text):
                kind = ItemKind.REASONING
            case Content(text):
                kind = ItemKind.TEXT
            case CallArguments(text):
                kind = ItemKind.CALL
        if not self._is_open or self.items[-1].kind is not kind:
            self._open(kind, events)
        item = self.items[-1]
        item.text += text
        events.append(TextAdded(item, text))

    def _open(self, kind: ItemKind, events: list[ItemEvent], name: str = "", call_id: str = "") -> None:
        self._close(events)
        self._is_open = True
        self.items.append(Item(len(self.items), kind, name, call_id))
        events.append(Opened(self.items[-1]))

    def _close(self, events: list[ItemEvent]) -> None:
        if self._is_open:
            self._is_open = False
            events.append(Closed(self.items[-1]))


def arguments_object(arguments: str) -> msgspec.Raw | dict[str, Any]:
    """Arguments of a call as a JSON object.

    Text that is no JSON object gets a key of its own.
    """
    text = arguments or "{}"
    try:
        msgspec.json.decode(text, type=dict[str, Any])
    except (ValueError, RecursionError):
        return {INVALID_JSON: arguments}
    return msgspec.Raw(text.encode())
