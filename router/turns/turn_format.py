"""Parsers and grammar of the answers to one request, by its tools and forms."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from engine.sampling import ThinkingBudget
from router.config import HttpConfig
from router.errors import refuse
from router.openai_api import ChatRequest, CompletionRequest
from router.parser_names import HARMONY_CALLS, HARMONY_REASONING
from router.text.tokens import Tokenizer
from router.turns import harmony
from router.turns.assistant_turns import TurnReader
from router.turns.dialects import AnswerStart, Dialect, Harmony, Tags
from router.turns.reasoning import REASONING_PARSERS
from router.turns.structured import ANSWER, form_of
from router.turns.tool_parsers import TOOL_PARSERS
from router.turns.tool_parsers.base import Tools
from router.turns.tool_parsers.marked_json import CallList
from router.turns.turn_grammar import TurnGrammar

NO_TOOLS = ChatRequest(messages=[])
"""Stands for a completion, whose text is content alone."""


class AnswerRules(msgspec.Struct, frozen=True):
    """Rules that instances enforce on the answers to a prompt."""

    thinking: ThinkingBudget | None = None
    grammar: str | None = None
    """None for any text."""


def writes_harmony(tokenizer: Tokenizer, reasoning_parser: str | None, tool_call_parser: str | None) -> bool:
    """Whether a model writes Harmony.

    Its parsers decide. Without any, its special tokens do, which no other format has.
    """
    named = {reasoning_parser, tool_call_parser} - {None}
    if named:
        return not named.isdisjoint({HARMONY_REASONING, HARMONY_CALLS})
    return all(map(tokenizer.is_special, (harmony.START, harmony.CHANNEL, harmony.MESSAGE)))


class TurnFormat:
    """Format of the answers to one request: parsers of their text, and its grammar.

    The text of a completion is content.
    Calls that ``tool_choice`` asks for are written in the model's own format where that is known and its
    arguments are JSON; they need no ``--tool-call-parser``. Models that write Harmony need no flag at all.

    Raises:
        ApiError: tools are offered, and this router has no parser for their calls; or the form that is asked
            for cannot be.
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest,
        config: HttpConfig,
        *,
        harmony: bool = False,
        sent: Tools = (),
    ) -> None:
        """``harmony``: the model writes it. ``sent``: the tools as the client numbers them."""
        chat = request if isinstance(request, ChatRequest) else NO_TOOLS
        self._asked_for = _asked_for(chat)
        self._config = config.structured_outputs
        self._form = form_of(request, self._config)
        tools = chat.tools or ()
        self._sent = sent or tools
        offers_tools = bool(tools) and chat.tool_choice != "none"
        if offers_tools and not (self._asked_for or config.enable_auto_tool_choice or harmony):
            refuse(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set.',
                "tool_choice",
            )
        if self._asked_for and self._form is not None and self._form.param != "response_format":
            refuse(f"{self._form.param} and tool_choice exclude each other.", "tool_choice")
        self._dialect: Dialect
        if chat is NO_TOOLS:
            self._dialect = Tags(None, None, ())
        elif harmony:
            self._dialect = Harmony(tools if offers_tools else ())
        else:
            named = config.tool_call_parser if offers_tools else None
            calls = TOOL_PARSERS[named] if named else None
            if self._asked_for and (calls is None or calls.written is None):
                calls = CallList
            reasoning = REASONING_PARSERS[config.reasoning_parser] if config.reasoning_parser else None
            self._dialect = Tags(reasoning, calls, tools)
        self.is_plain = self._dialect.is_plain
        """Whether all text is content."""
        self.markers = self._dialect.markers
        """Texts that the parsers look for; skipped special tokens would hide them."""
        self._may_call: Tools = tools if offers_tools and not self._asked_for else ()
        self._names_tool = isinstance(chat.tool_choice, dict)
        self._max_calls = 1 if chat.parallel_tool_calls is False or self._names_tool else 0
        self._hides_reasoning = chat.include_reasoning is False
        self._budget = chat.thinking_token_budget

    def __repr__(self) -> str:
        return f"<TurnFormat {self._dialect!r} form={self._form}>"

    @property
    def grammar_param(self) -> str:
        """The field to name when the grammar is wrong."""
        return "tools" if self._asked_for or self._form is None else self._form.param

    @property
    def knows_reasoning(self) -> bool:
        """Whether reasoning before an answer is recognised."""
        return self._dialect.reasoning is not None

    def rules(self, prompt: str, tokenizer: Tokenizer, *, budget_is_advice: bool = False) -> AnswerRules:
        """Reasoning budget and grammar of the answers to a prompt.

        ``budget_is_advice``: a reasoning budget is left out where no reasoning is known.

        Raises:
            ApiError: there is a budget, but no reasoning is known.
        """
        budget, form = self._budget, self._dialect.reasoning
        if budget == -1 or (form is None and budget_is_advice):
            budget = None
        if budget is not None and form is None:
            refuse("thinking_token_budget needs --reasoning-parser to be set.", "thinking_token_budget")
        is_free = not self._asked_for and self._form is None
        if budget is None and is_free:
            return AnswerRules()
        start = self._dialect.start_of_answer(prompt)
        thinking = None if budget is None else self._thinking(budget, start, tokenizer)
        return AnswerRules(thinking, None if is_free else self._grammar(start, tokenizer))

    def _thinking(self, budget: int, start: AnswerStart, tokenizer: Tokenizer) -> ThinkingBudget | None:
        """The reasoning budget of an answer; None if it begins behind the reasoning."""
        form = self._dialect.reasoning
        if form is None or start is AnswerStart.CONTENT:
            return None

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        is_inside = start is AnswerStart.REASONING
        return ThinkingBudget(budget, () if is_inside else tuple(map(ids, form.begin)), ids(form.end[0]))

    def _grammar(self, start: AnswerStart, tokenizer: Tokenizer) -> str:
        """Grammar of the calls that are asked for, or of an answer's form.

        Where the model is free to call tools, it may do so in place of the answer.
        """
        turn, dialect, form = TurnGrammar(tokenizer, self._config), self._dialect, self._form
        begins = start is not AnswerStart.CONTENT
        opening, tools = (dialect.opening, self._may_call) if begins else ("", ())
        most_one = dialect.most_one_call or self._max_calls == 1
        if begins and dialect.reasoning is not None:
            turn.reasoning(dialect.reasoning, is_begun=start is AnswerStart.REASONING)
        if self._asked_for:
            assert dialect.written is not None
            turn.calls(self._asked_for, dialect.written, most_one=most_one)
        elif form is not None and tools and dialect.written is not None:
            turn.calls_or_answer(tools, dialect.written, form, opening, most_one=most_one)
        elif form is not None and tools and dialect.calls is not None:
            turn.own_calls_or_answer(dialect.calls, tools, form)
        elif form is not None:
            turn.answer(form, opening)
        return turn.text()

    @property
    def grammar_places(self) -> Mapping[str, str]:
        """The client's name for each part of the grammar."""
        called = self._asked_for or self._may_call
        sent = {id(tool): index for index, tool in reversed([*enumerate(self._sent)])}
        places = {
            f"tool_{index}": f"tools[{sent[id(tool)]}] ({tool['function']['name'][:60]!r})"
            for index, tool in enumerate(called)
        }
        return places if self._form is None else {**places, ANSWER: self._form.param}

    def reader(self, prompt: str) -> TurnReader:
        """The reader of one answer to a prompt."""
        return TurnReader(
            *self._dialect.parsers(prompt),
            max_calls=self._max_calls,
            hides_reasoning=self._hides_reasoning,
            names_tool=self._names_tool,
            must_call=bool(self._asked_for),
        )


def _asked_for(request: ChatRequest) -> Tools:
    """The tools of which one must be called; none if the model is free to."""
    choice, tools = request.tool_choice, request.tools or ()
    if choice == "required":
        return tools
    if not isinstance(choice, dict):
        return ()
    name = choice["function"]["name"]
    return [tool for tool in tools if tool["function"]["name"] == name][:1]
