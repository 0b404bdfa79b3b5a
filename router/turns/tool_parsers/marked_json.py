"""Formats of JSON calls, single or in a list, behind a marker: Hermes, Granite (pure)."""

from __future__ import annotations

from typing import ClassVar

from router.turns.tool_parsers.base import CallFormat, State, ToolParser, Tools
from router.turns.tool_parsers.json_text import JsonCall
from router.turns.turn_events import CallArguments, CallBegin


class MarkedJson(ToolParser):
    """``OPEN {"name": ..., "arguments": {...}} CLOSE`` or ``OPEN [{...}, {...}] CLOSE``, again and again."""

    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[tuple[str, ...]] = ()
    strict: ClassVar[bool] = False
    """See :class:`JsonCall`."""

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._call = JsonCall()
        self._in_list = False

    def _start(self) -> State | None:
        return self._outside

    def _outside(self) -> State | None:
        marker = self._passed(*self.opening, *self.closing)
        return None if marker is None else self._outside if marker in self.closing else self._opened

    def _opened(self) -> State | None:
        """State behind the marker."""
        mark = self._next()
        if mark == "[":
            self._opening += self._take(1)
        self._in_list = mark == "["
        if mark is None and not self._ended:
            return None
        return self._begin_call()

    def _begin_call(self) -> State:
        self._call = JsonCall(strict=self.strict)
        return self._in_call

    def _in_call(self) -> State | None:
        for event in self._call.feed(self._take(len(self._buffer))):
            if isinstance(event, CallBegin):
                self._begin(event.name)
            elif isinstance(event, CallArguments):
                self._argue(event.text)
        if self._ended:
            self._call.stop()
        if not (self._call.done or self._call.failed):
            return None
        self._buffer = self._call.rest
        if self._call.failed:
            self._give_back()
            return self._outside
        self._opening = ""
        return self._between if self._in_list else self._outside

    def _between(self) -> State | None:
        """State behind a call of a list."""
        mark = self._next()
        if mark is None:
            return None
        if mark not in ",]":
            return self._outside
        self._take(1)
        self._opening = ""
        return self._begin_call() if mark == "," else self._outside


class Hermes(MarkedJson):
    """Hermes 2 and 3, Qwen 2.5 and 3, Granite 4: ``<tool_call>{...}</tool_call>``."""

    markers = ("<tool_call>", "</tool_call>")
    opening = ("<tool_call>",)
    closing = ("</tool_call>",)
    written = CallFormat('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")


class Granite(MarkedJson):
    """Granite 3: ``<|tool_call|>[{...}, {...}]``, 3.1 writes ``<tool_call>`` for the marker."""

    markers = ("<|tool_call|>", "<tool_call>")
    opening = markers
    written = CallFormat('{"name": "', '", "arguments": ', "}", between=", ", begin="<|tool_call|>[", end="]")


class Granite20bFunctionCalling(MarkedJson):
    """Granite 20B function calling: ``<function_call> {...}``."""

    markers = ("<function_call>",)
    opening = markers
    written = CallFormat('<function_call> {"name": "', '", "arguments": ', "}", between="\n")


class InternLm(MarkedJson):
    """InternLM 2 and later: ``<|action_start|><|plugin|>{...}<|action_end|>``."""

    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    opening = ("<|action_start|><|plugin|>",)
    closing = ("<|action_end|>",)
    written = CallFormat(
        '<|action_start|><|plugin|>{"name": "', '", "parameters": ', "}<|action_end|>", between="\n"
    )


class HunyuanA13b(MarkedJson):
    """Hunyuan A13B: ``<tool_calls>[{...}, {...}]</tool_calls>``."""

    markers = ("<tool_calls>", "</tool_calls>")
    opening = ("<tool_calls>",)
    closing = ("</tool_calls>",)
    written = CallFormat(
        '{"name": "', '", "arguments": ', "}", between=", ", begin="<tool_calls>[", end="]</tool_calls>"
    )


class Phi4Mini(MarkedJson):
    """Phi-4-mini: ``functools[{...}, {...}]``."""

    markers = ("functools[",)
    opening = markers
    written = CallFormat('{"name": "', '", "arguments": ', "}", between=", ", begin="functools[", end="]")

    def _opened(self) -> State | None:
        self._in_list = True
        return self._begin_call()


class CallList(MarkedJson):
    """Tool calls as ``[{"name": ..., "parameters": {...}}, ...]`` and nothing else.

    For required calls where the model's own format is unknown, or no JSON.
    """

    opening = ("[",)
    written = CallFormat('{"name": "', '", "parameters": ', "}", between=", ", begin="[", end="]")

    def _start(self) -> State | None:
        return None if self._next() is None else self._opened
