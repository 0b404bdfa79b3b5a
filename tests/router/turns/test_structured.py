"""Structured outputs in the router: fields of requests, and texts drawn from their grammars."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import openai
import pytest
from llguidance import LLMatcher

from coordinator.settings import flags
from engine.scheduling.grammar import Grammar, Vocabulary, compile_grammar, load_vocabulary
from router.config import HttpConfig, ServeConfig
from router.errors import ApiError
from router.openai_api import ChatRequest, CompletionRequest, StructuredOutputs
from router.structured_config import StructuredOutputsConfig
from router.text.tokens import Tokenizer, load_tokenizer
from router.turns import grammar_check, harmony
from router.turns.assistant_turns import Turn, turn_of
from router.turns.grammar_check import Checked, GrammarCheck, checked_grammar, problem_with
from router.turns.schema_formats import FORMATS
from router.turns.schema_support import MAX_LOCATION, UNKNOWN, supported, where_wrong
from router.turns.structured import ANSWER, MAX_DEPTH, form_of, pattern_of, text_of
from router.turns.tool_parsers import TOOL_PARSERS
from router.turns.turn_format import TurnFormat
from tests.nightly import NIGHTLY
from tests.router.conftest import Server
from tests.router.talking import Speaker
from tests.router.tiny_tokenizer import EOS, byte_level
from tests.waiting import until

DEFAULT = StructuredOutputsConfig()
NUM_WALKS = 6 if NIGHTLY else 3
"""Texts that are drawn of each grammar that asks for calls."""
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -99, "maximum": 99}, "on": {"$ref": "#/$defs/flag"}},
    "required": ["x", "on"],
    "additionalProperties": False,
    "$defs": {"flag": {"type": "boolean"}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "draw", "parameters": POINT}},
    {"type": "function", "function": {"name": "wait"}},
]


@pytest.fixture(scope="module", params=["plain", "special"])
def marked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizers that have the markers of all formats as text, or as special tokens."""
    made = byte_level()
    if request.param == "special":
        markers = [marker for parser in TOOL_PARSERS.values() for marker in parser.markers]
        made.add_special_tokens([*dict.fromkeys(markers), "<think>", "</think>", *harmony.MARKERS])
    directory: Path = tmp_path_factory.mktemp(request.param)
    made.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def vocabulary(marked: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    directory = tmp_path_factory.mktemp("vocabulary")
    marked.backend.save(str(directory / "tokenizer.json"))
    return load_vocabulary(directory, marked.size, [EOS])


def walk(text: str, vocabulary: Vocabulary, marked: Tokenizer, seed: int) -> str:
    """Text drawn from a grammar: tokens equally likely, but the end is taken at once."""
    assert problem_with(text) == ""
    rng = random.Random(seed)
    grammar = Grammar(compile_grammar(text, vocabulary), vocabulary)
    ids: list[int] = []
    while not grammar.ended:
        assert len(ids) < 2000
        mask = grammar.mask(len(ids))
        assert mask is not None
        allowed = [token for token in range(len(mask) * 8) if mask[token // 8] >> token % 8 & 1]
        ids.append(EOS if EOS in allowed else rng.choice(allowed))
        assert grammar.take(ids[-1]) is None
    return marked.decode(ids[:-1])


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": "Hi"}], **fields)


def turn(request: ChatRequest, config: HttpConfig, text: str, prompt: str = "") -> Turn:
    return turn_of([(character, 1) for character in text], TurnFormat(request, config).reader(prompt))


def test_how_deep_a_schema_may_be() -> None:
    """What is let through is read by the library, too."""

    def schema(depth: int) -> dict[str, Any]:
        return {"properties": {"a": schema(depth - 2)}} if depth > 2 else {"type": "object"}

    for depth, is_allowed in ((MAX_DEPTH - 1, True), (MAX_DEPTH + 1, False)):
        request = CompletionRequest(prompt="a", structured_outputs=StructuredOutputs(json=schema(depth)))
        with contextlib.nullcontext() if is_allowed else pytest.raises(ApiError, match="nested too deeply"):
            form = form_of(request, DEFAULT)
            assert form is not None
            assert problem_with(text_of({ANSWER: form.body})) == ""


@pytest.mark.parametrize("parser", [None, *TOOL_PARSERS])
@pytest.mark.parametrize("choice", ["required", "one", "named"])
def test_calls_that_are_asked_for(
    parser: str | None, choice: str, vocabulary: Vocabulary, marked: Tokenizer
) -> None:
    """All texts that the grammar allows are read as calls that fit their schema."""
    named = {"type": "function", "function": {"name": "draw"}}
    request = chat(
        tools=TOOLS,
        tool_choice=named if choice == "named" else "required",
        parallel_tool_calls=False if choice == "one" else None,
    )
    config = HttpConfig(tool_call_parser=parser)
    counts = set()
    for seed in range(NUM_WALKS):
        grammar = TurnFormat(request, config).rules("", marked).grammar
        assert grammar is not None
        text = walk(grammar, vocabulary, marked, seed)
        found = turn(request, config, text)
        assert found.content == ""
        for call in found.calls:
            assert call.name in (("draw",) if choice == "named" else ("draw", "wait"))
            jsonschema.validate(
                json.loads(call.arguments), POINT if call.name == "draw" else {"maxProperties": 0}
            )
        counts.add(len(found.calls))
    assert min(counts) >= 1
    assert choice == "required" or counts == {1}


@pytest.mark.parametrize(
    ("parser", "prompt", "begin"),
    [
        ("qwen3", "Hi", "<think>"),
        ("qwen3", "Hi<think>\n", ""),
        ("deepseek_r1", "Hi", ""),
        ("granite", "Hi", "Here is my thought process:"),
    ],
)
def test_the_form_begins_behind_reasoning(
    parser: str, prompt: str, begin: str, vocabulary: Vocabulary, marked: Tokenizer
) -> None:
    form = StructuredOutputs(json=POINT)
    config = HttpConfig(reasoning_parser=parser)
    text = TurnFormat(chat(structured_outputs=form), config).rules(prompt, marked).grammar
    assert text is not None
    end = "Here is my response:" if parser == "granite" else "</think>"
    thought = f'{begin}so {{"x": 1 }} it "is"{end}'
    for gap in ("", "\n\n"):
        whole = f'{thought}{gap}{{"x":7,"on":true}}'
        assert follows(whole, text, vocabulary, marked)
        found = turn(chat(structured_outputs=form), config, whole, prompt)
        assert found.reasoning == 'so {"x": 1 } it "is"'
        assert found.content == '{"x":7,"on":true}'
    assert not follows(thought + "no", text, vocabulary, marked)
    assert follows('{"x":7,"on":true}', text, vocabulary, marked) == bool(begin)
    strict = HttpConfig(reasoning_parser=parser, structured_outputs_config='{"enable_in_reasoning": true}')
    text = TurnFormat(chat(structured_outputs=form), strict).rules(prompt, marked).grammar
    assert text is not None
    assert follows('{"x":7,"on":true}', text, vocabulary, marked)


def test_harmony(vocabulary: Vocabulary, marked: Tokenizer) -> None:
    """Calls that are asked for, and forms, on the channels where they belong."""
    config = HttpConfig()
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"

    def turn_format(**fields: Any) -> TurnFormat:
        return TurnFormat(chat(**fields), config, harmony=True)

    def read(form: TurnFormat, text: str, prompt: str) -> Turn:
        return turn_of([(character, 1) for character in text], form.reader(prompt))

    answer = '{"x":7,"on":true}'
    thought = '<|channel|>analysis<|message|>so {"x"}<|end|><|start|>assistant'
    calls = turn_format(tools=TOOLS, tool_choice="required")
    grammar = calls.rules(prompt, marked).grammar
    assert grammar is not None
    for before in ("", thought):
        whole = f"{before}<|channel|>commentary to=functions.draw <|constrain|>json<|message|>{answer}"
        assert follows(whole, grammar, vocabulary, marked)
        found = read(calls, whole, prompt)
        assert [(call.name, call.arguments) for call in found.calls] == [("draw", answer)]
        assert not follows(whole.replace("draw", "wait"), grammar, vocabulary, marked)
    assert not follows(f"<|channel|>final<|message|>{answer}", grammar, vocabulary, marked)
    form = turn_format(structured_outputs=StructuredOutputs(json=POINT))
    grammar = form.rules(prompt, marked).grammar
    assert grammar is not None
    for before in ("", thought):
        whole = f"{before}<|channel|>final<|message|>{answer}"
        assert follows(whole, grammar, vocabulary, marked)
        found = read(form, whole, prompt)
        assert (found.content, found.reasoning) == (answer, 'so {"x"}' if before else "")
    assert not follows(answer, grammar, vocabulary, marked)
    assert not follows("<|channel|>final<|message|>no", grammar, vocabulary, marked)
    begun = prompt + "<|channel|>final<|message|>"
    grammar = form.rules(begun, marked).grammar
    assert grammar is not None
    assert follows(answer, grammar, vocabulary, marked)
    assert read(form, answer, begun).content == answer
    thinks = form.rules(prompt + "<|channel|>analysis<|message|>", marked).grammar
    assert thinks is not None
    assert follows(
        f"so<|end|><|start|>assistant<|channel|>final<|message|>{answer}", thinks, vocabulary, marked
    )
    assert not follows(answer, thinks, vocabulary, marked)


def follows(text: str, grammar: str, vocabulary: Vocabulary, marked: Tokenizer) -> bool:
    """Whether a text is one by a grammar."""
    state = Grammar(compile_grammar(grammar, vocabulary), vocabulary)
    ids = [*marked.encode(text, add_special_tokens=False), EOS]
    return all(state.take(id) is None for id in ids) and state.ended


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": [1, {}]}', "[]"),
        (
            {"response_format": {"type": "json_object", "schema": POINT}},
            '{"x":1,"on":true}',
            '{"a": [1, {}]}',
        ),
        ({"response_format": {"type": "json_object", "schema": json.dumps({})}}, '{"a":1}', "[]"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}},
            '{"x":1,"on":true}',
            "{}",
        ),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, '{"x": 1, "on": true}', '{"x":1}'),
        ({"structured_outputs": {"json": True}}, "[1]", "x"),
        (
            {"structured_outputs": {"json": POINT, "disable_any_whitespace": True}},
            '{"x":1,"on":true}',
            '{"x": 1',
        ),
        (
            {"structured_outputs": {"json": {"type": "object"}, "disable_additional_properties": True}},
            "{}",
            '{"a":1}',
        ),
        ({"structured_outputs": {"regex": "^a/b\\/[0-9]+$"}}, "a/b/12", "a/b/"),
        ({"structured_outputs": {"regex": "a\\$"}}, "a$", "a"),
        ({"structured_outputs": {"choice": ['say "hi"', "back\\slash", "ünï"]}}, "back\\slash", "back"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/ "y"'}}, "x1y", "xy"),
        ({"structured_outputs": {"grammar": 'root ::= "x" digit*\ndigit ::= [0-9]'}}, "x123", "y"),
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "structures": [{"begin": "<f=draw>", "schema": POINT, "end": "</f>"}],
                        "triggers": ["<f="],
                    }
                }
            },
            'well <f=draw>{"x":1,"on":true}</f> done',
            'well <f=draw>{"x":"a',
        ),
        # blanks between tokens of JSON are bounded there, too
        (
            {
                "structured_outputs": {
                    "structural_tag": {
                        "structures": [{"begin": "<f=draw>", "schema": POINT, "end": "</f>"}],
                        "triggers": ["<f="],
                    }
                }
            },
            '<f=draw>{"x": 1, "on": true}</f>',
            '<f=draw>{"x":    1, "on": true}</f>',
        ),
        ({"guided_json": POINT}, '{"x":1,"on":false}', "1"),
        ({"json_schema": json.dumps(POINT)}, '{"x":1,"on":false}', "1"),
        ({"regex": "ab+"}, "abb", "a"),
        ({"ebnf": 'root ::= "x" digit*\ndigit ::= [0-9]'}, "x123", "y"),
        ({"guided_regex": "ab+"}, "abb", "a"),
        ({"guided_choice": ["a", "b"]}, "a", "c"),
        ({"guided_grammar": 'start: "q"'}, "q", "r"),
    ],
)
def test_each_form(
    fields: dict[str, Any], good: str, bad: str, vocabulary: Vocabulary, marked: Tokenizer
) -> None:
    request = msgspec.convert({"prompt": "x", **fields}, CompletionRequest)
    form = form_of(request, DEFAULT)
    assert form is not None
    text = text_of({ANSWER: form.body})
    assert problem_with(text) == ""
    assert follows(good, text, vocabulary, marked)
    assert not follows(bad, text, vocabulary, marked)


