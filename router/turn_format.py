"""Which parsers the answers to a request go through."""

from __future__ import annotations

from router.config import HttpConfig
from router.errors import refuse
from router.openai_api import ChatRequest
from router.reasoning import REASONING_PARSERS, ReasoningParser
from router.tokens import Tokenizer
from router.tool_parsers import TOOL_PARSERS
from router.turns import TurnReader


class TurnFormat:
    """How the model's text becomes reasoning, content and tool calls, for one request.

    Raises:
        ApiError: tools are offered, and this router has no parser for their calls.
    """

    def __init__(self, request: ChatRequest, config: HttpConfig) -> None:
        offers_tools = bool(request.tools) and request.tool_choice != "none"
        if offers_tools and not config.enable_auto_tool_choice:
            refuse(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set.',
                "tool_choice",
            )
        tool_parser = config.tool_call_parser if offers_tools else None
        self._tools = None if tool_parser is None else TOOL_PARSERS[tool_parser]
        reasoning_parser = config.reasoning_parser
        self._offered = request.tools or ()
        self._reasoning = None if reasoning_parser is None else REASONING_PARSERS[reasoning_parser]
        self._max_calls = 1 if request.parallel_tool_calls is False else 0
        self._hides_reasoning = request.include_reasoning is False

    def __repr__(self) -> str:
        return f"<TurnFormat tools={self._tools} reasoning={self._reasoning}>"

    @property
    def is_plain(self) -> bool:
        """Whether all text is content."""
        return self._tools is None and self._reasoning is None

    def needs_special_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether what the parsers look for is lost when special tokens are skipped."""
        markers = [*self._tools.markers] if self._tools else []
        if self._reasoning is not None:
            markers += [*self._reasoning.begin, *self._reasoning.end]
        return any(tokenizer.is_special(marker) for marker in markers)

    def reader(self, prompt: str) -> TurnReader:
        """For one answer to a prompt."""
        return TurnReader(
            None if self._reasoning is None else ReasoningParser(self._reasoning, prompt),
            None if self._tools is None else self._tools(self._offered),
            max_calls=self._max_calls,
            hides_reasoning=self._hides_reasoning,
        )
