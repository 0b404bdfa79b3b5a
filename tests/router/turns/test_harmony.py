"""Answers of GPT-OSS: messages on channels become reasoning, content and calls."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import HttpConfig
from router.openai_api import ChatRequest
from router.text.chat_template import ChatTemplate
from router.turns.assistant_turns import TurnReader, turn_of
from router.turns.harmony import MARKERS, HarmonyParser
from router.turns.turn_events import CallArguments, CallBegin, Content, Parsed, Reasoning, merged
from router.turns.turn_format import TurnFormat

PROMPT = "<|start|>user<|message|>Hello<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Hm, {1}.<|end|><|start|>assistant"
CALL = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ARGUMENTS = '{"city": "Ulm"}'
OFFERED = ("weather", "math.sum")

CASES: list[tuple[str, list[Parsed]]] = [
    ("<|channel|>final<|message|>Hello!<|return|>", [Content("Hello!")]),
    ("<|channel|>final<|message|>Hello! ", [Content("Hello! ")]),
    (THOUGHT + "<|channel|>final<|message|> Hello!\n<|return|>", [Reasoning("Hm, {1}."), Content(" Hello!\n")]),
    ("<|channel|>analysis<|message|>Cut sho", [Reasoning("Cut sho")]),
    (THOUGHT + CALL + ARGUMENTS + "<|call|>", [Reasoning("Hm, {1}."), CallBegin("weather"), CallArguments(ARGUMENTS)]),
    (CALL + ARGUMENTS, [CallBegin("weather"), CallArguments(ARGUMENTS)]),
    # the recipient before the channel
    (
        f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>",
        [CallBegin("weather"), CallArguments(ARGUMENTS)],
    ),
    # a recipient without its prefix, if it is offered; whatever the channel
    (f"<|channel|>commentary to=weather<|message|>{ARGUMENTS}<|call|>", [CallBegin("weather"), CallArguments(ARGUMENTS)]),
    (f"<|channel|>analysis to=math.sum json<|message|>{ARGUMENTS}<|call|>", [CallBegin("math.sum"), CallArguments(ARGUMENTS)]),
    (f"<|channel|>comment to=functions.weather<|message|>{ARGUMENTS}<|call|>", [CallBegin("weather"), CallArguments(ARGUMENTS)]),
    ("<|channel|>commentary to=math<|message|>{}<|call|>", [Reasoning("{}")]),
    # a preamble, then two calls
    (
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        f"{CALL}{ARGUMENTS}<|call|><|start|>assistant{CALL}{{}}<|call|>",
        [
            Content("Let me see."),
            CallBegin("weather"), CallArguments(ARGUMENTS),
            CallBegin("weather"), CallArguments("{}"),
        ],
    ),
    # messages of one kind
    (
        f"{THOUGHT}<|channel|>analysis<|message|>So.<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        [Reasoning("Hm, {1}.\nSo."), Content("Yes.")],
    ),
    # tools that it was trained with
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [Reasoning("1 + 1")]),
    ("<|channel|>commentary to=browser.search json<|message|>{}<|call|>", [Reasoning("{}")]),
    # what is not as it should be
    ("Just text, a < b.", [Content("Just text, a < b.")]),
    ("", []),
    (" \n", [Content(" \n")]),
    ("<|channel|>final<|message|>One.<|return|>\n", [Content("One.")]),
    ("<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.", [Reasoning("Hm."), Content("Yes.")]),
    ("<|end|><|channel|>final<|message|>Yes.", [Content("Yes.")]),
    ("<|channel|>final<|end|><|start|>assistant<|channel|>final<|message|>Yes.", [Content("Yes.")]),
    ("<|channel|>final", []),
    ("<|start|>assistant<|message|>Yes.", [Content("Yes.")]),
    ("<|channel|>" + "x" * 2000 + "<|end|>Yes.", [Content("<|channel|>" + "x" * 2000 + "\nYes.")]),
]  # fmt: skip


def parse(chunks: Sequence[str], prompt: str = PROMPT, offered: Collection[str] = OFFERED) -> list[Parsed]:
    parser = HarmonyParser(prompt, offered)
    events: list[Parsed] = []
    for chunk in chunks:
        events += parser.feed(chunk)
    return merged(events + parser.flush())


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_messages(text: str, expected: list[Parsed]) -> None:
    assert parse([text]) == expected
    assert parse(list(text)) == expected


@given(
    st.lists(
        st.sampled_from([*MARKERS, "final", "analysis", " to=functions.f", "assistant", "a", " ", "\n", "<|"])
    )
)
def test_cuts_do_not_matter(parts: list[str]) -> None:
    text = "".join(parts)
    whole = parse([text])
    assert parse(list(text)) == whole
    assert parse(parts) == whole
    assert not any(
        mark in event.text for event in whole if not isinstance(event, CallBegin) for mark in MARKERS[4:]
    )


def test_calls_of_tools_that_nobody_offered_are_reasoning() -> None:
    assert parse([CALL + ARGUMENTS], offered=()) == [Reasoning(ARGUMENTS)]


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("<|channel|>final<|message|>It is", Content(" so.")),
        ("<|channel|>analysis<|message|>It is", Reasoning(" so.")),
        ("<|channel|>final<|message|>It is<|end|>", Content(" so.")),
        ("", Content(" so.")),
    ],
)
def test_an_answer_goes_on_where_its_prompt_ends(begun: str, expected: Parsed) -> None:
    assert parse([" so.<|return|>"], PROMPT + begun) == [expected]


def test_a_turn() -> None:
    text = THOUGHT + CALL + ARGUMENTS + "<|call|><|start|>assistant" + CALL + "{}"
    pieces = [(character, 1) for character in text]
    turn = turn_of(pieces, TurnReader(HarmonyParser(PROMPT, OFFERED), max_calls=1))
    assert (turn.reasoning, [(call.name, call.arguments) for call in turn.calls]) == (
        "Hm, {1}.",
        [("weather", ARGUMENTS)],
    )
    assert len("Hm, {1}.") <= turn.num_reasoning_tokens <= len("Hm, {1}.<|end|>")
    hidden = TurnReader(HarmonyParser(PROMPT, OFFERED), hides_reasoning=True)
    assert turn_of(pieces, hidden).reasoning == ""


@pytest.mark.parametrize(("choice", "names"), [("auto", ["weather"]), ("none", [])])
def test_tools_are_known_by_the_names_offered(choice: str, names: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    request = ChatRequest(messages=[], tools=tools, tool_choice=choice)
    reader = TurnFormat(request, HttpConfig(), harmony=True).reader(PROMPT)
    turn = turn_of([("<|channel|>commentary to=weather<|message|>{}<|call|>", 1)], reader)
    assert [call.name for call in turn.calls] == names


def test_templates_get_reasoning_as_thinking() -> None:
    template = ChatTemplate("{{ messages | tojson }}", {})

    def shaped(**message: object) -> dict[str, object]:
        (found,) = json.loads(template.render([{"role": "assistant", **message}]))
        assert isinstance(found, dict)
        return found

    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert shaped(content="a", reasoning="b")["thinking"] == "b"
    assert shaped(content="", reasoning_content="b", tool_calls=[call])["thinking"] == "b"
    assert "thinking" not in shaped(content="a", reasoning="b", tool_calls=[call]), (
        "GPT-OSS's takes one of them"
    )


def test_flags() -> None:
    HttpConfig(reasoning_parser="openai_gptoss", tool_call_parser="openai")
    HttpConfig(tool_call_parser="openai", enable_auto_tool_choice=True)
    with pytest.raises(ValueError, match="are one format and"):
        HttpConfig(reasoning_parser="qwen3", tool_call_parser="openai")