def grammar_of(schema: Any) -> str:
    form = form_of(CompletionRequest(prompt="a", structured_outputs=StructuredOutputs(json=schema)), DEFAULT)
    assert form is not None
    return text_of({ANSWER: form.body})


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ('{"id":"x","day":"2024-01-31","key":"","format":""}', True),
        ('{"id":"x","day":"yesterday","key":"","format":""}', False),
        ('{"id":"x","day":"2024-01-31","key":"","format":1}', False),
        ('{"id":"x","day":"2024-01-31","key":{"format":"x"},"format":""}', True),
        ('{"id":"x","day":"2024-01-31","key":{},"format":""}', False),
    ],
)
def test_formats_that_nobody_knows_are_ignored(
    text: str, holds: bool, vocabulary: Vocabulary, marked: Tokenizer
) -> None:
    """And those that are known hold; what only looks like a format is left alone."""
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "string", "format": "password"},
            "day": {"type": "string", "format": "date"},
            "key": {"anyOf": [{"$ref": "#/$defs/format"}, {"const": {"format": "x"}}]},
            "format": {"type": "string"},
        },
        "required": ["id", "day", "key", "format"],
        "additionalProperties": False,
        "$defs": {"format": {"type": "string", "format": "binary"}},
    }
    assert follows(text, grammar_of(schema), vocabulary, marked) == holds


