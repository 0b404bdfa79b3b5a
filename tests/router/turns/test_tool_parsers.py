"""Tool calls in answers, as each format writes them, however the text is cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.turns.tool_parsers import TOOL_PARSERS
from router.turns.turn_events import CallArguments, CallBegin, Content, Parsed, merged

PARSERS = sorted(set(TOOL_PARSERS))

DS_BEGIN, DS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
DS_CALL, DS_CALL_END, DS_SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


TOOLS = [
    {"function": {"name": "f", "parameters": {"properties": {"text": {"type": ["string", "null"]}}}}},
    {"function": {"name": "bare"}},
]


def parse(name: str, chunks: Sequence[str]) -> list[Parsed]:
    parser = TOOL_PARSERS[name](TOOLS)
    events: list[Parsed] = []
    for chunk in chunks:
        events += parser.feed(chunk)
    return merged(events + parser.flush())


def call(name: str, arguments: str = "{}") -> list[Parsed]:
    return [CallBegin(name), CallArguments(arguments)]


WEATHER = '{"city": "Ulm", "days": [1, {"a": "}"}]}'
NAMED = '{"name": "weather", "arguments": ' + WEATHER + "}"

CASES: list[tuple[str, str, list[Parsed]]] = [
    # what no call is in
    *[(name, "Just text.", [Content("Just text.")]) for name in PARSERS],
    *[(name, "", []) for name in PARSERS],
    *[(name, " \n", [Content(" \n")]) for name in PARSERS],
    *[(name, "a < b {c} [d] (e) <t <tool", [Content("a < b {c} [d] (e) <t <tool")]) for name in PARSERS],
    # hermes
    ("hermes", f"<tool_call>\n{NAMED}\n</tool_call>", call("weather", WEATHER)),
    ("hermes", f"<tool_call>{NAMED}</tool_call>", call("weather", WEATHER)),
    ("hermes", f"\n\n<tool_call>\n{NAMED}\n</tool_call>\n", call("weather", WEATHER)),
    (
        "hermes",
        f'Let me see.\n<tool_call>\n{NAMED}\n</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>',
        [Content("Let me see."), *call("weather", WEATHER), *call("now")],
    ),
    (
        "hermes",
        f"<tool_call>{NAMED}</tool_call>\n\nThat is all. ",
        [*call("weather", WEATHER), Content("That is all. ")],
    ),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', call("f", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call("f", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', call("f")),
    ("hermes", '<tool_call>{"id": 7, "name": "f", "x": [{}], "arguments": {}}</tool_call>', call("f")),
    ("hermes", '<tool_call>{"name": "f\\u00fc", "arguments": {}}</tool_call>', call("fü")),
    ("hermes", f'<tool_call>[{NAMED}, {{"name": "g"}}]</tool_call>', [*call("weather", WEATHER), *call("g")]),
    # hermes, broken
    ("hermes", "<tool_call>nothing</tool_call>", [Content("<tool_call>nothing")]),
    ("hermes", "a <tool_call> b", [Content("a <tool_call> b")]),
    ("hermes", "<tool_call>\n", [Content("<tool_call>\n")]),
    ("hermes", '<tool_call>{"name": "f', [Content('<tool_call>{"name": "f')]),
    ("hermes", '<tool_call>{"nam": 1}</tool_call>', [Content('<tool_call>{"nam": 1}')]),
    ("hermes", '<tool_call>{"name": "\\ud800"}', [Content('<tool_call>{"name": "\\ud800"}')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a', [CallBegin("f"), CallArguments('{"a')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>', call("f", '{"a": 1}')),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', call("f", '{"a": }')),
    # llama
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
    ("llama3_json", '{"type": "function", "function": "f", "parameters": {}}', call("f")),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "arguments": {}}\n{"name": "h", "parameters": {}}',
        [*call("f", '{"a": 1}'), *call("g"), *call("h")],
    ),
    (
        "llama3_json",
        '{"name": "f", "parameters": {}} and {"name": "g", "parameters": {}}',
        [*call("f"), Content('and {"name": "g", "parameters": {}}')],
    ),
    ("llama3_json", f"{NAMED};", call("weather", WEATHER)),
    ("llama3_json", f"{NAMED}; and so", [*call("weather", WEATHER), Content("; and so")]),
    ("llama3_json", '{"name": "Bob", "age": 3}', [Content('{"name": "Bob", "age": 3}')]),
    ("llama3_json", '{"name": "Bob"}', [Content('{"name": "Bob"}')]),
    ("llama3_json", ' {"a": {"b": 1}} ', [Content(' {"a": {"b": 1}} ')]),
    (
        "llama3_json",
        'Use {"name": "f", "parameters": {}}',
        [Content('Use {"name": "f", "parameters": {}}')],
    ),
    # mistral
    ("mistral", f"[TOOL_CALLS][{NAMED}]", call("weather", WEATHER)),
    ("mistral", f'[TOOL_CALLS] [{NAMED}, {{"name": "g"}}]', [*call("weather", WEATHER), *call("g")]),
    ("mistral", f"[TOOL_CALLS]weather{WEATHER}", call("weather", WEATHER)),
    (
        "mistral",
        f"Hm.[TOOL_CALLS]weather[ARGS]{WEATHER}[TOOL_CALLS]g-h[CALL_ID]abc123xyz[ARGS]{{}}",
        [Content("Hm."), *call("weather", WEATHER), *call("g-h")],
    ),
    ("mistral", "[TOOL_CALLS]two words{}", [Content("[TOOL_CALLS]two words{}")]),
    ("mistral", "[TOOL_CALLS]f", [Content("[TOOL_CALLS]f")]),
    # deepseek
    (
        "deepseek_v3",
        f"{DS_BEGIN}{DS_CALL}function{DS_SEP}weather\n```json\n{WEATHER}\n```{DS_CALL_END}\n"
        f'{DS_CALL}function{DS_SEP}g\n```json\n{{"a": "`"}}\n```{DS_CALL_END}{DS_END}',
        [*call("weather", WEATHER), *call("g", '{"a": "`"}')],
    ),
    ("deepseek_v3", f"x {DS_CALL}function{DS_SEP}g\n```json\n```{DS_CALL_END}", [Content("x"), *call("g")]),
    ("deepseek_v3", f"{DS_BEGIN}{DS_CALL}function", [Content(f"{DS_CALL}function")]),
    (
        "deepseek_v31",
        f"Well.{DS_BEGIN}{DS_CALL}weather{DS_SEP}{WEATHER}{DS_CALL_END}{DS_CALL}g{DS_SEP}{{}}{DS_CALL_END}{DS_END}",
        [Content("Well."), *call("weather", WEATHER), *call("g")],
    ),
    # granite
    ("granite", f"<|tool_call|>[{NAMED}]", call("weather", WEATHER)),
    ("granite", f'<tool_call>[{NAMED}, {{"name": "g"}}]', [*call("weather", WEATHER), *call("g")]),
    ("granite", f"<|tool_call|>{NAMED}", call("weather", WEATHER)),
    ("granite", "<tool_call>[]", [Content("<tool_call>[]")]),
    (
        "granite-20b-fc",
        f'<function_call> {NAMED}\n<function_call> {{"name": "g", "arguments": {{}}}}',
        [*call("weather", WEATHER), *call("g")],
    ),
    # qwen3_coder
    ("qwen3_coder", "Hm.\n<tool_call>\n<function=f>\n<parameter=text>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
     "</function>\n</tool_call>\n<tool_call>\n<function=bare>\n</function>\n</tool_call>",
     [Content("Hm."), *call("f", '{"text": "12", "n": 12}'), *call("bare")]),
    ("qwen3_coder", "<function=f><parameter=text>a\n\"<b>\"\n</parameter></function>", call("f", '{"text": "a\\n\\"<b>\\""}')),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>[1, {}]</parameter><parameter=y>True</parameter>"
     "<parameter=z>{a</parameter></function></tool_call>", call("f", '{"x": [1, {}], "y": true, "z": "{a"}')),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>1<parameter=y>2</function>", call("f", '{"x": 1, "y": 2}')),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>1</parameter>", [CallBegin("f"), CallArguments('{"x": 1')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>1</parameter></func", [CallBegin("f"), CallArguments('{"x": 1')]),
    ("qwen3_coder", "<tool_call><function=f><parameter=x>1", [CallBegin("f")]),
    ("qwen3_coder", "<tool_call><function=f> now", [*call("f"), Content("now")]),
    ("qwen3_coder", "<tool_call> <fun", [Content("<tool_call> <fun")]),
    ("qwen3_coder", "<tool_call>{}</tool_call>", [Content("<tool_call>{}")]),
    # glm45
    ("glm45", "Hm.\n<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>12</arg_value>\n<arg_key>n</arg_key>\n<arg_value>12"
     "</arg_value>\n</tool_call>\n<tool_call>bare\n</tool_call>",
     [Content("Hm."), *call("f", '{"text": "12", "n": 12}'), *call("bare")]),
    ("glm45", "<tool_call>f<arg_key>x</arg_key><arg_value>", [CallBegin("f")]),
    ("glm45", "<tool_call>f<arg_key>x</arg_key> y", [*call("f"), Content("y")]),
    ("glm45", "<tool_call>two words</tool_call>", [Content("<tool_call>two words")]),
    # their like
    ("seed_oss", "Hm. <seed:tool_call>\n<function=f>\n<parameter=text>\n12\n</parameter>\n</function>\n</seed:tool_call>",
     [Content("Hm."), *call("f", '{"text": "12"}')]),
    ("minimax_m2", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">12</parameter>\n<parameter name="n">12'
     '</parameter>\n</invoke>\n<invoke name="bare">\n</invoke>\n</minimax:tool_call>',
     [*call("f", '{"text": "12", "n": 12}'), *call("bare")]),
    ("internlm", f"See.<|action_start|><|plugin|>\n{NAMED}<|action_end|>\n", [Content("See."), *call("weather", WEATHER)]),
    ("hunyuan_a13b", f"<tool_calls>[{NAMED},\n{NAMED}]</tool_calls>", call("weather", WEATHER) * 2),
    ("phi4_mini_json", f"functools[{NAMED}]", call("weather", WEATHER)),
    ("phi4_mini_json", "from functools import [x]", [Content("from functools import [x]")]),
    ("phi4_mini_json", "functools[x]", [Content("functools[x]")]),
    ("kimi_k2", "Ok.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>"
     + WEATHER + "<|tool_call_end|><|tool_calls_section_end|>",
     [Content("Ok."), CallBegin("weather", "functions.weather:3"), CallArguments(WEATHER)]),
    ("kimi_k2", "<|tool_call_begin|>functions.f:0<|tool_call_end|>",
     [Content("<|tool_call_begin|>functions.f:0")]),
    # pythonic
    ("pythonic", "[f(a=1, b='x, ]) \\'', c=[1, (2.5, None)], d={'k': True})]",
     call("f", '{"a": 1, "b": "x, ]) \'", "c": [1, [2.5, null]], "d": {"k": true}}')),
    ("pythonic", '[f(), g.h(a = -1)]', [*call("f"), *call("g.h", '{"a": -1}')]),
    ("pythonic", " [f(a=true, b=null)] ", call("f", '{"a": true, "b": null}')),
    ("pythonic", "<|python_start|>[f(a='ü')]<|python_end|>", call("f", '{"a": "ü"}')),
    ("pythonic", "See. <|python_start|>[f()]<|python_end|>", [Content("See."), *call("f")]),
    ("pythonic", "[f(a=b.c)]", call("f", '{"a": "b.c"}')),
    ("pythonic", "[f(a='\\d')]", call("f", '{"a": "\\\\d"}')),
    ("pythonic", "[f(a='\\ud800')]", call("f", '{"a": "\'\\\\ud800\'"}')),
    ("pythonic", "[f(a=1e999)]", call("f", '{"a": "1e999"}')),
    ("pythonic", "[f(a=1, b=", [CallBegin("f"), CallArguments('{"a": 1')]),
    ("pythonic", "[f(x)](url)", [Content("[f(x)](url)")]),
    ("pythonic", "[link](url)", [Content("[link](url)")]),
    ("pythonic", "[1, 2]", [Content("[1, 2]")]),
    ("pythonic", "[f(a==1)]", [Content("[f(a==1)]")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "expected"), CASES, ids=[f"{n}-{t[:30]}" for n, t, _ in CASES])
def test_calls(name: str, text: str, expected: list[Parsed]) -> None:
    assert parse(name, [text]) == expected
    assert parse(name, list(text)) == expected, "one character at a time"
    for at in range(len(text)):
        assert parse(name, [text[:at], text[at:]]) == expected, f"cut at {at}"


PIECES = [
    "<tool_call>", "</tool_call>", "<|tool_call|>", "<function_call>", "<|python_tag|>", "[TOOL_CALLS]",
    "[ARGS]", "[CALL_ID]", "<|python_start|>", "<|python_end|>", DS_BEGIN, DS_END, DS_CALL, DS_CALL_END,
    DS_SEP, "function", '{"name": ', '"f"', '"arguments": ', '"parameters": ', "{", "}", "[", "]", "(", ")",
    '"', "'", "\\", ",", ":", ";", "=", "==", " ", "\n", "a=", "f(", "g(b=1", "```json", "null", "1.5", "x",
    "<seed:tool_call>", "<minimax:tool_call>", '<invoke name="', 'f">', '<parameter name="', "</invoke>",
    "<|tool_call_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    "<|action_start|><|plugin|>", "<|action_end|>", "<tool_calls>", "</tool_calls>", "functools[",
    "<function=", "f>", "<parameter=", "k>", "</parameter>", "</function>", "<arg_key>", "</arg_key>", "<arg_value>",
    "</arg_value>", "<", "ü🙂", NAMED, WEATHER, "long" * 70, "é" * 255, "\\ud800",
]  # fmt: skip

texts = st.lists(st.sampled_from(PIECES), max_size=14).map("".join)


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in pairwise(ends)]


@pytest.mark.parametrize("name", PARSERS)
@given(text=texts, places=st.lists(st.integers(0, 10**6), max_size=12))
@example(text=f"[TOOL_CALLS]{'f' * 300}{{", places=[])
@example(text=f"{DS_CALL}function{DS_SEP}{'g' * 493}{{}}", places=[])
@example(text=f"[{'f' * 254}(a=1)]", places=[])
@example(text=f"[f({'a' * 255}=1)]", places=[])
@example(text=f'<tool_call>{{"name": "{"f" * 255}", "arguments": {{}}}}', places=[])
@example(text=f"{NAMED};[", places=[])
def test_cuts_do_not_matter(name: str, text: str, places: list[int]) -> None:
    whole = parse(name, [text])
    assert parse(name, cut(text, places)) == whole
    assert parse(name, list(text)) == whole
    begun = False
    for event in whole:
        assert begun or not isinstance(event, CallArguments), "arguments belong to a call"
        begun = isinstance(event, CallBegin)
        assert not isinstance(event, CallBegin) or event.name
        assert not isinstance(event, CallArguments) or event.text.encode()


@pytest.mark.parametrize("name", PARSERS)
def test_no_two_pieces_lead_round_in_circles(name: str) -> None:
    for pieces in product(PIECES, repeat=2):
        assert parse(name, pieces) == parse(name, ["".join(pieces)])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
arguments_of_calls = st.dictionaries(st.from_regex(r"[a-z_]{1,6}", fullmatch=True), json_values, max_size=3)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)


def written(name: str, calls: list[tuple[str, dict[str, object]]]) -> str:
    """What a model of a format writes for some calls."""
    as_json = [json.dumps({"name": f, "arguments": a}, ensure_ascii=False) for f, a in calls]
    match name:
        case "hermes" | "granite4":
            return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in as_json)
        case "llama3_json" | "llama4_json":
            return "; ".join(as_json)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(as_json)}]"
        case "granite":
            return f"<|tool_call|>[{','.join(as_json)}]"
        case "granite-20b-fc":
            return "\n".join(f"<function_call> {text}" for text in as_json)
        case "qwen3_coder" | "qwen3_xml" | "seed_oss":
            each = [
                f"<function={f}>"
                + "".join(f"<parameter={k}>\n{json.dumps(v)}\n</parameter>" for k, v in a.items())
                for f, a in calls
            ]
            tag = "seed:tool_call" if name == "seed_oss" else "tool_call"
            return "".join(f"<{tag}>{text}</function></{tag}>" for text in each)
        case "minimax_m2":
            each = [
                f'<invoke name="{f}">\n'
                + "".join(f'<parameter name="{k}">{json.dumps(v)}</parameter>\n' for k, v in a.items())
                for f, a in calls
            ]
            text = "".join(f"{each}</invoke>\n" for each in each)
            return f"<minimax:tool_call>\n{text}</minimax:tool_call>"
        case "internlm":
            return "\n".join(f"<|action_start|><|plugin|>{text}<|action_end|>" for text in as_json)
        case "hunyuan_a13b":
            return f"<tool_calls>[{', '.join(as_json)}]</tool_calls>"
        case "phi4_mini_json":
            return f"functools[{', '.join(as_json)}]"
        case "kimi_k2":
            each = [
                f"<|tool_call_begin|>functions.{f}:{n}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
                for n, (f, a) in enumerate(calls)
            ]
            return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"
        case "glm45" | "glm47":
            each = [
                f
                + "".join(
                    f"<arg_key>{k}</arg_key><arg_value>{json.dumps(v)}</arg_value>" for k, v in a.items()
                )
                for f, a in calls
            ]
            return "\n".join(f"<tool_call>{text}</tool_call>" for text in each)
        case "deepseek_v3":
            each = [
                f"{DS_CALL}function{DS_SEP}{f}\n```json\n{json.dumps(a)}\n```{DS_CALL_END}" for f, a in calls
            ]
            return DS_BEGIN + "\n".join(each) + DS_END
        case "deepseek_v31":
            return DS_BEGIN + "".join(f"{DS_CALL}{f}{DS_SEP}{json.dumps(a)}{DS_CALL_END}" for f, a in calls)
        case _:
            each = [f"{f}({', '.join(f'{k}={v!r}' for k, v in a.items())})" for f, a in calls]
            return f"[{', '.join(each)}]"


@pytest.mark.parametrize("name", PARSERS)
@given(calls=st.lists(st.tuples(names, arguments_of_calls), min_size=1, max_size=3), step=st.integers(1, 9))
def test_what_a_model_writes_is_what_is_called(
    name: str, calls: list[tuple[str, dict[str, object]]], step: int
) -> None:
    text = written(name, calls)
    events = parse(name, [text[at : at + step] for at in range(0, len(text), step)])
    found = [
        (begin.name, json.loads(arguments.text))
        for begin, arguments in zip(events[::2], events[1::2], strict=True)
        if isinstance(begin, CallBegin) and isinstance(arguments, CallArguments)
    ]
    assert found == calls
    assert len(events) == 2 * len(calls), "nothing but calls"


@pytest.mark.parametrize("name", PARSERS)
def test_text_and_arguments_come_as_soon_as_they_are_certain(name: str) -> None:
    parser = TOOL_PARSERS[name]()
    assert parser.feed("Hello wor") == [Content("Hello wor")]
    parser = TOOL_PARSERS["hermes"]()
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a') == [*call("f", '{"a')]
    assert parser.feed('": 1') == [CallArguments('": 1')]


def test_call_ids_suit_the_template() -> None:
    ids = {TOOL_PARSERS["mistral"].new_call_id() for _ in range(50)}
    assert len(ids) == 50
    assert all(len(id) == 9 and id.isalnum() and id.isascii() for id in ids)
    assert TOOL_PARSERS["hermes"].new_call_id().startswith("chatcmpl-tool-")
