"""Flags name the parsers that exist, in the same order."""

from __future__ import annotations

from router.parser_names import HARMONY_CALLS, HARMONY_REASONING, REASONING_PARSERS, TOOL_CALL_PARSERS
from router.turns import reasoning
from router.turns.tool_parsers import TOOL_PARSERS


def test_tool_call_parsers_are_those_that_exist_and_harmony() -> None:
    assert [*TOOL_PARSERS, HARMONY_CALLS] == list(TOOL_CALL_PARSERS)


def test_reasoning_parsers_are_those_that_exist_and_harmony() -> None:
    assert [*reasoning.REASONING_PARSERS, HARMONY_REASONING] == list(REASONING_PARSERS)