def test_the_formats_that_are_known() -> None:
    for name in FORMATS:
        assert problem_with(text_of({ANSWER: {"json_schema": {"type": "string", "format": name}}})) == ""
    for name in ("password", "path", "binary", "decimal", "json-pointer", "regex"):
        assert problem_with(grammar_of({"type": "string", "format": name})) == ""
    assert problem_with(grammar_of({"type": "string", "format": 5})) != ""


def test_one_form_may_be_asked_for_under_several_names() -> None:
    """As clients do that were made for several servers and versions."""
    grammar = 'start: "a"'
    asked = CompletionRequest(guided_grammar=grammar, structured_outputs=StructuredOutputs(grammar=grammar))
    form = form_of(asked, DEFAULT)
    assert form is not None
    assert (form.param, form.body) == ("structured_outputs", {"lark_grammar": grammar})
    asked.ebnf = 'start: "b"'
    with pytest.raises(ApiError, match="structured_outputs and guided_grammar and ebnf exclude") as caught:
        form_of(asked, DEFAULT)
    assert caught.value.param == "ebnf"


def test_text_needs_no_grammar() -> None:
    assert form_of(CompletionRequest(response_format={"type": "text"}), DEFAULT) is None
    assert TurnFormat(chat(), HttpConfig()).rules("", None).grammar is None  # type: ignore[arg-type]


