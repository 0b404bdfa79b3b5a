"""JSON in chunks (pure): ends of values, and calls like ``{"name": ..., "arguments": ...}``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from router.turns.turn_events import CallArguments, CallBegin, Parsed

MAX_NAME = 256
"""Characters of a key or a function name: what is longer is none."""

OUTSIDE_STRING = re.compile(r'[{}\[\]"]')
INSIDE_STRING = re.compile(r'["\\]')
AFTER_SCALAR = re.compile(r"[\s,;}\]<]")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)

ARGUMENT_KEYS = ("arguments", "parameters")
NAME_KEYS = ("name", "function")

Step = Callable[[list[Parsed]], bool]
"""Reads one thing; False when more text is needed."""


class JsonEnd:
    """Search for the end of a JSON value; brackets are counted, not checked."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._begun = False
        self._scalar = False
        self.found = False

    def __repr__(self) -> str:
        return f"<JsonEnd depth={self._depth} in_string={self._in_string} found={self.found}>"

    def feed(self, text: str) -> int:
        """Number of characters of the next text in the value: all until ``found``."""
        position = 0
        if text and not self._begun:
            self._begun = True
            self._scalar = text[0] not in '{["'
        if self._scalar:
            end = AFTER_SCALAR.search(text)
            self.found = end is not None
            return end.start() if end else len(text)
        while not self.found and position < len(text):
            position = self._in_text(text, position) if self._in_string else self._between(text, position)
        return position

    def _in_text(self, text: str, position: int) -> int:
        if self._escaped:
            self._escaped = False
            return position + 1
        mark = INSIDE_STRING.search(text, position)
        if mark is None:
            return len(text)
        if mark[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.found = self._depth == 0
        return mark.end()

    def _between(self, text: str, position: int) -> int:
        mark = OUTSIDE_STRING.search(text, position)
        if mark is None:
            return len(text)
        if mark[0] == '"':
            self._in_string = True
        else:
            self._depth += 1 if mark[0] in "{[" else -1
            self.found = self._depth <= 0
        return mark.end()


class JsonCall:
    """Reads one ``{"name": "f", "arguments": {...}}``, keys in any order; other keys are passed over.

    ``feed`` returns the events that are certain. In the end it is either ``done``, and ``rest`` is the text
    after it, or it has ``failed``: then it was no call, and ``rest`` is all of its text.
    """

    def __init__(self, *, strict: bool = False) -> None:
        """``strict``: with arguments and without keys that no call has.

        For text that may be just JSON.
        """
        self.done = False
        self.failed = False
        self._strict = strict
        self._text = ""
        self._at = 0
        """Up to here the text has been read."""
        self._step: Step = self._open
        self._key = ""
        self._name: str | None = None
        self._begun = False
        self._value = JsonEnd()
        self._value_start = 0
        self._kept: str | None = None
        """Arguments that came before the name."""

    def __repr__(self) -> str:
        return f"<JsonCall {self._name} done={self.done} failed={self.failed}>"

    @property
    def rest(self) -> str:
        return self._text if self.failed else self._text[self._at :]

    def feed(self, text: str) -> list[Parsed]:
        self._text += text
        events: list[Parsed] = []
        while not (self.done or self.failed) and self._step(events):
            pass
        return events

    def stop(self) -> None:
        """No more text comes: a call that has begun stays, cut short.

        Anything else was none.
        """
        if not self.done:
            self._fail()

    # ---- steps

    def _open(self, events: list[Parsed]) -> bool:
        return self._expect("{", self._next_key)

    def _next_key(self, events: list[Parsed]) -> bool:
        if self._peek() == "}":
            self._at += 1
            self._finish(events)
            return False
        key = self._string()
        if key is None:
            return False
        self._key = key
        if self._strict and key not in (*NAME_KEYS, *ARGUMENT_KEYS, "type", "id"):
            self._fail()
        self._step = self._colon
        return True

    def _colon(self, events: list[Parsed]) -> bool:
        return self._expect(":", self._begin_value)

    def _begin_value(self, events: list[Parsed]) -> bool:
        first = self._peek()
        if first is None:
            return False
        if self._key in NAME_KEYS and first == '"':
            name = self._string()
            if name is None:
                return False
            self._name = name
            self._step = self._after_value
            return True
        self._value, self._value_start = JsonEnd(), self._at
        streams = self._key in ARGUMENT_KEYS and self._name is not None and first in "{["
        if streams and not self._begun:
            self._begin(events)
            self._step = self._pass_value
        else:
            self._step = self._keep_value
        return True

    def _pass_value(self, events: list[Parsed]) -> bool:
        count = self._value.feed(self._text[self._at :])
        events.append(CallArguments(self._text[self._at : self._at + count]))
        self._text, self._at = self._text[self._at + count :], 0
        if self._value.found:
            self._step = self._after_value
        return self._value.found

    def _keep_value(self, events: list[Parsed]) -> bool:
        self._at += self._value.feed(self._text[self._at :])
        if not self._value.found:
            return False
        if self._key in ARGUMENT_KEYS:
            self._kept = _as_arguments(self._text[self._value_start : self._at])
        self._step = self._after_value
        return True

    def _after_value(self, events: list[Parsed]) -> bool:
        mark = self._peek()
        if mark is None:
            return False
        if mark == "}":
            self._at += 1
            self._finish(events)
        elif mark == ",":
            self._at += 1
            self._step = self._next_key
        else:
            self._fail()
        return True

    # ---- helpers

    def _begin(self, events: list[Parsed]) -> None:
        assert self._name is not None
        self._begun = True
        events.append(CallBegin(self._name))

    def _finish(self, events: list[Parsed]) -> None:
        if not self._begun:
            if not self._name or (self._strict and self._kept is None):
                self._fail()
                return
            self._begin(events)
            events.append(CallArguments(self._kept if self._kept is not None else "{}"))
        self.done = True

    def _fail(self) -> None:
        """End the call in progress; text that was sent is not revoked."""
        self.done, self.failed = self._begun, not self._begun

    def _peek(self) -> str | None:
        """The next character that is not blank."""
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._text[self._at] if self._at < len(self._text) else None

    def _expect(self, mark: str, step: Step) -> bool:
        found = self._peek()
        if found is None:
            return False
        if found != mark:
            self._fail()
            return False
        self._at += 1
        self._step = step
        return True

    def _string(self) -> str | None:
        """The next string; None if it is incomplete or not a string."""
        first = self._peek()
        if first is None:
            return None
        match = STRING.match(self._text, self._at)
        length = (match.end() if match else len(self._text)) - self._at
        if first != '"' or length > MAX_NAME:
            self._fail()
            return None
        if match is None:
            return None
        self._at = match.end()
        text = _unquoted(match[0])
        if text is None:
            self._fail()
        return text


def _as_arguments(value: str) -> str:
    """A whole value as the JSON text of arguments.

    Some models write it as a string, or null.
    """
    if value.startswith('"'):
        text = _unquoted(value)
        return value if text is None else text
    return "{}" if value == "null" else value


def _unquoted(string: str) -> str | None:
    """The text of a JSON string; None if broken, or not UTF-8 (lone surrogates)."""
    try:
        text = str(json.loads(string, strict=False))
        text.encode()
    except ValueError:
        return None
    return text
