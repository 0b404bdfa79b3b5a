"""Mistral: ``[TOOL_CALLS]``, then a JSON list of calls, or name and arguments of each (pure)."""

from __future__ import annotations

import re
import string

from router.ids import letters
from router.turns.tool_parsers.base import CallFormat, State, Tools
from router.turns.tool_parsers.json_text import MAX_NAME, JsonEnd
from router.turns.tool_parsers.marked_json import MarkedJson

ARGS, CALL_ID = "[ARGS]", "[CALL_ID]"
NAME = re.compile(r"[\w.\-]+")


class Mistral(MarkedJson):
    """``[TOOL_CALLS][{"name": "f", "arguments": {...}}]`` of the older tokenizers; of the newer ones,
    once per call, ``[TOOL_CALLS]f[ARGS]{...}`` or ``[TOOL_CALLS]f{...}``."""

    markers = ("[TOOL_CALLS]", ARGS, CALL_ID)
    opening = ("[TOOL_CALLS]",)
    written = CallFormat('{"name": "', '", "arguments": ', "}", between=", ", begin="[TOOL_CALLS][", end="]")

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._arguments = JsonEnd()

    @staticmethod
    def new_call_id() -> str:
        """Mistral's templates take nine letters and digits only."""
        return letters(string.ascii_letters + string.digits, 9)

    def _opened(self) -> State | None:
        mark = self._next()
        if mark is None or not NAME.match(mark):
            return super()._opened()
        return self._name

    def _name(self) -> State | None:
        """A name, up to what its arguments begin with."""
        end = self._buffer.find("{", 0, MAX_NAME)
        if end < 0:
            if len(self._buffer) < MAX_NAME and not self._ended:
                return None
            self._give_back()
            return self._outside
        name, _, between = self._buffer[:end].partition("[")
        if not NAME.fullmatch(name.strip()) or (between and not between.strip().endswith(ARGS[1:])):
            self._give_back()
            return self._outside
        self._take(end)
        self._opening = ""
        self._begin(name.strip())
        self._arguments = JsonEnd()
        return self._pass_arguments

    def _pass_arguments(self) -> State | None:
        self._argue(self._take(self._arguments.feed(self._buffer)))
        return self._outside if self._arguments.found else None