def test_texts_as_patterns() -> None:
    for text in ("[/THINK]", "a.b*c", "</think>", "x\ny", "{}()|^$#&~-+?\\"):
        pattern = pattern_of(text).replace(r"\/", "/")
        assert re.fullmatch(pattern, text), pattern


def test_deep_and_large_schemas_are_refused_in_time() -> None:
    deep: Any = {"type": "integer"}
    for _ in range(3000):
        deep = {"items": deep}
    with pytest.raises(ApiError, match="nested too deeply"):
        form_of(CompletionRequest(structured_outputs=StructuredOutputs(json=deep)), DEFAULT)
    for wide, said in (
        (StructuredOutputs(json={"enum": ["x" * 200_000]}), "the schema may have 131072 characters at most"),
        (StructuredOutputs(choice=["a"] * 5000), "there may be 4096 choices at most, got 5000"),
        (StructuredOutputs(regex="a" * 40_000), "the regular expression may have 32768 characters at most"),
        (
            StructuredOutputs(grammar="start: " + '"a" ' * 20_000),
            "the grammar may have 32768 characters at most",
        ),
    ):
        with pytest.raises(ApiError, match=said):
            form_of(CompletionRequest(structured_outputs=wide), DEFAULT)


def test_config() -> None:
    with pytest.raises(ValueError, match=r"--structured-outputs-config: .*unknown field `backends`"):
        HttpConfig(structured_outputs_config='{"backends": 1}')
    with pytest.raises(ValueError, match="Invalid enum value 'regexes'"):
        HttpConfig(structured_outputs_config='{"backend": "regexes"}')
    assert HttpConfig(structured_outputs_config='{"backend": "auto"}').structured_outputs == DEFAULT
    with pytest.raises(ValueError, match="give --reasoning-parser qwen3 instead"):
        HttpConfig(structured_outputs_config='{"reasoning_parser": "qwen3"}')


@pytest.mark.parametrize("backend", ["xgrammar", "outlines", "lm-format-enforcer"])
def test_other_backends_start_and_are_said_to_be_ignored(backend: str) -> None:
    argv = ["/m", "--structured-outputs-config.backend", backend]
    config = flags.parse(ServeConfig, argv, prog="serve", description="").http.structured_outputs
    assert config.ignored.startswith(f"--structured-outputs-config.backend {backend} ignored: llguidance")
    assert DEFAULT.ignored == ""


# ---- at the endpoint

USER: list[Any] = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_instances_are_told(server: Server, path: str) -> None:
    flat = {"type": "json_schema", "name": "point", "schema": POINT}
    nested = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Hi", "response_format": nested},
        "/v1/chat/completions": {"messages": USER, "response_format": nested},
        "/v1/responses": {"input": "Hi", "text": {"format": flat}},
        "/v1/messages": {"messages": USER, "max_tokens": 5, "output_config": {"format": flat}},
    }
    assert server.post(path, bodies[path]).status_code == 200
    grammar = server.mesh.prompts[-1].params.grammar
    assert grammar is not None
    assert problem_with(grammar) == ""
    assert json.loads(grammar)["grammars"][0]["json_schema"]["properties"] == POINT["properties"]


