"""The grammar of an assistant's turn: reasoning, then tool calls or structured output (pure)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from router.structured_config import StructuredOutputsConfig
from router.text.tokens import Tokenizer
from router.turns.reasoning import ReasoningFormat
from router.turns.structured import (
    ANSWER,
    AnswerForm,
    Body,
    json_body,
    limit_depth,
    pattern_of,
    quoted,
    text_of,
)
from router.turns.tool_parsers.base import CallFormat, ToolParser, Tools

TURN = "turn"
GAP = r"gap: /[ \t\r\n]{1,8}/"
"""Between reasoning and answer."""


class TurnGrammar:
    """Grammar of an answer with its reasoning and calls, for all samples of a prompt."""

    def __init__(self, tokenizer: Tokenizer, config: StructuredOutputsConfig) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._rules: list[str] = []
        self._bodies: dict[str, Body] = {}
        self._start: list[str] = []

    def __repr__(self) -> str:
        return f"<TurnGrammar {self._start} with {list(self._bodies)}>"

    def text(self) -> str:
        """The grammar as instances take it."""
        if self._start == [f"@{ANSWER}"]:
            return text_of(self._bodies)
        lark = "\n".join([f"start: {' '.join(self._start)}", *self._rules])
        return text_of({TURN: {"lark_grammar": lark}, **self._bodies})

    def reasoning(self, form: ReasoningFormat, *, is_begun: bool) -> None:
        """Let the turn begin with reasoning, and end reasoning that the prompt has begun."""
        if self._config.enable_in_reasoning:
            return
        special = [end for end in form.end if self._tokenizer.special_id(end) is not None]
        if special:  # no text has it, so the text before it needs no end of its own
            self._rules += [f"thought: THOUGHT ({self._any_of(special)})", r"THOUGHT: /(.|\n)*/"]
        else:
            ends = "|".join(map(pattern_of, form.end))
            self._rules.append(rf"thought[lazy]: /(.|\n)*({ends})/")
        if form.before_answer:
            thought = f"thought {self.literal(form.before_answer)}"
        else:
            self._rules.append(GAP)
            thought = "thought gap?"
        self._start.append(thought if is_begun else f"(({self._any_of(form.begin)}) {thought})?")

    def answer(self, form: AnswerForm, opening: str = "") -> None:
        """Require an answer in a form, behind its opening."""
        self._start += self._formed(form, opening)

    def calls(self, tools: Tools, written: CallFormat, *, most_one: bool) -> None:
        """Require one call or more of these tools."""
        self._start.append("calls")
        self._call_rules(tools, written, most_one=most_one)

    def calls_or_answer(
        self, tools: Tools, written: CallFormat, form: AnswerForm, opening: str = "", *, most_one: bool
    ) -> None:
        """Require calls of these tools, or an answer in a form."""
        self._start.append(f"(calls | {' '.join(self._formed(form, opening))})")
        self._call_rules(tools, written, most_one=most_one)

    def own_calls_or_answer(self, parser: type[ToolParser], tools: Tools, form: AnswerForm) -> None:
        """Require calls or an answer, with free text after a call's beginning.

        For formats whose arguments are no JSON."""
        self._start.append(f"(calls | {' '.join(self._formed(form, ''))})")
        special = [marker for marker in parser.markers if self._tokenizer.special_id(marker) is not None]
        begins = self._any_of(parser.call_openings(tools))
        self._rules.append(f"calls: ({begins}) ({' | '.join(['TEXT', *map(self.literal, special)])})*")
        self._rules.append(r"TEXT: /(.|\n)+/")

    def _formed(self, form: AnswerForm, opening: str) -> list[str]:
        self._bodies[ANSWER] = form.body
        return [*([self.literal(opening)] if opening else []), f"@{ANSWER}"]

    def _call_rules(self, tools: Tools, written: CallFormat, *, most_one: bool) -> None:
        more = "" if most_one else f" ({self.literal(written.between)} call)*"
        begin, end = self.literal(written.begin), self.literal(written.end)
        self._rules.append(f"calls: {begin} call{more} {end}")
        self._rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        for index, tool in enumerate(tools):
            function = tool["function"]
            name = json.dumps(function["name"], ensure_ascii=False)[1:-1]
            head = self.literal(written.before_name + name + written.after_name)
            self._rules.append(f"call_{index}: {head} @tool_{index} {self.literal(written.after_arguments)}")
            parameters = function.get("parameters")
            limit_depth(parameters, "tools", f"the schema of the function {function['name'][:60]!r}")
            is_strict = function.get("strict") is True
            body = json_body(_arguments(parameters), self._config, strict=is_strict, closes=True)
            self._bodies[f"tool_{index}"] = body

    def literal(self, text: str) -> str:
        """A text as a part of a rule, with its special tokens as tokens."""
        parts: list[str] = []
        for part in self._split(text):
            id = self._tokenizer.special_id(part)
            parts.append(quoted(part) if id is None else f"<[{id}]>")
        return " ".join(parts)

    def _split(self, text: str) -> Sequence[str]:
        special = [content for content in self._tokenizer.special_contents if content in text]
        if not special:
            return [text] if text else []
        longest_first = sorted(special, key=len, reverse=True)
        return [part for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text) if part]

    def _any_of(self, texts: Sequence[str]) -> str:
        return " | ".join(map(self.literal, texts))


def _arguments(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The JSON schema of a function's arguments: an object, empty without parameters."""
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}
