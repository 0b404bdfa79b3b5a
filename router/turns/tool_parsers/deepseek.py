"""DeepSeek V3, R1 and V3.1, Kimi K2: calls between tokens of their own (pure)."""

from __future__ import annotations

from typing import ClassVar

from router.turns.tool_parsers.base import CallFormat, State, ToolParser, Tools
from router.turns.tool_parsers.json_text import MAX_NAME, JsonEnd

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
MAX_HEAD = 2 * MAX_NAME
"""Characters between the beginning of a call and its arguments."""


class DeepseekV3(ToolParser):
    """Per call ``BEGIN function SEP name NEWLINE ```json NEWLINE {...} NEWLINE ``` END``."""

    markers = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEPARATOR)
    calls_begin, calls_end = CALLS_BEGIN, CALLS_END
    call_begin, call_end, separator = CALL_BEGIN, CALL_END, SEPARATOR
    written: ClassVar[CallFormat | None] = CallFormat(
        f"{CALL_BEGIN}function{SEPARATOR}", "\n```json\n", f"\n```{CALL_END}",
        between="\n", begin=CALLS_BEGIN, end=CALLS_END,
    )  # fmt: skip

    def __init__(self, tools: Tools = ()) -> None:
        super().__init__(tools)
        self._arguments = JsonEnd()

    def _start(self) -> State | None:
        return self._outside

    def _outside(self) -> State | None:
        marker = self._passed(self.calls_begin, self.call_begin, self.call_end, self.calls_end)
        return None if marker is None else self._head if marker == self.call_begin else self._outside

    def _head(self) -> State | None:
        """The name, up to where the arguments begin."""
        found = [at for mark in ("{", self.call_end) if (at := self._buffer.find(mark, 0, MAX_HEAD)) >= 0]
        if not found and len(self._buffer) < MAX_HEAD and not self._ended:
            return None
        head = self._buffer[: min(found, default=0)]
        name, id = self._name_in(head)
        if not name:
            return self._no_call()
        self._take(len(head))
        self._opening = ""
        self._begin(name, id)
        if not self._buffer.startswith("{"):
            self._argue("{}")
            return self._outside
        self._arguments = JsonEnd()
        return self._pass_arguments

    def _pass_arguments(self) -> State | None:
        self._argue(self._take(self._arguments.feed(self._buffer)))
        return self._tail if self._arguments.found else None

    def _tail(self) -> State | None:
        """Drop the text between the arguments and the end of the call."""
        end = self._buffer.find(self.call_end)
        if end >= 0:
            self._take(end + len(self.call_end))
            return self._outside
        self._take(max(0, len(self._buffer) - len(self.call_end) + 1))
        return None

    def _no_call(self) -> State:
        self._give_back()
        return self._outside

    def _name_in(self, head: str) -> tuple[str, str]:
        """The name and the id of a call, each empty if there is none."""
        _, _, rest = head.partition(self.separator)
        return rest.split("\n", 1)[0].strip(), ""


class DeepseekV31(DeepseekV3):
    """Per call ``BEGIN name SEP {...} END``."""

    written: ClassVar[CallFormat | None] = CallFormat(
        CALL_BEGIN, SEPARATOR, CALL_END, between="", begin=CALLS_BEGIN, end=CALLS_END
    )

    def _name_in(self, head: str) -> tuple[str, str]:
        name, separator, _ = head.partition(self.separator)
        return (name.strip() if separator else ""), ""


class KimiK2(DeepseekV31):
    """Kimi K2: per call ``BEGIN functions.name:0 SEP {...} END``; the middle is the call's id."""

    calls_begin, calls_end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call_begin, call_end = "<|tool_call_begin|>", "<|tool_call_end|>"
    separator = "<|tool_call_argument_begin|>"
    markers = (calls_begin, calls_end, call_begin, call_end, separator)
    written = None  # ids count up, which no fixed text can

    def _name_in(self, head: str) -> tuple[str, str]:
        id = super()._name_in(head)[0]
        return id.removeprefix("functions.").rsplit(":", 1)[0], id
