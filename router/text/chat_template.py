"""Chat messages to one prompt text, by the model's own Jinja template.

Templates come with models and see what clients send. They run in Jinja's immutable sandbox, with a bound on
time and on the length of what they write. What they may use is what transformers gives them.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from router.http.json_values import too_many
from router.images.parts import PLACED, path_of
from router.text.tokens import Tokenizer, TokenizerError

MAX_RENDERED = 32 * 1024**2
"""Characters that a template may write."""
MAX_SECONDS = 10.0
MAX_ERROR = 500
"""Characters of an error that are passed on: templates may quote whole messages in theirs."""
PROBE = "lockstepprobe"
"""A text that no template has of its own."""
KEEPS_NOTHING = (
    "continue_final_message needs a last message with content that the chat template keeps as it is."
)

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
INVALID_JSON = "INVALID_JSON"
"""The key of call arguments that are no JSON object, as on Anthropic's pages."""
INSTRUCTIONS = ("system", "developer")
"""Roles of messages that instruct the model."""
BETWEEN_INSTRUCTIONS = "\n\n"
"""Separator between the texts of several instructions that become one."""
RESERVED = frozenset(
    {"messages", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
)
"""Variables that ``chat_template_kwargs`` may not set: requests have fields for them."""

Message = dict[str, Any]


class ChatTemplateError(ValueError):
    """Messages that make no prompt with this template, or a template that does not work.

    ``logged`` goes to the log instead of a message that may quote the conversation; ``path`` is that of the
    part at fault, where it is known.
    """

    def __init__(self, message: str, logged: str | None = None, path: str = "messages") -> None:
        super().__init__(message)
        self.logged = logged
        self.path = path

    def __str__(self) -> str:
        return super().__str__()[:MAX_ERROR]


class ChatTemplate:
    """One compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], where: str = "") -> None:
        """Compile a template; ``where`` is its file, for errors.

        Raises:
            ChatTemplateError: it does not compile.
        """
        try:
            self._template = _environment.from_string(source)
        except jinja2.TemplateError as error:
            named = f"The chat template{where and ' of '}{where} does not compile"
            raise ChatTemplateError(f"{named}: {_reason(error)}") from error
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.image_mark = ""
        """What stands for an image in a template that takes texts only."""
        self._knows_developer = "developer" in source
        self.takes_strings, self.takes_parts = self._probe(PROBE), self._probe([_part(PROBE)])
        self._takes_more = {role: self._probe_more(role) for role in INSTRUCTIONS}
        self.takes_null = self._probe_null()

    def __repr__(self) -> str:
        return f"<ChatTemplate strings={self.takes_strings} parts={self.takes_parts}>"

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation.

        Raises:
            ChatTemplateError: the messages do not fit the template, in words for the client.
        """
        variables = dict(variables or {})
        if taken := RESERVED & variables.keys():
            raise ChatTemplateError(f"chat_template_kwargs must not set {', '.join(sorted(taken))}.")
        shaped = [self._shape(index, message) for index, message in enumerate(messages)]
        shaped = self._with_one_system(shaped, keeps_last=continue_final_message)
        optional = {"tools": tools, "documents": documents}
        variables = (
            self._special_tokens
            | {"tools": None, "documents": None}
            | variables
            | {name: value for name, value in optional.items() if value is not None}
            | {"messages": shaped, "add_generation_prompt": add_generation_prompt}
        )
        return self._write_open(variables) if continue_final_message else self._write(variables)

    def _write_open(self, variables: dict[str, Any]) -> str:
        """The prompt up to the last message's text, which the model continues.

        A mark in the message shows where that ends: what the template writes after it may look like it.
        """
        *earlier, last = variables["messages"]
        content = last["content"] or ""
        text: str = content if isinstance(content, str) else content[-1]["text"]
        core = text.rstrip()
        if not core:
            raise ChatTemplateError(KEEPS_NOTHING)
        trailing, mark = text[len(core) :], uuid.uuid4().hex
        marked = core + mark + trailing
        reshaped = marked if isinstance(content, str) else [*content[:-1], _part(marked)]
        messages = [*earlier, last | {"content": reshaped}]
        written, found, after = self._write(variables | {"messages": messages}).rpartition(mark)
        if not found:
            return _cut_after(self._write(variables), core.lstrip(), trailing)
        return written.replace(mark, "") + (trailing if after.startswith(trailing) else "")

    def _write(self, variables: dict[str, Any]) -> str:
        deadline = time.monotonic() + MAX_SECONDS
        written: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(variables):
                written.append(piece)
                length += len(piece)
                if length > MAX_RENDERED or time.monotonic() > deadline:
                    raise ChatTemplateError("The chat template writes too much or takes too long.")
        except ChatTemplateError:
            raise
        except Exception as error:  # whatever it is, the messages brought it about
            problem = "The chat template cannot render these messages"
            raise ChatTemplateError(f"{problem}: {error}", f"{problem}.") from error
        return "".join(written)

    def _shape(self, index: int, message: Message) -> Message:
        """A message with its content as the template expects it: a text or parts."""
        content = message.get("content")
        if content is None and isinstance(message.get("refusal"), str):
            content = message["refusal"]  # OpenAI's name for the text of an answer that declines
        shaped = {key: value for key, value in message.items() if key != "tool_calls"}
        calls = message.get("tool_calls")
        if calls:
            shaped["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        if not (calls and content is None and self.takes_null):
            content = self._shape_content(index, content)
        shaped["content"] = content
        if message.get("role") == "developer" and not self._knows_developer:
            shaped["role"] = "system"  # as it was called; what a template does not know, it drops or refuses
        return _with_reasoning(shaped)

    def _with_one_system(self, messages: list[Message], *, keeps_last: bool) -> list[Message]:
        """The messages with all instructions as one in front.

        They stay where they are if the template writes later instructions in place. ``keeps_last``: the model
        continues the last message, so it stays as it is.
        """
        end = len(messages) - 1 if keeps_last else len(messages)
        if all(self._takes_more.get(str(message.get("role")), True) for message in messages[1:end]):
            return messages
        instructions = [message for message in messages[:end] if message.get("role") in INSTRUCTIONS]
        turns = [message for message in messages[:end] if message.get("role") not in INSTRUCTIONS]
        text = BETWEEN_INSTRUCTIONS.join(filter(None, map(_text_of, instructions)))
        return [instructions[0] | {"content": self._shape_content(0, text)}, *turns, *messages[end:]]

    def _shape_content(self, index: int, content: Any) -> Any:
        if content is None:
            content = ""
        if isinstance(content, str):
            return content if self.takes_strings or not self.takes_parts else [_part(content)]
        texts = content_texts(index, content)
        if not self.takes_parts:
            return "\n".join(self.image_mark if text is None else text for text in texts)
        # What clients put beside a text is for templates that know it, like the languages of a translation.
        parts = zip(content, texts, strict=True)
        return [
            part if text is None else (part if isinstance(part, dict) else {}) | _part(text)
            for part, text in parts
        ]

    def _probe(self, content: Any) -> bool:
        """Whether content in this form is written as its text, not as a printed list."""
        text = self._try([{"role": "user", "content": content}])
        return PROBE in text and f"'{PROBE}'" not in text and f'"{PROBE}"' not in text

    def _probe_null(self) -> bool:
        """Whether a tool call may come with content null.

        Some templates look for that, others would print it.
        """
        call = {"id": PROBE, "type": "function", "function": {"name": PROBE, "arguments": {}}}
        user: Message = {"role": "user", "content": "" if self.takes_strings else [_part("")]}
        text = self._try([user, {"role": "assistant", "content": None, "tool_calls": [call]}])
        return PROBE in text and "None" not in text

    def _probe_more(self, role: str) -> bool:
        """Whether later messages of a role are written, behind instructions and between turns.

        Many templates look at the first message alone, and drop or refuse what comes later.
        """
        behind, between = f"{PROBE}1", f"{PROBE}2"
        turns = [
            ("system", PROBE), (role, behind), ("user", PROBE),
            ("assistant", PROBE), (role, between), ("user", PROBE),
        ]  # fmt: skip
        text = self._try([{"role": role, "content": self._shape_content(0, text)} for role, text in turns])
        return behind in text and between in text

    def _try(self, messages: list[Message]) -> str:
        """The prompt of some messages; empty if they do not fit the template."""
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return self._write(self._special_tokens | variables)
        except ChatTemplateError:
            return ""


class ChatTemplates:
    """The templates of a model by name: ``default``, perhaps ``tool_use``."""

    def __init__(self, templates: Mapping[str, ChatTemplate], problem: str = "") -> None:
        """``problem``: why the model's own template cannot be used, if there is none."""
        self._templates = dict(templates)
        self._problem = problem.rstrip(".") or "This model has no chat template"
        self.sources = {name: template.source for name, template in templates.items()}

    def __repr__(self) -> str:
        return f"<ChatTemplates {sorted(self._templates)}>"

    def choose(self, *, with_tools: bool) -> ChatTemplate:
        """The template for a request.

        Raises:
            ChatTemplateError: the model has none, or none that works.
        """
        template = self._templates.get("tool_use") if with_tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise ChatTemplateError(
                f"{self._problem}: use /v1/completions, or start the router with --chat-template."
            )
        return template


def load_chat_templates(directory: Path, tokenizer: Tokenizer, override: str | None = None) -> ChatTemplates:
    """The model's chat templates, or ``override``: a file or the text itself.

    Sources in order: chat_template.jinja and its like, tokenizer_config.json, chat_template.json.

    Raises:
        ChatTemplateError: one does not compile, or cannot be read.
    """
    if override is not None:
        return ChatTemplates({"default": named_chat_template(override, tokenizer.special_tokens)})
    sources = _from_processor(directory) | _from_config(tokenizer.config) | _from_files(directory)
    return ChatTemplates(
        {
            name: ChatTemplate(source.text, tokenizer.special_tokens, source.where)
            for name, source in sources.items()
        }
    )


def named_chat_template(named: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
    """The template that --chat-template names: a file, or the text itself.

    Raises:
        ChatTemplateError: it does not compile, cannot be read, or is not there.
    """
    is_text = "{" in named or "\n" in named
    source = named if is_text else _read(Path(os.path.expanduser(named)))
    return ChatTemplate(source, special_tokens)


def content_texts(index: int, content: Any) -> list[str | None]:
    """Texts of a list of parts; None for :data:`PLACED`.

    Raises:
        ChatTemplateError: it is no list of parts, or has others than text.
    """
    if not isinstance(content, list):
        raise ChatTemplateError(f"messages[{index}].content must be a string or a list of parts.")
    texts: list[str | None] = []
    for at, part in enumerate(content):
        if isinstance(part, str) or part is PLACED:
            texts.append(part if isinstance(part, str) else None)
            continue
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ChatTemplateError(f"messages[{index}].content has a part without a type.")
        if kind not in TEXT_PARTS:
            path = path_of(part, index, at)
            raise ChatTemplateError(f"{path} is of type {kind!r}, but this model takes text only.", path=path)
        text = part.get("refusal" if kind == "refusal" else "text")
        if not isinstance(text, str):
            raise ChatTemplateError(f"messages[{index}].content has a text part without text.")
        texts.append(text)
    return texts


# ---- where templates come from


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"The chat template {path} is no text in UTF-8: {error}") from error
    except (OSError, ValueError) as error:  # what no path can hold is a ValueError
        reason = error.strerror if isinstance(error, OSError) else error
        raise ChatTemplateError(f"The chat template {path} cannot be read: {reason}") from error


class _Source(NamedTuple):
    text: str
    where: str
    """Name of the file that has it."""


def _reason(error: jinja2.TemplateError) -> str:
    """What is wrong with a template, and in which line."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"syntax error in line {error.lineno}: {error.message}"
    return str(error)


def _from_config(config: Mapping[str, Any], where: str = "tokenizer_config.json") -> dict[str, _Source]:
    """Templates of a file of JSON: one string, or a list of ``{"name", "template"}``."""
    found = config.get("chat_template")
    if isinstance(found, str):
        return {"default": _Source(found, where)}
    if not isinstance(found, list):
        return {}
    try:
        return {str(entry["name"]): _Source(str(entry["template"]), where) for entry in found}
    except (TypeError, KeyError) as error:
        raise TokenizerError(f"chat_template in {where} is no list of named templates") from error


def _from_processor(directory: Path) -> dict[str, _Source]:
    """Template of chat_template.json, which older multimodal models have."""
    path = directory / "chat_template.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ChatTemplateError(f"The chat template {path} is not valid JSON: {error}") from error
    return _from_config(found, path.name) if isinstance(found, dict) else {}


def _from_files(directory: Path) -> dict[str, _Source]:
    paths = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    sources = {path.stem: _Source(_read(path), path.name) for path in paths}
    main = directory / "chat_template.jinja"
    if main.is_file():
        sources["default"] = _Source(_read(main), main.name)
    return sources


# ---- messages


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _text_of(message: Message) -> str:
    """The text of a message that :meth:`ChatTemplate._shape` has returned."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _with_parsed_arguments(call: Any) -> Any:
    """A tool call with its arguments as an object, which templates expect.

    In the API they are JSON text.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    if function.get("arguments") is None:
        return call | {"function": function | {"arguments": {}}}
    if not isinstance(function["arguments"], str):
        return call
    return call | {"function": function | {"arguments": _arguments(function["arguments"])}}


def _arguments(text: str) -> dict[str, Any]:
    """Arguments of a call as an object, as templates expect them.

    A model may write invalid JSON, or be cut off; its conversation continues all the same.
    """
    if many := too_many(text.encode()):
        raise ChatTemplateError(f"The arguments of a tool call hold more than {many}.")
    try:
        arguments: dict[str, Any] = msgspec.json.decode(text.strip() or "{}", type=dict[str, Any])
    except (ValueError, RecursionError):
        return {INVALID_JSON: text}
    return arguments


def _with_reasoning(message: Message) -> Message:
    """A message with its reasoning under all names: templates know one, clients send another.

    GPT-OSS's template calls it ``thinking``, and takes a call with that or with content.
    """
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if not isinstance(reasoning, str):
        return message
    named = {"reasoning": reasoning, "reasoning_content": reasoning}
    if not (message.get("tool_calls") and message.get("content")):
        named["thinking"] = reasoning
    return message | named


def _cut_after(text: str, core: str, trailing: str) -> str:
    """A text up to the last occurrence of ``core``, and ``trailing`` if that follows."""
    before, found, after = text.rpartition(core)
    if not found:
        raise ChatTemplateError(KEEPS_NOTHING)
    return before + core + (trailing if after.startswith(trailing) else "")


# ---- the environment


class _GenerationBlocks(jinja2.ext.Extension):
    """The tag ``{% generation %}``, which marks the model's text for training; ignored here."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson`` without the HTML escapes of Jinja's own."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_environment = _make_environment()
