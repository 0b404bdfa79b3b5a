"""Parsing of an assistant's turn from generated text: reasoning, content, tool calls (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.turns.reasoning import TurnParser
from router.turns.tool_parsers.base import ToolParser
from router.turns.turn_events import CallArguments, CallBegin, Content, Parsed, Reasoning, merged


class TurnReader:
    """Reader of one turn; without parsers all text is content.

    The reasoning parser comes first; tools are called in the answer proper. The one for Harmony finds both.
    """

    def __init__(
        self,
        reasoning: TurnParser | None = None,
        tools: ToolParser | None = None,
        *,
        max_calls: int = 0,
        hides_reasoning: bool = False,
        names_tool: bool = False,
        must_call: bool = False,
    ) -> None:
        """``max_calls``: calls beyond so many are dropped; 0 keeps all.

        ``names_tool``: the client named the one to be called. ``must_call``: a grammar lets nothing stand in
        the answer but calls, so what is no call at its end is one that was cut before its name was there.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._max_calls = max_calls
        self._hides_reasoning = hides_reasoning
        self.names_tool = names_tool
        self._must_call = must_call
        self.num_calls = 0
        self.num_reasoning_tokens = 0

    def __repr__(self) -> str:
        return f"<TurnReader {self._reasoning!r} {self._tools!r} {self.num_calls} calls>"

    def new_call_id(self) -> str:
        return (self._tools or ToolParser).new_call_id()

    def read(self, text: str, num_tokens: int = 0, *, ended: bool = False) -> list[Parsed]:
        """Events of the next text of the turn, which has so many tokens.

        ``ended`` says that it is the last.
        """
        if self._reasoning is None:
            events: list[Parsed] = [Content(text)]
        else:
            if self._reasoning.inside:
                self.num_reasoning_tokens += num_tokens
            events = self._reasoning.feed(text)
            events += self._reasoning.flush() if ended else []
            if self._hides_reasoning:
                events = [event for event in events if not isinstance(event, Reasoning)]
        return merged(self._with_calls(events, ended))

    def read_parts(self, parts: Sequence[tuple[str, int]], *, ended: bool = False) -> list[Parsed]:
        """Events of several texts in a row, each with its number of tokens."""
        if len(parts) == 1:
            (text, num_tokens), *_ = parts
            return self.read(text, num_tokens, ended=ended)
        last = len(parts) - 1
        read = (self.read(text, count, ended=ended and i == last) for i, (text, count) in enumerate(parts))
        return merged(itertools.chain.from_iterable(read))

    def _with_calls(self, events: Iterable[Parsed], ended: bool) -> Iterable[Parsed]:
        if self._tools is None:
            yield from self._counted(events)
            return
        for event in events:
            if isinstance(event, Content):
                yield from self._counted(self._tools.feed(event.text))
            else:
                yield event
        if ended:
            rest = self._tools.flush()
            if self._must_call:
                rest = [event for event in rest if not isinstance(event, Content)]
            yield from self._counted(rest)

    def _counted(self, events: Iterable[Parsed]) -> Iterable[Parsed]:
        for event in events:
            if isinstance(event, CallBegin):
                self.num_calls += 1
            is_call = isinstance(event, CallBegin | CallArguments)
            if not (is_call and self._max_calls and self.num_calls > self._max_calls):
                yield event


@dataclass
class Call:
    """A tool call of a whole turn."""

    id: str
    name: str
    arguments: str = ""
    """JSON text, as the model wrote it."""


@dataclass
class Turn:
    """A whole turn of the assistant: reasoning, content and calls."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    num_reasoning_tokens: int = 0


def turn_of(pieces: Sequence[tuple[str, int]], reader: TurnReader) -> Turn:
    """The turn that pieces of text make, each with its number of tokens."""
    turn = Turn()
    for position, (text, num_tokens) in enumerate(pieces):
        for event in reader.read(text, num_tokens, ended=position == len(pieces) - 1):
            match event:
                case Reasoning(text):
                    turn.reasoning += text
                case Content(text):
                    turn.content += text
                case CallBegin(name, id):
                    turn.calls.append(Call(id or reader.new_call_id(), name))
                case CallArguments(text):
                    turn.calls[-1].arguments += text
    turn.num_reasoning_tokens = reader.num_reasoning_tokens
    return turn
