"""Which parsers the answers to a request go through, and which grammar they follow."""

from __future__ import annotations

from engine.sampling import ThinkingBudget
from router.config import HttpConfig
from router.errors import refuse
from router.harmony import ANALYSIS, FINAL, WRITTEN_CALL, HarmonyParser
from router.harmony import MARKERS as HARMONY_MARKERS
from router.openai_api import ChatRequest
from router.reasoning import REASONING_PARSERS, ReasoningFormat, ReasoningParser
from router.structured import form_of
from router.tokens import Tokenizer
from router.tool_parsers import TOOL_PARSERS
from router.tool_parsers.base import ToolParser, Tools
from router.tool_parsers.marked_json import CallList
from router.turn_grammar import TurnGrammar
from router.turns import TurnReader


class TurnFormat:
    """How the model's text becomes reasoning, content and tool calls, for one request.

    Calls that ``tool_choice`` asks for are written in the model's own format where that is known and its
    arguments are JSON; they need no ``--tool-call-parser``. Models that write Harmony need no flag at all.

    Raises:
        ApiError: tools are offered, and this router has no parser for their calls; or the form that is asked
            for cannot be.
    """

    def __init__(self, request: ChatRequest, config: HttpConfig, *, harmony: bool = False) -> None:
        self._config = config.structured_outputs
        self._harmony = harmony
        self._form = form_of(request, self._config)
        self._offered: Tools = request.tools or ()
        self._asked_for = _asked_for(request)
        self._offers_tools = offers_tools = bool(request.tools) and request.tool_choice != "none"
        if offers_tools and not (self._asked_for or config.enable_auto_tool_choice or harmony):
            refuse(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set.',
                "tool_choice",
            )
        if self._asked_for and self._form is not None and self._form.param != "response_format":
            refuse(f"{self._form.param} and tool_choice exclude each other.", "tool_choice")
        self._tools: type[ToolParser] | None = None
        self._reasoning: ReasoningFormat | None = None
        if harmony:
            self._reasoning = ANALYSIS
        else:
            if offers_tools and config.tool_call_parser:
                self._tools = TOOL_PARSERS[config.tool_call_parser]
            if self._asked_for and (self._tools is None or self._tools.written is None):
                self._tools = CallList
            if config.reasoning_parser:
                self._reasoning = REASONING_PARSERS[config.reasoning_parser]
        self._names_tool = isinstance(request.tool_choice, dict)
        self._max_calls = 1 if request.parallel_tool_calls is False or self._names_tool else 0
        self._hides_reasoning = request.include_reasoning is False
        self._budget = request.thinking_token_budget

    def __repr__(self) -> str:
        if self._harmony:
            return f"<TurnFormat Harmony form={self._form}>"
        return f"<TurnFormat tools={self._tools} reasoning={self._reasoning} form={self._form}>"

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self._tools is None and self._reasoning is None

    @property
    def reads_reasoning(self) -> bool:
        return self._reasoning is not None

    @property
    def grammar_param(self) -> str:
        """The field to name when the grammar is wrong."""
        return "tools" if self._asked_for or self._form is None else self._form.param

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether what the parsers look for is lost when special tokens are skipped."""
        if self._harmony:
            return any(map(tokenizer.is_special, HARMONY_MARKERS))
        markers = [*self._tools.markers] if self._tools else []
        if self._reasoning is not None:
            markers += [*self._reasoning.begin, *self._reasoning.end]
        return any(tokenizer.is_special(marker) for marker in markers)

    def grammar(self, prompt: str, tokenizer: Tokenizer) -> str | None:
        """What the answers to a prompt follow, None for any text."""
        if not self._asked_for and self._form is None:
            return None
        turn = TurnGrammar(tokenizer, self._config)
        in_answer = self._harmony and not self._begins_message(prompt)
        if self._reasoning is not None and not in_answer:
            turn.reasoning(self._reasoning, prompt)
        if self._asked_for:
            written = WRITTEN_CALL if self._harmony else self._tools.written if self._tools else None
            assert written is not None
            turn.calls(self._asked_for, written, most_one=self._harmony or self._max_calls == 1)
        elif self._form is not None:
            if self._harmony and not in_answer:
                turn.opening(FINAL)
            turn.answer(self._form)
        return turn.text()

    def _begins_message(self, prompt: str) -> bool:
        """Whether a prompt in Harmony leaves it to the answer to say what it is, or is inside reasoning."""
        parser = HarmonyParser(prompt, offers_tools=False)
        return parser.between or parser.inside

    def thinking(self, prompt: str, tokenizer: Tokenizer) -> ThinkingBudget | None:
        """The budget of the reasoning that an answer to a prompt may begin with; None without a limit, or if
        it begins behind it.

        Raises:
            ApiError: there is a limit, but no reasoning is known.
        """
        budget, form = self._budget, self._reasoning
        if budget is None or budget == -1:
            return None
        if form is None:
            refuse("thinking_token_budget needs --reasoning-parser to be set.", "thinking_token_budget")
        if self._harmony and not self._begins_message(prompt):
            return None
        is_inside = ReasoningParser(form, prompt).inside

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        return ThinkingBudget(budget, () if is_inside else tuple(map(ids, form.begin)), ids(form.end[0]))

    def reader(self, prompt: str) -> TurnReader:
        """For one answer to a prompt."""
        reasoning: ReasoningParser | HarmonyParser | None = None
        if self._harmony:
            reasoning = HarmonyParser(prompt, offers_tools=self._offers_tools)
        elif self._reasoning is not None:
            reasoning = ReasoningParser(self._reasoning, prompt)
        return TurnReader(
            reasoning,
            None if self._tools is None else self._tools(self._offered),
            max_calls=self._max_calls,
            hides_reasoning=self._hides_reasoning,
            names_tool=self._names_tool,
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
