"""Calls written as a Python list, ``[f(a=1, b="x"), g()]``: Llama 3.2, Llama 4, ToolACE (pure)."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Sequence
from typing import Any

from router.turns.tool_parsers.base import State, ToolParser, Tools
from router.turns.tool_parsers.json_text import MAX_NAME

LIST_BEGIN, LIST_END = "<|python_start|>", "<|python_end|>"

HEAD = re.compile(r"\s*([A-Za-z_][\w.]*)\s*\(\s*(\)|(?=[A-Za-z_]\w*\s*=[^=]))")
MAYBE_HEAD = re.compile(r"\s*([A-Za-z_][\w.]*\s*(\(\s*([A-Za-z_]\w*\s*=?)?)?)?")
KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
MAYBE_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*\s*=?)?")

MARK = re.compile(r"[\[\](){}'\",\\]")
WORDS = {"true": True, "false": False, "null": None, "none": None}


class Pythonic(ToolParser):
    """The whole answer is the list, or it stands between ``<|python_start|>`` and ``<|python_end|>``.

    Arguments come out one by one, as JSON. What is no literal is passed on as a string.
    """

    markers = (LIST_BEGIN, LIST_END)

    @classmethod
    def call_openings(cls, tools: Tools) -> Sequence[str]:
        names = [f"[{tool['function']['name']}(" for tool in tools]
        return [*names, *(LIST_BEGIN + name for name in names)]

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._is_first = True
        self._key = ""
        self._value = PythonEnd()
        self._value_text = ""

    def _start(self) -> State | None:
        mark = self._next()
        if mark is None and not self._ended:
            return None
        if mark == "[":
            return self._open_list
        self._buffer, self._opening = self._opening + self._buffer, ""
        return self._outside

    def _outside(self) -> State | None:
        marker = self._passed(LIST_BEGIN, LIST_END)
        return None if marker is None else self._open_list if marker == LIST_BEGIN else self._outside

    def _open_list(self) -> State | None:
        mark = self._next()
        if mark == "[":
            self._opening += self._take(1)
            return self._head
        return None if mark is None and not self._ended else self._no_call()

    def _head(self) -> State | None:
        """State of a call's name, its parenthesis, and the first keyword or the end."""
        match = HEAD.match(self._buffer[:MAX_NAME])
        if match is None:
            may_come = MAYBE_HEAD.fullmatch(self._buffer) and len(self._buffer) < MAX_NAME
            return None if may_come and not self._ended else self._no_call()
        self._take(match.end())
        self._opening = ""
        self._begin(match[1])
        self._is_first = True
        return self._keyword if match[2] != ")" else self._close

    def _keyword(self) -> State | None:
        if self._next() == ")":
            self._take(1)
            return self._close
        text = self._buffer[:MAX_NAME]
        match = KEYWORD.match(text)
        if match is None or match.end() == len(text):
            may_come = MAYBE_KEYWORD.fullmatch(self._buffer) and len(self._buffer) < MAX_NAME
            return None if may_come else self._close
        self._take(match.end())
        self._key, self._value, self._value_text = match[1], PythonEnd(), ""
        return self._argument

    def _argument(self) -> State | None:
        self._value_text += self._take(self._value.feed(self._buffer))
        if not self._value.found:
            return None
        self._argue(f"{'{' if self._is_first else ', '}{_json(self._key)}: {_as_json(self._value_text)}")
        self._is_first = False
        return self._keyword if self._take(1) == "," else self._close

    def _close(self) -> State | None:
        """State behind the parenthesis."""
        self._argue("{}" if self._is_first else "}")
        return self._between

    def _between(self) -> State | None:
        mark = self._next()
        if mark is None:
            return None
        self._opening = ""
        if mark not in ",]":
            return self._outside
        self._take(1)
        return self._head if mark == "," else self._outside

    def _no_call(self) -> State:
        self._give_back()
        return self._outside


class PythonEnd:
    """Search for the comma or parenthesis behind a Python value."""

    def __init__(self) -> None:
        self._depth = 0
        self._quote = ""
        self._escaped = False
        self.found = False

    def __repr__(self) -> str:
        return f"<PythonEnd depth={self._depth} quote={self._quote} found={self.found}>"

    def feed(self, text: str) -> int:
        """Number of characters of the next text in the value: all until ``found``."""
        position = 0
        if self._escaped and text:
            self._escaped, position = False, 1
        while mark := MARK.search(text, position):
            if self._ends_at(mark[0]):
                return mark.start()
            position = mark.end()
            if self._quote and mark[0] == "\\":
                self._escaped = position == len(text)
                position += 1
        return len(text)

    def _ends_at(self, mark: str) -> bool:
        if self._quote:
            self._quote = "" if mark == self._quote else self._quote
        elif mark in "'\"":
            self._quote = mark
        elif mark in "[({":
            self._depth += 1
        elif mark in "])}":
            self.found = self._depth == 0
            self._depth -= 1
        elif mark == ",":
            self.found = self._depth == 0
        return self.found


def _as_json(source: str) -> str:
    """A Python literal as JSON; anything else as a string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python does not know
            text = _json(_value(ast.parse(source.strip(), mode="eval").body))
            text.encode()  # lone surrogates are no text
            return text
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return _json(source.strip())


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=word) if word in WORDS:
            return WORDS[word]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
            return -number
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True) if key}
    raise ValueError("no literal")


def _key(node: ast.expr) -> str:
    key = _value(node)
    return key if isinstance(key, str) else _json(key)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