@pytest.mark.parametrize(
    ("choice", "reason"),
    [("required", "tool_calls"), ({"type": "function", "function": {"name": "draw"}}, "stop")],
)
def test_a_named_call_has_stopped(server: Server, tokenizer: Tokenizer, choice: Any, reason: str) -> None:
    """OpenAI's reasons: ``stop`` if the client chose the function, ``tool_calls`` if the model did."""
    Speaker(server, tokenizer)('[{"name": "draw", "parameters": {"x":1,"on":true}}]')
    fields: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": TOOLS, "tool_choice": choice}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        (made,) = client.chat.completions.create(**fields).choices
        chunks = list(client.chat.completions.create(**fields, stream=True))
    assert made.finish_reason == chunks[-1].choices[0].finish_reason == reason
    (call,) = made.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("draw", '{"x":1,"on":true}')
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments


def test_only_so_many_grammars_wait_to_be_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MOST_WAITING", 2)
    grammars = GrammarCheck()
    go_on = threading.Event()
    grammars._thread.submit(lambda: go_on.wait(60))
    until(lambda: not grammars._thread.num_waiting)

    async def check(number: int) -> None:
        await grammars.check(text_of({ANSWER: {"lark_grammar": f'start: "{number}"'}}), "grammar")

    async def scenario() -> None:
        waiting = [asyncio.create_task(check(number)) for number in range(2)]
        await asyncio.sleep(0)  # both have begun
        with pytest.raises(ApiError, match="Too many grammars") as refused:
            await check(2)
        assert refused.value.status == 503
        go_on.set()
        await asyncio.gather(*waiting)
        await check(2)

    asyncio.run(scenario())


def test_equal_grammars_that_come_at_once_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(grammar_check, "checked_grammar", lambda text: tried.append(text) or Checked(text))
    grammars = GrammarCheck()
    go_on = threading.Event()
    grammars._thread.submit(lambda: go_on.wait(60))

    async def scenario() -> list[Checked]:
        texts = ["a", "a", "b", "b"]
        waiting = [asyncio.create_task(grammars.check(text, "grammar")) for text in texts]
        await asyncio.sleep(0)  # all have begun
        go_on.set()
        return await asyncio.gather(*waiting)

    assert [checked.text for checked in asyncio.run(scenario())] == ["a", "a", "b", "b"]
    assert tried == ["a", "b"]


def test_a_grammar_waits_for_so_long_behind_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """After that it is not checked, so the next one need not wait for it."""
    monkeypatch.setattr(grammar_check, "MOST_WAIT", 0.05)
    tried: list[str] = []
    monkeypatch.setattr(grammar_check, "checked_grammar", lambda text: tried.append(text) or Checked(text))
    grammars = GrammarCheck()
    go_on = threading.Event()
    grammars._thread.submit(lambda: go_on.wait(60))
    until(lambda: not grammars._thread.num_waiting)
    with pytest.raises(ApiError, match="Too many grammars") as refused:
        asyncio.run(grammars.check("first", "grammar"))
    assert refused.value.status == 503
    go_on.set()
    monkeypatch.setattr(grammar_check, "MOST_WAIT", 60.0)
    asyncio.run(grammars.check("second", "grammar"))
    assert tried == ["second"]


# ---- schemas that say more than a grammar can

TAGS = {
    "type": "object",
    "properties": {"tags": {"type": "array", "uniqueItems": True}},
    "required": ["tags"],
}


