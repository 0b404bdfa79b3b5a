"""Llama 3.1 and later in JSON: ``{"name": ..., "parameters": {...}}``, several behind semicolons (pure)."""

from __future__ import annotations

from router.turns.tool_parsers.base import CallFormat, State
from router.turns.tool_parsers.marked_json import MarkedJson


class LlamaJson(MarkedJson):
    """The whole answer is calls, or none is: only ``<|python_tag|>`` begins one behind text."""

    markers = ("<|python_tag|>",)
    opening = markers
    strict = True
    written = CallFormat('{"name": "', '", "parameters": ', "}", between="; ")

    def _start(self) -> State | None:
        mark = self._next()
        if mark is None and not self._ended:
            return None
        if mark == "{":
            return self._begin_call()
        if mark is None and self._follows_call:  # a semicolon behind the last call
            self._opening = ""
            return None
        self._buffer, self._opening = self._opening + self._buffer, ""
        return super()._outside

    def _outside(self) -> State | None:
        """Right behind a call the next one may begin, usually after a semicolon."""
        if self._follows_call and self._call.done:
            mark = self._next()
            if mark is None:
                return None
            if mark == ";":
                self._opening += self._take(1)
            if mark in ";{":
                return self._start
        return super()._outside()
