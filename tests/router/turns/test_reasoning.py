"""Reasoning apart from answers, and whole turns: reasoning first, then content and calls."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.turns.assistant_turns import TurnReader, turn_of
from router.turns.reasoning import REASONING_PARSERS, ReasoningParser
from router.turns.tool_parsers import TOOL_PARSERS
from router.turns.turn_events import CallArguments, CallBegin, Content, Parsed, Reasoning, merged
from tests.router.turns.test_tool_parsers import cut

OPENED, CLOSED, NEITHER = "user: Hi\nassistant: <think>\n", "assistant: <think>\n\n</think>\n\n", "assistant:"


def parse(name: str, chunks: Sequence[str], prompt: str = NEITHER) -> list[Parsed]:
    parser = ReasoningParser(REASONING_PARSERS[name], prompt)
    events: list[Parsed] = []
    for chunk in chunks:
        events += parser.feed(chunk)
    return merged(events + parser.flush())


HM, YES = Reasoning("Hm, so."), Content("Yes. ")

CASES: list[tuple[str, str, str, list[Parsed]]] = [
    ("qwen3", NEITHER, "<think>\nHm, so.\n</think>\n\nYes. ", [HM, YES]),
    ("qwen3", NEITHER, "\n<think>Hm, so.</think>Yes. ", [HM, YES]),
    ("qwen3", NEITHER, "Yes. ", [YES]),
    ("qwen3", NEITHER, " \n Yes. ", [Content(" \n Yes. ")]),
    ("qwen3", NEITHER, "The <think> tag </think>", [Content("The <think> tag </think>")]),
    ("qwen3", NEITHER, "<think>\n\n</think>\n\nYes. ", [YES]),
    ("qwen3", NEITHER, "<think>Hm, so.", [HM]),
    ("qwen3", NEITHER, "<thi", [Content("<thi")]),
    ("qwen3", NEITHER, "", []),
    ("qwen3", OPENED, "Hm, so.\n</think>\n\nYes. ", [HM, YES]),
    ("qwen3", OPENED, "<think>Hm, so.</think>Yes. ", [HM, YES]),
    ("qwen3", OPENED, "Hm, so.", [HM]),
    ("qwen3", CLOSED, "Yes. ", [YES]),
    ("deepseek_r1", NEITHER, "Hm, so.\n</think>\n\nYes. ", [HM, YES]),
    ("deepseek_r1", NEITHER, "<think>Hm, so.</think>Yes. </think>", [HM, Content("Yes. </think>")]),
    ("deepseek_r1", NEITHER, "Hm, so. </thin", [Reasoning("Hm, so. </thin")]),
    ("deepseek_r1", CLOSED, "Yes. ", [YES]),
    ("mistral", NEITHER, "[THINK]Hm, so.[/THINK]Yes. ", [HM, YES]),
    (
        "granite",
        NEITHER,
        "Here is my thought process:\nHm, so.\n\nHere's my response:\nYes. ",
        [HM, YES],
    ),
]


@pytest.mark.parametrize(("name", "prompt", "text", "expected"), CASES)
def test_reasoning(name: str, prompt: str, text: str, expected: list[Parsed]) -> None:
    assert parse(name, [text], prompt) == expected
    assert parse(name, list(text), prompt) == expected, "one character at a time"


PIECES = ["<think>", "</think>", "[THINK]", "[/THINK]", "<seed:think>", "</seed:think>", "<th", "ink>", " ",
          "\n", "Here is my thought process:", "Here's my response:", "Here", "x", "ü", "<tool_call>",
          '{"name": "f", "arguments": {"a": 1}}', "</tool_call>"]  # fmt: skip

texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
places = st.lists(st.integers(0, 10**6), max_size=10)


@pytest.mark.parametrize("name", sorted(REASONING_PARSERS))
@given(text=texts, prompt=st.sampled_from([OPENED, CLOSED, NEITHER]), places=places)
def test_cuts_do_not_matter(name: str, text: str, prompt: str, places: list[int]) -> None:
    whole = parse(name, [text], prompt)
    assert parse(name, cut(text, places), prompt) == whole
    assert parse(name, list(text), prompt) == whole
    kinds = [type(event) for event in whole]
    assert kinds in ([], [Reasoning], [Content], [Reasoning, Content])


# ---- turns


def reader(**settings: int) -> TurnReader:
    reasoning = ReasoningParser(REASONING_PARSERS["qwen3"], NEITHER)
    return TurnReader(reasoning, TOOL_PARSERS["hermes"](), **settings)  # type: ignore[arg-type]


def read(turn_reader: TurnReader, chunks: Sequence[str]) -> list[Parsed]:
    events: list[Parsed] = []
    for position, chunk in enumerate(chunks):
        events += turn_reader.read(chunk, 1, ended=position == len(chunks) - 1)
    return merged(events)


TURN = (
    '<think>I <tool_call> it.</think>\n\nWait.\n<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "g"}</tool_call> Done.'
)


@given(text=st.just(TURN) | texts, places=places)
def test_turns_do_not_depend_on_cuts(text: str, places: list[int]) -> None:
    whole = read(reader(), [text])
    assert read(reader(), cut(text, places) or [""]) == whole
    assert read(reader(), list(text) or [""]) == whole


def test_a_turn_has_reasoning_content_and_calls() -> None:
    assert read(reader(), [TURN]) == [
        Reasoning("I <tool_call> it."),
        Content("Wait."),
        CallBegin("f"),
        CallArguments('{"a": 1}'),
        CallBegin("g"),
        CallArguments("{}"),
        Content("Done."),
    ]
    turn = turn_of([(character, 1) for character in TURN], reader())
    assert (turn.reasoning, turn.content) == ("I <tool_call> it.", "Wait.Done.")
    assert [(call.name, call.arguments) for call in turn.calls] == [("f", '{"a": 1}'), ("g", "{}")]
    assert len({call.id for call in turn.calls}) == 2
    assert turn.num_reasoning_tokens == len("I <tool_call> it.</think>")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_reasoning_is_counted_by_token_however_many_come_at_once(size: int) -> None:
    tokens = [*"<think>", *TURN]
    groups = [tokens[begin : begin + size] for begin in range(0, len(tokens), size)]
    counting, alone = reader(), reader()
    events: list[Parsed] = []
    for number, group in enumerate(groups, 1):
        events += counting.read_parts([(text, 1) for text in group], ended=number == len(groups))
    for token in tokens:
        alone.read(token, 1)
    assert counting.num_reasoning_tokens == alone.num_reasoning_tokens
    assert merged(events) == read(reader(), tokens)


def test_parts_that_are_not_wanted_are_dropped() -> None:
    events = read(reader(max_calls=1, hides_reasoning=True), [TURN])
    assert events == [Content("Wait."), CallBegin("f"), CallArguments('{"a": 1}'), Content("Done.")]
    assert read(TurnReader(), ["<think>", "a"]) == [Content("<think>a")]
