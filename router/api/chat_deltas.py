"""Parsed turns as chat answers: a whole message, or deltas of one (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from engine.messages import FinishReason
from router.openai_api import AssistantMessage, ChatDelta, FunctionCall, ToolCall, ToolCallDelta
from router.text.output_stream import TextPiece
from router.turns.assistant_turns import Turn, TurnReader
from router.turns.turn_events import CallArguments, CallBegin, Content, Reasoning


def message_of(turn: Turn, role: str) -> AssistantMessage:
    """Message of a whole turn; content is null if the turn has other things only."""
    has_more = bool(turn.reasoning or turn.calls)
    message = AssistantMessage(role, turn.content or (None if has_more else ""))
    if turn.reasoning:
        message.reasoning = message.reasoning_content = turn.reasoning
    if turn.calls:
        message.tool_calls = [
            ToolCall(call.id, FunctionCall(call.arguments, call.name)) for call in turn.calls
        ]
    return message


def finish_reason(piece: TextPiece, reader: TurnReader) -> str | None:
    """``tool_calls`` for a turn that ended by itself and calls tools.

    ``stop``, as OpenAI has it, where the client had no other choice.
    """
    chosen = piece.finish_reason == FinishReason.STOP and reader.num_calls and not reader.names_tool
    return "tool_calls" if chosen else piece.finish_reason


class DeltaWriter:
    """Writer of the deltas of one streamed turn."""

    def __init__(self, reader: TurnReader) -> None:
        self._reader = reader
        self._num_calls = 0

    def __repr__(self) -> str:
        return f"<DeltaWriter after {self._num_calls} calls of {self._reader!r}>"

    def delta(self, parts: Sequence[tuple[str, int]], echoed: str = "", *, ended: bool) -> ChatDelta:
        """Delta of the next texts, each with its number of tokens; possibly empty.

        ``echoed`` is content before them.
        """
        delta = ChatDelta(echoed or UNSET)
        calls: list[ToolCallDelta] = []
        for event in self._reader.read_parts(parts, ended=ended):
            match event:
                case Reasoning(text):
                    delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + text
                case Content(text):
                    delta.content = (delta.content or "") + text
                case CallBegin(name, given):
                    id = given or self._reader.new_call_id()
                    calls.append(ToolCallDelta(self._num_calls, FunctionCall("", name), id, "function"))
                    self._num_calls += 1
                case CallArguments(text) if calls and calls[-1].index == self._num_calls - 1:
                    calls[-1].function.arguments += text
                case CallArguments(text):
                    calls.append(ToolCallDelta(self._num_calls - 1, FunctionCall(text)))
        if calls:
            delta.tool_calls = calls
        return delta
