"""How models write their turns: with tags around reasoning and calls, or in Harmony (pure).

A dialect knows the parsers of an answer, and what grammars have to say for an answer to be in it.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence

from router.turns import harmony
from router.turns.harmony import HarmonyParser
from router.turns.reasoning import ReasoningFormat, ReasoningParser, TurnParser
from router.turns.tool_parsers.base import CallFormat, ToolParser, Tools


class AnswerStart(enum.Enum):
    """Where in a turn an answer begins: some prompts have begun the turn."""

    TURN = enum.auto()
    REASONING = enum.auto()
    CONTENT = enum.auto()
    """Behind reasoning and opening."""


class Dialect(ABC):
    """How one request's model writes reasoning, tool calls and content."""

    reasoning: ReasoningFormat | None = None
    """Markers around reasoning; None if none are known."""
    written: CallFormat | None = None
    """Calls that are asked for; None where none may be."""
    most_one_call = False
    """Whether an answer ends with its first call."""
    opening = ""
    """What an answer of a given form begins with."""
    calls: type[ToolParser] | None = None
    """The parser of tool calls in the model's own format; None if it has none."""

    @property
    @abstractmethod
    def markers(self) -> Sequence[str]:
        """Texts that the parsers look for; skipped special tokens would hide them."""

    @abstractmethod
    def parsers(self, prompt: str) -> tuple[TurnParser | None, ToolParser | None]:
        """Parsers of one answer; content of the first goes through the second."""

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return False

    def start_of_answer(self, prompt: str) -> AnswerStart:
        """Where in its turn an answer to this prompt begins."""
        is_inside = self.reasoning is not None and ReasoningParser(self.reasoning, prompt).inside
        return AnswerStart.REASONING if is_inside else AnswerStart.TURN


class Tags(Dialect):
    """Dialect of tags around reasoning and a format of calls; either may be unknown."""

    def __init__(
        self, reasoning: ReasoningFormat | None, calls: type[ToolParser] | None, offered: Tools
    ) -> None:
        self.reasoning = reasoning
        self.written = calls.written if calls is not None else None
        self.calls = calls
        self._offered = offered

    def __repr__(self) -> str:
        return f"<Tags {self.reasoning} {self.calls}>"

    @property
    def is_plain(self) -> bool:
        return self.reasoning is None and self.calls is None

    @property
    def markers(self) -> Sequence[str]:
        around = (*self.reasoning.begin, *self.reasoning.end) if self.reasoning is not None else ()
        return (*around, *(self.calls.markers if self.calls is not None else ()))

    def parsers(self, prompt: str) -> tuple[TurnParser | None, ToolParser | None]:
        return (
            None if self.reasoning is None else ReasoningParser(self.reasoning, prompt),
            None if self.calls is None else self.calls(self._offered),
        )


class Harmony(Dialect):
    """Harmony, the dialect of messages on channels (GPT-OSS)."""

    reasoning = harmony.ANALYSIS
    written = harmony.WRITTEN_CALL
    most_one_call = True
    opening = harmony.FINAL
    markers = harmony.MARKERS

    def __init__(self, offered: Tools) -> None:
        self._names = frozenset(tool["function"]["name"] for tool in offered)

    def __repr__(self) -> str:
        return "<Harmony>"

    def parsers(self, prompt: str) -> tuple[TurnParser | None, ToolParser | None]:
        return HarmonyParser(prompt, self._names), None

    def start_of_answer(self, prompt: str) -> AnswerStart:
        parser = HarmonyParser(prompt, self._names)
        return super().start_of_answer(prompt) if parser.between or parser.inside else AnswerStart.CONTENT
