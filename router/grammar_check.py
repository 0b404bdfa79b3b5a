"""Grammars are tried before a request goes to an instance, so that a wrong one is answered at once.

Without a tokenizer this is quick; what only a tokenizer shows, the instance refuses.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from engine.deep_thread import DeepThread
from engine.grammar import first_line
from router.errors import ApiError, bad_request

MOST_KEPT = 512
MOST_KEPT_CHARACTERS = 4 << 20
MOST_WAITING = 1024
"""Grammars that wait to be checked; requests with more are refused."""


class GrammarCheck:
    """Remembers what it has checked lately."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, str] = OrderedDict()
        """What is wrong with each, empty if nothing is."""
        self._characters = 0
        self._thread = DeepThread("grammars")

    def __repr__(self) -> str:
        return f"<GrammarCheck of {len(self._kept)}>"

    async def check(self, text: str, param: str) -> None:
        """
        Raises:
            ApiError: the grammar is wrong (400), there is no library for any (501), or too many wait (503).
        """
        problem = self._kept.get(text)
        if problem is None:
            if self._thread.num_waiting >= MOST_WAITING:
                raise ApiError(503, "Too many grammars wait to be checked.", headers={"retry-after": "1"})
            problem = await asyncio.wrap_future(self._thread.submit(lambda: problem_with(text)))
            self._keep(text, problem)
        else:
            self._kept.move_to_end(text)
        if problem:
            raise bad_request(f"{param}: {problem}", param)

    def _keep(self, text: str, problem: str) -> None:
        if text not in self._kept:
            self._characters += len(text)
        self._kept[text] = problem
        while len(self._kept) > MOST_KEPT or self._characters > MOST_KEPT_CHARACTERS:
            oldest, _ = self._kept.popitem(last=False)
            self._characters -= len(oldest)


def problem_with(text: str) -> str:
    """What is wrong with a grammar, empty if nothing is."""
    try:
        from llguidance import LLMatcher, LLParserLimits
    except ImportError as error:
        raise ApiError(501, f"Structured outputs need the package llguidance: {error}.") from error
    limits = LLParserLimits(verbose_errors=False)
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    return summary(messages[0]) if is_wrong and messages else ""


def summary(message: str) -> str:
    """The library's words without its picture of the place; a regular expression's error stands at the end
    of one."""
    lines = [line.strip() for line in message.strip().splitlines()]
    reason = next((line for line in lines if line.startswith("error:")), "")
    return " ".join(filter(None, [first_line(message), reason]))
