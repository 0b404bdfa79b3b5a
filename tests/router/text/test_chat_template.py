"""Messages to prompts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from router.config import HttpConfig
from router.mesh import ServedModel
from router.text import chat_template
from router.text.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    load_chat_templates,
    named_chat_template,
)
from router.text.text_model import load_text_model
from router.text.tokens import Tokenizer, load_tokenizer
from tests.router import tiny_tokenizer
from tests.router.talking import SYSTEM_FIRST

STRINGS = tiny_tokenizer.TEMPLATE
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
USER: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
TWO_PARTS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, {"bos_token": "<bos>"})


def test_render() -> None:
    assert template(STRINGS).render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template(STRINGS).render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert template("{{ bos_token }}{{ x }}{{ tools }}").render(USER, variables={"x": 1}) == "<bos>1None"


@pytest.mark.parametrize(
    ("source", "messages", "text"),
    [
        (STRINGS, TWO_PARTS, "<|im_start|>user\na\nb<|im_end|>\n"),
        (PARTS, TWO_PARTS, "[a][b]"),
        (PARTS, USER, "[hi]"),
        (BOTH, TWO_PARTS, "[a][b]"),
        (BOTH, USER, "hi"),
        (BOTH, [{"role": "user", "content": ["x", {"text": "y"}]}], "[x][y]"),
        (BOTH, [{"role": "assistant", "content": None}], ""),
        (BOTH, [{"role": "assistant"}], ""),
        (BOTH, [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}], "[no]"),
        (BOTH, [{"role": "assistant", "content": None, "refusal": "no"}], "no"),
        (BOTH, [{"role": "assistant", "content": "yes", "refusal": None}], "yes"),
    ],
)
def test_content_in_the_form_that_the_template_takes(source: str, messages: Any, text: str) -> None:
    assert template(source).render(messages, add_generation_prompt=False) == text


def test_what_stands_beside_a_text_is_for_the_template() -> None:
    source = (
        "{% for p in messages[0].content %}{{ p.source_lang_code }}>{{ p.lang }}: {{ p.text }};{% endfor %}"
    )
    parts = [{"type": "input_text", "text": "a", "source_lang_code": "en", "lang": "es"}, "b"]
    assert template(source).render([{"role": "user", "content": parts}]) == "en>es: a;>: b;"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            [{"type": "image_url", "image_url": {"url": "http://x"}}],
            "is of type 'image_url', but this model",
        ),
        ([{"type": "text"}], "a text part without text"),
        ([{"type": "text", "text": 3}], "a text part without text"),
        ([7], "a part without a type"),
        (7, "content must be a string or a list"),
        ({"type": "text"}, "content must be a string or a list"),
    ],
)
def test_content_that_is_no_text(content: Any, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        template(STRINGS).render([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("It is", "assistant\nIt is"),
        ("It is ", "assistant\nIt is "),
        ([{"type": "text", "text": "It is"}], "assistant\nIt is"),
    ],
)
def test_continue_final_message(content: Any, text: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    rendered = template(STRINGS).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered.endswith(text)


def test_continue_final_message_with_a_template_that_trims() -> None:
    source = STRINGS.replace("message.content", "message.content | trim")
    messages = [{"role": "assistant", "content": " It is "}]
    rendered = template(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "<|im_start|>assistant\nIt is"


@pytest.mark.parametrize("content", ["<", "im", "|im_end|>", "assistant", "\n<|im", "a<|im_end|>\n"])
def test_continue_what_the_template_writes_itself(content: str) -> None:
    messages = [*USER, {"role": "assistant", "content": content}]
    rendered = template(STRINGS).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{content}"


def test_continue_final_message_of_parts() -> None:
    messages = [
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "]"}]}
    ]
    assert template(PARTS).render(messages, continue_final_message=True) == "[a][]"


def test_continue_final_message_that_is_written_twice_or_cut() -> None:
    messages = [{"role": "assistant", "content": "It is"}]
    twice = "{{ messages[0].content }}: {{ messages[0].content }}."
    assert template(twice).render(messages, continue_final_message=True) == "It is: It is"
    cut = "{{ messages[0].content[:5] }}."
    assert template(cut).render(messages, continue_final_message=True) == "It is"


@pytest.mark.parametrize("content", ["", " ", None, []])
@pytest.mark.parametrize("source", [STRINGS, PARTS, BOTH])
def test_continue_final_message_needs_content(source: str, content: Any) -> None:
    with pytest.raises(ChatTemplateError, match="needs a last message with content"):
        template(source).render([{"role": "assistant", "content": content}], continue_final_message=True)


def test_a_call_without_content_cannot_be_continued() -> None:
    source = "{% for m in messages %}{{ m.tool_calls[0].function.name if m.content is none else m.content }}{% endfor %}"
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert template(source).takes_null
    with pytest.raises(ChatTemplateError, match="needs a last message with content"):
        template(source).render(messages, continue_final_message=True)


def test_what_templates_can_use() -> None:
    assert template("{{ {'a': '<é>'} | tojson }}").render(USER) == '{"a": "<é>"}'
    assert template("{{ [1] | tojson(indent=2) }}").render(USER) == "[\n  1\n]"
    assert len(template("{{ strftime_now('%Y') }}").render(USER)) == 4
    assert (
        template("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}").render(
            USER
        )
        == "01"
    )
    assert template("a{% generation %}b{% endgeneration %}c").render(USER) == "abc"
    assert template("  {% if true %}\nx\n  {% endif %}\n").render(USER) == "x\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{% for i in range(999999999) %}x{% endfor %}", "Range too big"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_errors_in_templates_are_the_clients_to_see(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        template(source).render(USER)


def test_size_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}"
    with monkeypatch.context() as patch:
        patch.setattr(chat_template, "MAX_RENDERED", 1500)
        with pytest.raises(ChatTemplateError, match="writes too much"):
            template(source).render(USER)
    monkeypatch.setattr(chat_template, "MAX_SECONDS", -1.0)
    with pytest.raises(ChatTemplateError, match="takes too long"):
        template(source).render(USER)


def test_tool_calls_get_their_arguments_parsed() -> None:
    source = "{{ messages[0].tool_calls[0].function.arguments.city }}"
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}
    assert template(source).render([{"role": "assistant", "tool_calls": [call]}]) == "Ulm"


@pytest.mark.parametrize("arguments", ["{", '{"city": "Ul', "[1]", "5", '"Ulm"', "null", "[" * 5000, "nan"])
def test_arguments_that_are_no_object_come_back_as_text(arguments: str) -> None:
    """Templates go through the items of arguments, or print them as JSON."""
    source = (
        "{% for k, v in messages[1].tool_calls[0].function.arguments.items() %}{{ k }}={{ v }}{% endfor %}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
    assert template(source).render(messages) == f"INVALID_JSON={arguments}"


@pytest.mark.parametrize("arguments", ["", " ", None])
def test_no_arguments_are_an_empty_object(arguments: str | None) -> None:
    source = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    assert template(source).render([*USER, {"role": "assistant", "tool_calls": [call]}]) == "{}"


def test_a_call_may_have_no_content() -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": None}}
    messages = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    looks_for_null = "{% for m in messages %}{% if m.content is none %}CALL {{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments }}{% endif %}{% endfor %}"
    assert template(looks_for_null).render(messages) == "CALL f{}"
    prints = "{% for m in messages %}{{ m.content }};{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}{% endfor %}"
    assert template(prints).render(messages) == "hi;;f"
    only_if_there = "{% for m in messages %}{{ 'calls' if m.tool_calls is defined else '-' }}{% endfor %}"
    assert template(only_if_there).render([USER[0] | {"tool_calls": None}, messages[-1]]) == "-calls"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_either_name(name: str) -> None:
    messages = [{"role": "assistant", "content": "x", name: "why"}]
    source = "{{ messages[0].reasoning }}{{ messages[0].reasoning_content }}"
    assert template(source).render(messages) == "whywhy"


def test_a_developer_is_the_system_where_the_template_knows_none() -> None:
    messages = [{"role": "developer", "content": "Be nice"}]
    source = (
        "{% for m in messages %}{% if m.role in roles %}{{ m.role }}: {{ m.content }}{% endif %}{% endfor %}"
    )
    unknown = source.replace("roles", '("system", "user")')
    assert template(unknown).render(messages) == "system: Be nice"
    known = source.replace("roles", '("developer", "user")')
    assert template(known).render(messages) == "developer: Be nice"
    assert messages[0]["role"] == "developer"


GENERIC = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
OTHERS_DROPPED = (
    "{% if messages[0].role in ('system', 'developer') %}<system>{{ messages[0].content }}"
    "{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}>{{ m.content }}{% endif %}"
    "{% endfor %}"
)
LEADING_ONLY = (
    "{% set seen = namespace(turn=false) %}{% for m in messages %}{% if m.role != 'system' %}"
    "{% set seen.turn = true %}{% elif seen.turn %}{{ raise_exception('too late') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def said(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (GENERIC, "<system>A<system>B<user>hi<assistant>yes<system>C<user>go"),
        (SYSTEM_FIRST, "<system>A\n\nB\n\nC<user>hi<assistant>yes<user>go"),
        (OTHERS_DROPPED, "<system>A\n\nB\n\nC<user>hi<assistant>yes<user>go"),
        (LEADING_ONLY, "<system>A\n\nB\n\nC<user>hi<assistant>yes<user>go"),
    ],
)
def test_instructions_are_one_message_where_the_template_needs_it(source: str, text: str) -> None:
    messages = said(
        ("system", "A"), ("developer", [{"type": "text", "text": "B"}]), ("user", "hi"),
        ("assistant", "yes"), ("system", "C"), ("user", "go"),
    )  # fmt: skip
    before = json.dumps(messages)
    assert template(source).render(messages) == text
    assert json.dumps(messages) == before


def test_instructions_behind_the_first_turn_go_to_the_front() -> None:
    messages = said(("user", "hi"), ("developer", "A"), ("system", ""))
    assert template(SYSTEM_FIRST).render(messages) == "<system>A<user>hi"
    assert template(SYSTEM_FIRST).render(messages[:1]) == "<user>hi"
    parts = SYSTEM_FIRST.replace("m.content", "m.content[0].text")
    assert template(parts).render(messages) == "<system>A<user>hi"


def test_a_last_message_that_is_gone_on_with_stays() -> None:
    messages = said(("system", "A"), ("user", "hi"), ("system", "B"), ("assistant", "It is"))
    fixed: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    assert template(SYSTEM_FIRST).render(messages, **fixed) == "<system>A\n\nB<user>hi<assistant>It is"
    with pytest.raises(ChatTemplateError, match="must be at the beginning"):
        template(SYSTEM_FIRST).render(messages[:3], **fixed)


def test_reserved_variables() -> None:
    with pytest.raises(ChatTemplateError, match="must not set messages"):
        template(STRINGS).render(USER, variables={"messages": []})


def test_where_templates_come_from(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """An override wins over chat_template.jinja, that over tokenizer_config.json."""

    def text(override: str | None = None, *, tools: bool = False) -> str:
        loaded = load_tokenizer(directory)
        return load_chat_templates(directory, loaded, override).choose(with_tools=tools).render(USER)

    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    directory = tiny_tokenizer.write_model(tmp_path, chat_template=named)
    assert (text(), text(tools=True)) == ("plain", "tools")
    (directory / "chat_template.jinja").write_text("file")
    assert (text(), text(tools=True)) == ("file", "tools")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("more tools")
    assert text(tools=True) == "more tools"
    (tmp_path / "mine.jinja").write_text("mine")
    assert text(str(tmp_path / "mine.jinja"), tools=True) == "mine"
    assert text("{{ messages[0].role }}") == "user"
    assert text("~{{ messages[0].role }}") == "~user"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("latin.jinja", "latin.jinja is no text in UTF-8"),
        ("nowhere.jinja", "nowhere.jinja cannot be read: No such file"),
        ("~nobody-of-this-name/x.jinja", "cannot be read: No such file"),
        ("x" * 300, "cannot be read: File name too long"),
        ("/", "cannot be read: Is a directory"),
        ("a\0b", "cannot be read: embedded null byte"),
        ("{% if %}", "does not compile"),
    ],
)
def test_a_named_template_that_cannot_be_used(
    name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("latin.jinja").write_bytes("{# \xe9t\xe9 #}".encode("latin-1"))
    with pytest.raises(ChatTemplateError, match=says):
        named_chat_template(name, {})


def test_a_template_of_the_model_that_is_no_text(tmp_path: Path) -> None:
    directory = tiny_tokenizer.write_model(tmp_path)
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ChatTemplateError, match="is no text in UTF-8"):
        load_chat_templates(directory, load_tokenizer(directory))


def test_the_template_of_a_processor(tmp_path: Path) -> None:
    """chat_template.json, as older models with other modalities have it: taken where there is no other."""
    directory = tiny_tokenizer.write_model(tmp_path, chat_template=None)
    path = directory / "chat_template.json"

    def text() -> str:
        templates = load_chat_templates(directory, load_tokenizer(directory))
        return templates.choose(with_tools=False).render(USER)

    path.write_text(json.dumps({"chat_template": "from the processor: {{ messages[0].content }}"}))
    assert text().startswith("from the processor: ")
    (directory / "chat_template.jinja").write_text("file")
    assert text() == "file"
    path.write_text("{")
    with pytest.raises(ChatTemplateError, match=r"chat_template\.json is not valid JSON"):
        text()


def test_no_template(tmp_path: Path) -> None:
    directory = tiny_tokenizer.write_model(tmp_path, chat_template=None)
    templates = load_chat_templates(directory, load_tokenizer(directory))
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        templates.choose(with_tools=False)


def test_a_template_that_does_not_compile() -> None:
    with pytest.raises(
        ChatTemplateError, match=r"^The chat template does not compile: syntax error in line 2: Exp"
    ):
        template("a\n{% if %}")


@pytest.mark.parametrize("file", ["chat_template.jinja", "chat_template.json", "tokenizer_config.json"])
def test_the_file_and_the_line_of_a_syntax_error_are_named_at_the_start_and_in_answers(
    file: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = "{{ messages }}\n{% for message in messages %}"
    given = broken if file == "tokenizer_config.json" else None
    directory = tiny_tokenizer.write_model(tmp_path, chat_template=given)
    if given is None:
        text = broken if file.endswith(".jinja") else json.dumps({"chat_template": broken})
        (directory / file).write_text(text)
    served = ServedModel(names=("m",), directory=str(directory), max_model_len=64, vocab_size=512)
    model = load_text_model(served, HttpConfig())
    problem = (
        f"The chat template of {file} does not compile: syntax error in line 2: Unexpected end of template"
    )
    assert f"chat requests will be refused: {problem}" in caplog.text
    with pytest.raises(ChatTemplateError, match=re.escape(problem)) as caught:
        model.templates.choose(with_tools=False)
    assert str(caught.value).endswith("use /v1/completions, or start the router with --chat-template.")


def test_the_same_as_transformers() -> None:
    """The oracle, where installed: same text for a template with all features in use."""
    oracle = pytest.importorskip("transformers.utils.chat_template_utils")
    source = (
        "{{- bos_token }}\n{%- for message in messages %}\n"
        "  {%- if loop.first and message['role'] == 'system' %}\n"
        "    {{- message.content | trim }}\n  {%- continue %}\n  {%- endif %}\n"
        "{{ message['role'] + ': ' + message['content'] }}\n{%- endfor %}\n"
        "{%- if tools %}{{ tools | tojson(indent=4) }}{% endif %}\n"
        "{% if add_generation_prompt %}\n>>\n{% endif %}"
    )
    messages = [{"role": "system", "content": " be <kind> "}, {"role": "user", "content": "ä & b"}]
    tools = [{"type": "function", "function": {"name": "f", "description": "<ü>"}}]
    expected, _ = oracle.render_jinja_template(
        [messages], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<bos>"
    )
    assert template(source).render(messages, tools=tools) == expected[0]
    assert json.dumps("ü", ensure_ascii=False) in expected[0].replace("<", "").replace(">", "")