@pytest.mark.parametrize(
    ("schema", "good", "bad", "unenforced"),
    [
        # names of any kind
        (
            {
                "type": "object",
                "propertyNames": {"type": "string"},
                "additionalProperties": {"type": "integer"},
                "minProperties": 1,
            },
            '{"a":1}',
            '{"a":"x"}',
            [],
        ),
        # names of an enum, as zod writes records
        (
            {
                "type": "object",
                "propertyNames": {"type": "string", "enum": ["a.b", "c"]},
                "additionalProperties": {"type": "integer"},
                "required": ["c"],
            },
            '{"c":1,"a.b":2}',
            '{"c":1,"axb":2}',
            [],
        ),
        ({"type": "object", "propertyNames": {"pattern": "^x[0-9]$"}}, '{"x1":[]}', '{"y":1}', []),
        (
            {"type": "object", "propertyNames": {"minLength": 2}},
            '{"a":1}',
            "[]",
            ["$.propertyNames"],
        ),
        (TAGS, '{"tags":[1,1]}', '{"tags":1}', ["$.properties.tags.uniqueItems"]),
        ({"type": "array", "uniqueItems": False}, "[1,1]", "{}", []),
        # alternatives that exclude each other need no remark, others are any of them
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1", "[]", []),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "1", '"x"', ["$.oneOf (as anyOf)"]),
        (
            {
                "type": "object",
                "properties": {"k": {"oneOf": [{"oneOf": [{"type": "integer"}, {"minimum": 3}]}]}},
            },
            '{"k":1}',
            "[]",
            ["$.properties.k.oneOf[0].oneOf (as anyOf)"],
        ),
        # the pattern that zod writes for addresses
        (
            {
                "type": "string",
                "format": "email",
                "pattern": "^(?!\\.)(?!.*\\.\\.)([a-z]*)@([a-z]+\\.)+[a-z]{2,}$",
            },
            '"a@b.example"',
            '"a"',
            ["$.pattern"],
        ),
        (
            {
                "type": "object",
                "patternProperties": {"^a(?!b)": {"type": "integer"}, "^x": {"type": "boolean"}},
                "additionalProperties": False,
            },
            '{"ac":1}',
            '{"x":1}',
            ["$.patternProperties.^a(?!b)"],
        ),
        ({"if": {"const": 1}, "then": {"const": 1}, "type": "integer"}, "2", '"x"', ["$.if"]),
        # a property that may not be there
        (
            {"type": "object", "properties": {"a": {"not": {}}, "b": {"const": 1}}, "required": ["b"]},
            '{"b":1}',
            '{"a":1,"b":1}',
            [],
        ),
        # what only looks like a keyword stays
        (
            {
                "type": "object",
                "properties": {"not": {"const": {"uniqueItems": True}}},
                "required": ["not"],
            },
            '{"not":{"uniqueItems":true}}',
            '{"not":{}}',
            [],
        ),
    ],
)
def test_what_a_grammar_cannot_say_is_left_out_and_named(
    schema: Any, good: str, bad: str, unenforced: list[str], vocabulary: Vocabulary, marked: Tokenizer
) -> None:
    checked = checked_grammar(grammar_of(schema))
    assert checked.problem == ""
    assert checked.unenforced == ({ANSWER: unenforced} if unenforced else {})
    assert follows(good, checked.text, vocabulary, marked)
    assert not follows(bad, checked.text, vocabulary, marked)
    assert checked_grammar(checked.text).text == checked.text


MANY = {
    "$defs": {"big": {"properties": {f"p{i}": {"type": "string", "pattern": f"[a-z]{{1,9}}x{i}"} for i in range(200)}}},
    "type": "object",
}  # fmt: skip
"""What each trial of a part has to read."""


