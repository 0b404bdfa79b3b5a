"""DeepSeek V3, R1 and V3.1: calls between tokens of their own (pure)."""

from __future__ import annotations

from router.tool_parsers.base import CallFormat, State, ToolParser, Tools
from router.tool_parsers.json_text import MAX_NAME, JsonEnd

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MAX_HEAD = 2 * MAX_NAME
"""Characters between the beginning of a call and its arguments."""


class DeepseekV3(ToolParser):
    """Per call ``BEGIN function SEP name NEWLINE ```json NEWLINE {...} NEWLINE ``` END``."""

    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    written = CallFormat(
        f"{CALL_BEGIN}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}",
        between="\n", begin=CALLS_BEGIN, end=CALLS_END,
    )  # fmt: skip

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._arguments = JsonEnd()

    def _start(self) -> State | None:
        return self._outside

    def _outside(self) -> State | None:
        marker = self._passed(CALLS_BEGIN, CALL_BEGIN, CALL_END, CALLS_END)
        return None if marker is None else self._head if marker == CALL_BEGIN else self._outside

    def _head(self) -> State | None:
        """The name, up to where the arguments begin."""
        found = [at for mark in ("{", CALL_END) if (at := self._buffer.find(mark, 0, MAX_HEAD)) >= 0]
        if not found and len(self._buffer) < MAX_HEAD and not self._ended:
            return None
        head = self._buffer[: min(found, default=0)]
        name = self._name_in(head)
        if name is None:
            return self._no_call()
        self._take(len(head))
        self._opening = ""
        self._begin(name)
        if not self._buffer.startswith("{"):
            self._argue("{}")
            return self._outside
        self._arguments = JsonEnd()
        return self._pass_arguments

    def _pass_arguments(self) -> State | None:
        self._argue(self._take(self._arguments.feed(self._buffer)))
        return self._tail if self._arguments.found else None

    def _tail(self) -> State | None:
        """What stands between the arguments and the end of the call is dropped."""
        end = self._buffer.find(CALL_END)
        if end >= 0:
            self._take(end + len(CALL_END))
            return self._outside
        self._take(max(0, len(self._buffer) - len(CALL_END) + 1))
        return None

    def _no_call(self) -> State:
        self._give_back()
        return self._outside

    @staticmethod
    def _name_in(head: str) -> str | None:
        _, separator, rest = head.partition(SEPARATOR)
        name = rest.split("\n", 1)[0].strip()
        return name if separator and name else None


class DeepseekV31(DeepseekV3):
    """Per call ``BEGIN name SEP {...} END``."""

    written = CallFormat(CALL_BEGIN, SEPARATOR, CALL_END, between="", begin=CALLS_BEGIN, end=CALLS_END)

    @staticmethod
    def _name_in(head: str) -> str | None:
        name, separator, _ = head.partition(SEPARATOR)
        return name.strip() if separator and name.strip() else None
