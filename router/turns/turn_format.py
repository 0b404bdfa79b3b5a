"""Which parsers the answers to a request go through, and which grammar they follow."""

from __future__ import annotations

from collections.abc import Mapping

from engine.sampling import ThinkingBudget
from router.config import HttpConfig
from router.errors import refuse
from router.openai_api import ChatRequest
from router.text.tokens import Tokenizer
from router.turns.assistant_turns import TurnReader
from router.turns.dialects import Dialect, Harmony, Tags
from router.turns.reasoning import REASONING_PARSERS, ReasoningParser
from router.turns.structured import ANSWER, AnswerForm, form_of
from router.turns.tool_parsers import TOOL_PARSERS
from router.turns.tool_parsers.base import Tools
from router.turns.tool_parsers.marked_json import CallList
from router.turns.turn_grammar import TurnGrammar


class TurnFormat:
    """How the model's text becomes reasoning, content and tool calls, for one request.

    Calls that ``tool_choice`` asks for are written in the model's own format where that is known and its
    arguments are JSON; they need no ``--tool-call-parser``. Models that write Harmony need no flag at all.

    Raises:
        ApiError: tools are offered, and this router has no parser for their calls; or the form that is asked
            for cannot be.
    """

    def __init__(
        self, request: ChatRequest, config: HttpConfig, *, harmony: bool = False, sent: Tools = ()
    ) -> None:
        """``sent``: the tools as the client numbers them, if the request was reduced to some."""
        self._config = config.structured_outputs
        self._form = form_of(request, self._config)
        self._asked_for = _asked_for(request)
        self._tools = request.tools or ()
        self._sent = sent or self._tools
        offers_tools = bool(request.tools) and request.tool_choice != "none"
        if offers_tools and not (self._asked_for or config.enable_auto_tool_choice or harmony):
            refuse(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set.',
                "tool_choice",
            )
        if self._asked_for and self._form is not None and self._form.param != "response_format":
            refuse(f"{self._form.param} and tool_choice exclude each other.", "tool_choice")
        self._dialect: Dialect
        if harmony:
            self._dialect = Harmony(self._tools if offers_tools else ())
        else:
            named = config.tool_call_parser if offers_tools else None
            calls = TOOL_PARSERS[named] if named else None
            if self._asked_for and (calls is None or calls.written is None):
                calls = CallList
            reasoning = REASONING_PARSERS[config.reasoning_parser] if config.reasoning_parser else None
            self._dialect = Tags(reasoning, calls, request.tools or ())
        self._may_call: Tools = self._tools if offers_tools and not self._asked_for else ()
        self._names_tool = isinstance(request.tool_choice, dict)
        self._max_calls = 1 if request.parallel_tool_calls is False or self._names_tool else 0
        self._hides_reasoning = request.include_reasoning is False
        self._budget = request.thinking_token_budget

    def __repr__(self) -> str:
        return f"<TurnFormat {self._dialect!r} form={self._form}>"

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self._dialect.is_plain

    @property
    def reads_reasoning(self) -> bool:
        return self._dialect.reasoning is not None

    @property
    def grammar_param(self) -> str:
        """The field to name when the grammar is wrong."""
        return "tools" if self._asked_for or self._form is None else self._form.param

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether what the parsers look for is lost when special tokens are skipped."""
        return any(map(tokenizer.is_special, self._dialect.markers))

    def grammar(self, prompt: str, tokenizer: Tokenizer) -> str | None:
        """What the answers to a prompt follow, None for any text."""
        if not self._asked_for and self._form is None:
            return None
        turn, dialect = TurnGrammar(tokenizer, self._config), self._dialect
        begins = not dialect.is_in_answer(prompt)
        if begins and dialect.reasoning is not None:
            turn.reasoning(dialect.reasoning, prompt)
        if self._asked_for:
            assert dialect.written is not None
            most_one = dialect.most_one_call or self._max_calls == 1
            turn.calls(self._asked_for, dialect.written, most_one=most_one)
        elif self._form is not None:
            self._answer_or_call(turn, self._form, begins=begins)
        return turn.text()

    def _answer_or_call(self, turn: TurnGrammar, form: AnswerForm, *, begins: bool) -> None:
        """An answer in its form; or calls, where the model is free to make some."""
        dialect = self._dialect
        opening = dialect.opening if begins else ""
        tools = self._may_call if begins else ()
        if tools and dialect.written is not None:
            most_one = dialect.most_one_call or self._max_calls == 1
            turn.calls_or_answer(tools, dialect.written, form, opening, most_one=most_one)
        elif tools and dialect.calls is not None:
            turn.own_calls_or_answer(dialect.calls, tools, form)
        else:
            turn.answer(form, opening)

    @property
    def grammar_places(self) -> Mapping[str, str]:
        """What the client calls each grammar of :meth:`grammar`."""
        called = self._asked_for or self._may_call
        sent = {id(tool): index for index, tool in reversed([*enumerate(self._sent)])}
        places = {
            f"tool_{index}": f"tools[{sent[id(tool)]}] ({tool['function']['name'][:60]!r})"
            for index, tool in enumerate(called)
        }
        return places if self._form is None else {**places, ANSWER: self._form.param}

    def thinking(self, prompt: str, tokenizer: Tokenizer) -> ThinkingBudget | None:
        """The reasoning budget of an answer to a prompt.

        None without a limit, or if the answer begins behind the reasoning.

        Raises:
            ApiError: there is a limit, but no reasoning is known.
        """
        budget, form = self._budget, self._dialect.reasoning
        if budget is None or budget == -1:
            return None
        if form is None:
            refuse("thinking_token_budget needs --reasoning-parser to be set.", "thinking_token_budget")
        if self._dialect.is_in_answer(prompt):
            return None
        is_inside = ReasoningParser(form, prompt).inside

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        return ThinkingBudget(budget, () if is_inside else tuple(map(ids, form.begin)), ids(form.end[0]))

    def reader(self, prompt: str) -> TurnReader:
        """For one answer to a prompt."""
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