def test_parts_of_a_schema_are_tried_for_so_long_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others wait for the same thread, and 128 KB can hold hours of trials."""
    properties = {f"p{i}": {"oneOf": [{"$ref": "#/$defs/big"}]} for i in range(60)}
    costly = grammar_of(MANY | {"not": {"const": 1}, "properties": properties})
    assert checked_grammar(costly).problem == ""
    wrong = grammar_of(MANY | {"properties": properties | {"z": {"type": "text"}}})
    assert checked_grammar(wrong).problem == "$.properties.z: Invalid type: text"
    monkeypatch.setattr(grammar_check, "MOST_SECONDS", 0.01)
    assert checked_grammar(costly).problem == grammar_check.TAKES_TOO_LONG
    assert checked_grammar(wrong).problem in (grammar_check.TAKES_TOO_LONG, "Invalid type: text")
    assert checked_grammar(grammar_of(POINT)).problem == ""


def test_a_pattern_that_is_no_text_is_wrong() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": 5}}}
    assert checked_grammar(grammar_of(schema)).problem.startswith("$.properties.a: ")


def test_places_with_long_names_are_shortened() -> None:
    named = {"properties": {"a" * 5000: {"type": "array", "uniqueItems": True}}}
    (place,) = checked_grammar(grammar_of(named)).unenforced[ANSWER]
    assert (len(place), place[:16], place[-3:]) == (MAX_LOCATION, "$.properties.aaa", "...")
    named = {"properties": {"a" * 5000: {"type": "text"}}}
    assert len(checked_grammar(grammar_of(named)).problem) < MAX_LOCATION + 50


def test_places_take_no_memory_for_each_level_of_a_schema() -> None:
    """A walk holds a path for each level, which repeats the names of all above."""
    nested: dict[str, object] = {"type": "array", "uniqueItems": True}
    for _ in range(50):
        nested = {"properties": {"a" * 20_000: nested}}
    tracemalloc.start()
    try:
        (place,) = supported(nested, lambda schema: "").unenforced
        assert len(place) == MAX_LOCATION
        assert len(where_wrong(nested, lambda schema: "wrong")) == MAX_LOCATION
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_names_of_properties_write_no_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    named = {"properties": {"a\nERROR": {"type": "array", "uniqueItems": True}}}
    with caplog.at_level("INFO", "router.turns.grammar_check"):
        asyncio.run(GrammarCheck().check(grammar_of(named), "guided_json"))
    (message,) = [record.getMessage() for record in caplog.records if "enforced" in record.message]
    assert message == r"not enforced: answer $.properties.a\nERROR.uniqueItems"


def test_the_keywords_that_are_unknown() -> None:
    """The unknown keywords are those of the list, and no others."""
    for key in UNKNOWN:
        text = text_of({ANSWER: {"json_schema": {key: "x", "x-guidance": {"lenient": False}}}})
        assert "Unimplemented keys" in LLMatcher.validate_grammar(text), key
    for key in (
        set(jsonschema.Draft202012Validator.VALIDATORS) - UNKNOWN - {"$ref", "oneOf", "enum", "format"}
    ):
        text = text_of({ANSWER: {"json_schema": {key: {}, "x-guidance": {"lenient": False}}}})
        assert "Unimplemented keys" not in LLMatcher.validate_grammar(text), key


def tool(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **fields}}


def test_one_schema_among_many_is_named(server: Server) -> None:
    wrong = {"type": "object", "properties": {"a": {"items": {"type": "text"}}}}
    body = {"messages": USER, "tool_choice": "required"}
    answer = server.post("/v1/chat/completions", body | {"tools": [tool("one", POINT), tool("two", wrong)]})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["message"], error["param"]) == (
        "tools[1] ('two'): $.properties.a.items: Invalid type: text",
        "tools",
    )
    strict = [tool("one", TAGS), tool("two", TAGS, strict=True)]
    answer = server.post("/v1/chat/completions", body | {"tools": strict})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == (
        "tools[1] ('two'): $.properties.tags.uniqueItems cannot be enforced, and the schema is strict: "
        "leave it out, or do not set strict."
    )


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_enforced_is_in_a_header(server: Server, stream: bool) -> None:
    def header(**fields: Any) -> str | None:
        answer = server.post("/v1/chat/completions", {"messages": USER, "stream": stream, **fields})
        assert answer.status_code == 200, answer.text
        return answer.headers.get("x-lockstep-not-enforced")

    tools = [tool("one", POINT), tool("zwö", TAGS)]
    assert header(tools=tools, tool_choice="required") == "tools[1] ('zw?') $.properties.tags.uniqueItems"
    assert header(tools=tools[:1], tool_choice="required") is None

    def form(**fields: Any) -> dict[str, Any]:
        return {"type": "json_schema", "json_schema": {"name": "tags", "schema": TAGS, **fields}}

    assert header(response_format=form(strict=False)) == "response_format $.properties.tags.uniqueItems"
    strict = server.post("/v1/chat/completions", {"messages": USER, "response_format": form(strict=True)})
    assert strict.status_code == 400
    assert strict.json()["error"]["message"].startswith(
        "response_format: $.properties.tags.uniqueItems cannot"
    )


@pytest.mark.parametrize(
    ("more", "is_open"),
    [({}, False), ({"additionalProperties": True}, True), ({"additionalProperties": {}}, True)],
)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "draw"}}, None])
def test_calls_have_no_arguments_that_nobody_named(
    choice: Any, more: dict[str, Any], is_open: bool, vocabulary: Vocabulary, marked: Tokenizer
) -> None:
    """Unless the schema allows more; objects within it, too."""
    inner = {"type": "object", "properties": {"x": {"type": "integer"}}, **more}
    parameters = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/at"}},
        "$defs": {"at": inner},
        **more,
    }
    form = None if choice else {"type": "json_object"}
    config = HttpConfig(tool_call_parser="hermes", enable_auto_tool_choice=True)
    request = chat(tools=[tool("draw", parameters)], tool_choice=choice, response_format=form)
    grammar = TurnFormat(request, config).rules("", marked).grammar
    assert grammar is not None
    for arguments, is_call in (
        ('{"at":{"x":1}}', True),
        ("{}", True),
        ('{"at":{"x":1},"note":"well"}', is_open),
        ('{"at":{"x":1,"y":2}}', is_open),
    ):
        call = f'<tool_call>\n{{"name": "draw", "arguments": {arguments}}}\n</tool_call>'
        assert follows(call, grammar, vocabulary, marked) == is_call, arguments
    assert request.tools == [tool("draw", parameters)], "the prompt shows what was sent"


@pytest.mark.parametrize("parser", list(TOOL_PARSERS))
def test_a_call_or_an_answer_in_its_form(parser: str, vocabulary: Vocabulary, marked: Tokenizer) -> None:
    """With callable tools and a form, the model may use either, and nothing else."""
    config = HttpConfig(tool_call_parser=parser, enable_auto_tool_choice=True)
    wanted = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "array", "items": {"type": "integer"}}},
    }
    request = chat(tools=TOOLS, response_format=wanted)
    grammar = TurnFormat(request, config).rules("", marked).grammar
    assert grammar is not None
    assert problem_with(grammar) == ""
    assert follows("[1,2]", grammar, vocabulary, marked)
    assert turn(request, config, "[1,2]").content == "[1,2]"
    assert not follows("Well", grammar, vocabulary, marked)
    assert not follows('{"x":1}', grammar, vocabulary, marked)
    call = CALLS[parser]
    assert follows(call, grammar, vocabulary, marked)
    found = turn(request, config, call)
    assert (found.content, [each.name for each in found.calls]) == ("", ["draw"])
    none = chat(tools=TOOLS, response_format=wanted, tool_choice="none")
    grammar = TurnFormat(none, config).rules("", marked).grammar
    assert grammar is not None
    assert not follows(call, grammar, vocabulary, marked)


ARGUMENTS = '{"x":7,"on":true}'
JSON_CALL = f'{{"name": "draw", "arguments": {ARGUMENTS}}}'
XML_CALL = "<function=draw><parameter=x>7</parameter><parameter=on>true</parameter></function>"
GLM_CALL = (
    "<tool_call>draw<arg_key>x</arg_key><arg_value>7</arg_value>"
    "<arg_key>on</arg_key><arg_value>true</arg_value></tool_call>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.draw:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
)
DEEPSEEK = TOOL_PARSERS["deepseek_v3"].markers
CALLS = {
    "hermes": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "granite4": f"<tool_call>\n{JSON_CALL}\n</tool_call>",
    "llama3_json": f'{{"name": "draw", "parameters": {ARGUMENTS}}}',
    "llama4_json": f'{{"name": "draw", "parameters": {ARGUMENTS}}}',
    "mistral": f"[TOOL_CALLS][{JSON_CALL}]",
    "deepseek_v3": f"{DEEPSEEK[0]}{DEEPSEEK[2]}function{DEEPSEEK[4]}draw\n```json\n{ARGUMENTS}\n```"
    f"{DEEPSEEK[3]}{DEEPSEEK[1]}",
    "deepseek_v31": f"{DEEPSEEK[0]}{DEEPSEEK[2]}draw{DEEPSEEK[4]}{ARGUMENTS}{DEEPSEEK[3]}{DEEPSEEK[1]}",
    "granite": f"<|tool_call|>[{JSON_CALL}]",
    "granite-20b-fc": f"<function_call> {JSON_CALL}",
    "internlm": f'<|action_start|><|plugin|>{{"name": "draw", "parameters": {ARGUMENTS}}}<|action_end|>',
    "hunyuan_a13b": f"<tool_calls>[{JSON_CALL}]</tool_calls>",
    "phi4_mini_json": f"functools[{JSON_CALL}]",
    "qwen3_coder": f"<tool_call>{XML_CALL}</tool_call>",
    "qwen3_xml": f"<tool_call>\n{XML_CALL}\n</tool_call>",
    "seed_oss": f"<seed:tool_call>{XML_CALL}</seed:tool_call>",
    "minimax_m2": '<minimax:tool_call><invoke name="draw"><parameter name="x">7</parameter></invoke>'
    "</minimax:tool_call>",
    "glm45": GLM_CALL,
    "glm47": GLM_CALL,
    "kimi_k2": KIMI_CALL,
    "pythonic": "[draw(x=7, on=True)]",
    "llama4_pythonic": "<|python_start|>[draw(x=7, on=True)]<|python_end|>",
}


def test_harmony_calls_or_answers_in_its_form(vocabulary: Vocabulary, marked: Tokenizer) -> None:
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    form = TurnFormat(chat(tools=TOOLS, guided_choice=["yes"]), HttpConfig(), harmony=True)
    grammar = form.rules(prompt, marked).grammar
    assert grammar is not None
    for whole in (
        "<|channel|>final<|message|>yes",
        f"<|channel|>commentary to=functions.draw <|constrain|>json<|message|>{ARGUMENTS}",
    ):
        assert follows(whole, grammar, vocabulary, marked)
    assert not follows("<|channel|>final<|message|>no", grammar, vocabulary, marked)
