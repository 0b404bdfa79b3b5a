"""Events of an answer's text: pieces of reasoning, content and tool calls (pure)."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """More text of the reasoning before the answer."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """More text of the answer."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """Begin of a tool call, whose arguments follow."""

    name: str
    id: str = ""
    """The call's, where the model writes one."""


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of the latest call's arguments, as the model wrote it."""

    text: str


Parsed = Reasoning | Content | CallBegin | CallArguments


def merged(events: Iterable[Parsed]) -> list[Parsed]:
    """Events with neighbours of one kind joined, and without empty ones."""
    found: list[Parsed] = []
    for event in events:
        if isinstance(event, CallBegin):
            found.append(event)
        elif found and type(found[-1]) is type(event):
            last = found[-1]
            assert not isinstance(last, CallBegin)
            found[-1] = type(event)(last.text + event.text)
        elif event.text:
            found.append(event)
    return found
