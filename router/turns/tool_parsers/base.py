"""Base of all tool parsers, with their search for markers (pure)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec

from router.ids import hex_id
from router.turns.turn_events import CallArguments, CallBegin, Content, Parsed, merged

Tools = Sequence[Mapping[str, Any]]

State: TypeAlias = "Callable[[], State | None]"
"""Consumes what it can of the buffer and returns the next state.

It returns None when it needs more text.
"""

MOST_TURNS = 8
"""Most state changes per character: a state that consumes nothing leads to one that does."""


class CallFormat(msgspec.Struct, frozen=True):
    """A format of tool calls with JSON arguments.

    It has the text around the function's name, as it would be in a JSON string, and the text around its
    arguments.
    """

    before_name: str
    after_name: str
    after_arguments: str
    between: str
    """Text between two calls."""
    begin: str = ""
    end: str = ""
    """Text after all calls."""


class ToolParser(ABC):
    """Parser of tool calls in the text of one answer, for any split into chunks.

    ``feed`` takes the next chunk, ``flush`` marks the end; both return the events that are certain by then.
    All events of an answer, neighbours of one kind joined, do not depend on the split. Text that turns out to
    be no call comes out as content. Events are never revoked, so arguments come as the model wrote them,
    valid JSON or not.

    A format is a few states over one buffer. A state takes from the buffer what is certain; it may only look
    at ``self._ended`` to decide about a text that stops in the middle.
    """

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that the format is recognised by.

    Where they are special tokens they must not be skipped.
    """

    written: ClassVar[CallFormat | None] = None
    """For calls that are asked for; None where arguments are no JSON."""

    def __init__(self, tools: Tools = ()) -> None:
        """``tools`` of the request: some formats need to know what their arguments are."""
        self._tools = tools
        self._buffer = ""
        self._ended = False
        self._state: State = self._start
        self._events: list[Parsed] = []
        self._follows_call = False
        self._opening = ""
        """What was taken since the last certain event, in the belief that a call follows."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} holding {self._buffer!r}>"

    @classmethod
    def call_openings(cls, tools: Tools) -> Sequence[str]:
        """Texts that an answer which calls tools may begin with."""
        return cls.markers[:1]

    @staticmethod
    def new_call_id() -> str:
        """An id for a call, as the model's chat template takes it."""
        return f"chatcmpl-tool-{hex_id()}"

    def feed(self, text: str) -> list[Parsed]:
        self._buffer += text
        return self._run()

    def flush(self) -> list[Parsed]:
        self._ended = True
        return self._run()

    def _run(self) -> list[Parsed]:
        turns = MOST_TURNS * (len(self._opening) + len(self._buffer) + 1)
        while (state := self._state()) is not None:
            self._state = state
            turns -= 1
            if turns < 0:  # a fault of this format, which must not cost more than this one answer
                raise RuntimeError(f"{self!r} goes round in circles")
        events, self._events = self._events, []
        return merged(events)

    @abstractmethod
    def _start(self) -> State | None:
        """The first state."""

    # ---- what states say

    def _say(self, text: str) -> None:
        """Pass text on as content; blanks after a call belong to the format."""
        if self._follows_call:
            text = text.lstrip()
        if text:
            self._follows_call = False
            self._events.append(Content(text))

    def _begin(self, name: str, id: str = "") -> None:
        self._follows_call = True
        self._events.append(CallBegin(name, id))

    def _argue(self, text: str) -> None:
        self._events.append(CallArguments(text))

    def _give_back(self) -> None:
        """Return held text as content, since it is no call."""
        self._say(self._opening)
        self._opening = ""

    # ---- what states look for

    def _take(self, count: int) -> str:
        taken, self._buffer = self._buffer[:count], self._buffer[count:]
        return taken

    def _next(self) -> str | None:
        """The next character that is not blank, None while there is none.

        Blanks before it are taken.
        """
        self._opening += self._take(len(self._buffer) - len(self._buffer.lstrip()))
        return self._buffer[:1] or None

    def _passed(self, *markers: str) -> str | None:
        """Pass text on as content up to the first of some markers; returns that marker.

        Blanks before a marker belong to it.
        """
        found = [(at, marker) for marker in markers if (at := self._buffer.find(marker)) >= 0]
        if found:
            at, marker = min(found)  # no marker begins another
            before = self._take(at)
            self._say(before.rstrip())
            self._opening = before[len(before.rstrip()) :] + self._take(len(marker))
            return marker
        self._say(self._take(len(self._buffer) - (0 if self._ended else held(self._buffer, *markers))))
        return None

    def _taken(self, *markers: str) -> str | None:
        """Take the next marker: empty if there is none, None while unknown."""
        for marker in markers:
            if self._buffer.startswith(marker):
                self._opening += self._take(len(marker))
                return marker
        may_come = any(marker.startswith(self._buffer) for marker in markers)
        return None if may_come and not self._ended else ""


def held(text: str, *markers: str) -> int:
    """Number of last characters that may yet become a marker, with blanks before it."""
    longest = 0
    for marker in markers:
        start = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while start >= 0 and not marker.startswith(text[start:]):
            start = text.find(marker[0], start + 1)
        longest = max(longest, len(text) - start if start >= 0 else 0)
    before = text[: len(text) - longest]
    return longest + len(before) - len(before.rstrip())
