"""Calls written with a tag per argument: Qwen3-Coder and its like, GLM 4.5 (pure)."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from router.turns.tool_parsers.base import State, ToolParser, Tools
from router.turns.tool_parsers.json_text import MAX_NAME

CALL, CALL_END = "<tool_call>", "</tool_call>"


class Tagged(ToolParser):
    """Base of formats with a tag per argument.

    Arguments come out one by one, as JSON: text where the tool's schema says so, else whatever JSON value is
    written there, or text if it is none.
    """

    key_begin: ClassVar[str]
    key_end: ClassVar[str]
    call_end: ClassVar[str]
    value_end: ClassVar[tuple[str, ...]]
    """Any of these ends a value.

    Only the first is a part of it, the others begin what comes next.
    """

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._properties: Mapping[str, Any] = {}
        self._is_first = True
        self._key = ""

    def _start(self) -> State | None:
        return self._outside

    @abstractmethod
    def _outside(self) -> State | None:
        """State between calls."""

    def _before_argument(self) -> State | None:
        """State behind the name, or behind an argument."""
        self._next()
        may_come = any(mark.startswith(self._buffer) for mark in (self.key_begin, self.call_end))
        mark = self._taken(self.key_begin, self.call_end)
        if not mark and may_come:
            return None  # and if no more comes, the call stays cut short
        return self._in_key if mark == self.key_begin else self._end_call()

    def _before_value(self) -> State | None:
        return self._in_value

    def _begin_call(self, name: str) -> State:
        self._opening = ""
        self._properties = _properties_of(self._tools, name)
        self._is_first = True
        self._begin(name)
        return self._before_argument

    def _in_key(self) -> State | None:
        key = self._up_to(self.key_end)
        if key is None:
            return None
        self._key = key.strip()
        return self._before_value if self._key else self._end_call()

    def _in_value(self) -> State | None:
        found = [(at, mark) for mark in self.value_end if (at := self._buffer.find(mark)) >= 0]
        if not found:
            return None
        at, mark = min(found)
        value = self._take(at).removeprefix("\n").removesuffix("\n")
        if mark == self.value_end[0]:
            self._take(len(mark))
        as_json = _as_json(value, self._properties.get(self._key))
        self._argue(f"{'{' if self._is_first else ', '}{_dump(self._key)}: {as_json}")
        self._is_first = False
        return self._before_argument

    def _end_call(self) -> State:
        self._argue("{}" if self._is_first else "}")
        self._opening = ""
        return self._outside

    def _up_to(self, mark: str) -> str | None:
        """The text before a mark, which is taken with it.

        None while the mark has not come, empty if it does not come soon enough for a name.
        """
        at = self._buffer.find(mark, 0, MAX_NAME)
        if at < 0:
            return "" if len(self._buffer) >= MAX_NAME else None
        text = self._take(at)
        self._take(len(mark))
        return text


class Qwen3Coder(Tagged):
    """``<tool_call><function=f><parameter=a>1</parameter></function></tool_call>``."""

    calls: ClassVar[tuple[str, str]] = (CALL, CALL_END)
    """Markers around calls."""
    name_begin: ClassVar[str] = "<function="
    name_end: ClassVar[str] = ">"
    markers = (CALL, CALL_END)
    key_begin, key_end, call_end = "<parameter=", ">", "</function>"
    value_end = ("</parameter>", "<parameter=", "</function>")

    def _outside(self) -> State | None:
        marker = self._passed(*self.calls, self.name_begin)
        if marker is None or marker == self.calls[1]:
            return None if marker is None else self._outside
        return self._opened if marker == self.calls[0] else self._name

    def _opened(self) -> State | None:
        self._next()
        mark = self._taken(self.name_begin)
        return None if mark is None else self._name if mark else self._no_call()

    def _name(self) -> State | None:
        end = self._buffer.find(self.name_end, 0, MAX_NAME)
        if end < 0 and len(self._buffer) < MAX_NAME and not self._ended:
            return None
        name = self._buffer[: max(end, 0)].strip()
        if not name or "\n" in name:
            return self._no_call()
        self._take(end + len(self.name_end))
        return self._begin_call(name)

    def _no_call(self) -> State:
        self._give_back()
        return self._outside


class SeedOss(Qwen3Coder):
    """Seed-OSS: the calls of :class:`Qwen3Coder`, in ``<seed:tool_call>``."""

    calls = ("<seed:tool_call>", "</seed:tool_call>")
    markers = calls


class MinimaxM2(Qwen3Coder):
    """``<invoke name="f"><parameter name="a">1</parameter></invoke>`` in ``<minimax:tool_call>``."""

    calls = ("<minimax:tool_call>", "</minimax:tool_call>")
    markers = calls
    name_begin, name_end = '<invoke name="', '">'
    key_begin, key_end, call_end = '<parameter name="', '">', "</invoke>"
    value_end = ("</parameter>", '<parameter name="', "</invoke>")


class Glm45(Tagged):
    """``<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>``."""

    markers = (CALL, CALL_END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    key_begin, key_end, call_end = "<arg_key>", "</arg_key>", CALL_END
    value_end = ("</arg_value>", "<arg_key>", CALL_END)

    def _outside(self) -> State | None:
        marker = self._passed(CALL, CALL_END)
        return None if marker is None else self._name if marker == CALL else self._outside

    def _name(self) -> State | None:
        found = [at for mark in ("<arg_key>", CALL_END) if (at := self._buffer.find(mark, 0, MAX_NAME)) >= 0]
        if not found and len(self._buffer) < MAX_NAME and not self._ended:
            return None
        name = self._buffer[: min(found, default=0)].strip()
        if not name or any(character.isspace() for character in name):
            self._give_back()
            return self._outside
        self._take(min(found))
        return self._begin_call(name)

    def _before_value(self) -> State | None:
        self._next()
        mark = self._taken("<arg_value>")
        return None if mark is None else self._in_value if mark else self._end_call()


def _properties_of(tools: Tools, name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = tool.get("function") or {}
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _as_json(value: str, schema: Any) -> str:
    """A value as its schema wants it."""
    if _takes_text(schema):
        return _dump(value)
    try:
        msgspec.json.decode(value)
    except (ValueError, RecursionError):
        return _dump({"True": True, "False": False, "None": None}.get(value.strip(), value))
    return value.strip()


def _takes_text(schema: Any) -> bool:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
