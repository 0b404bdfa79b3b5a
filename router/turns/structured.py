"""Structured outputs of a request as grammars for llguidance (pure).

Several fields ask for structured outputs; each becomes one :class:`AnswerForm`. All grammars of one answer
(the form itself, reasoning before it, the tools that it may call) then make one text, which instances
compile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from router.errors import refuse
from router.openai_api import GenerationRequest, StructuredOutputs
from router.structured_config import StructuredOutputsConfig
from router.turns.schema_closing import closed
from router.turns.schema_formats import without_unknown_formats

WHITESPACE = r" |\r?\n[ \t]{0,32}"
"""Between the tokens of JSON: a space, or a new line with its indentation.

A model that only goes on with blanks would never end; llguidance's own default lets it.
"""
MAX_CHOICES = 4096
"""Choices of one request; more are refused with 400."""
MAX_JSON = 128 * 1024
"""Characters of a schema, of all choices, of structural tags."""
MAX_JSON_VALUES = MAX_JSON // 2 + 1
"""Values of a schema: each takes a character, and one more to the next."""
MAX_JSON_TEXT = 4 * MAX_JSON
"""Characters of a schema that comes as text, with its blanks."""
MAX_GRAMMAR = 32 * 1024
"""Characters of a regular expression or of a grammar."""
MAX_DEPTH = 120
"""Objects and lists of a schema within each other: the library reads few more."""

ANSWER = "answer"
Body = Mapping[str, Any]
"""One grammar of llguidance: a ``json_schema``, or a ``lark_grammar``."""

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


OTHER_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Kinds of structured output, by field."""


class AnswerForm(msgspec.Struct, frozen=True):
    """Form that an answer must have: a grammar, and the field that asked for it."""

    param: str
    """The field that asked for it."""
    body: Body


def form_of(request: GenerationRequest, config: StructuredOutputsConfig) -> AnswerForm | None:
    """The output form that a request requires; None for free text.

    Clients made for several servers ask for the same one under several names.

    Raises:
        ApiError: it asks for several, or what it asks for cannot be.
    """
    asked = [
        form
        for form in (
            _response_format(request.response_format, config),
            _structured_outputs(request.structured_outputs, "structured_outputs", config),
            *_older(request, config),
        )
        if form is not None
    ]
    others = [form for form in asked if form.body != asked[0].body]
    if others:
        names = " and ".join(form.param for form in asked)
        refuse(f"{names} exclude each other: an answer has one form.", others[0].param)
    return asked[0] if asked else None


def text_of(bodies: Mapping[str, Body]) -> str:
    """All grammars of an answer, by name, as instances take them.

    The first is where it begins.
    """
    grammars = [{"name": name, **body} for name, body in bodies.items()]
    return json.dumps({"grammars": grammars}, ensure_ascii=False, separators=(",", ":"))


def json_body(
    schema: Any,
    config: StructuredOutputsConfig,
    whitespace: str | None = None,
    *,
    strict: bool = False,
    closes: bool = False,
) -> Body:
    """JSON by a schema: an object, or a boolean.

    ``strict``: a schema with more than can be enforced is refused; else it is enforced as far as possible.
    ``closes``: an object has no properties but those that its schema names, unless that allows more.
    """
    if closes or config.disable_additional_properties:
        schema = closed(schema, also_unnamed=config.disable_additional_properties)
    schema = without_unknown_formats(schema)
    options: dict[str, Any] = {"whitespace_flexible": False, "lenient": not strict}
    if not config.disable_any_whitespace:
        options = {"whitespace_pattern": whitespace or WHITESPACE, "lenient": not strict}
    own = schema.get("x-guidance") if isinstance(schema, dict) else None
    options |= own if isinstance(own, dict) else {}
    return {"json_schema": ({} if isinstance(schema, bool) else dict(schema)) | {"x-guidance": options}}


def limit_depth(given: Any, param: str, what: str) -> None:
    """Refuse JSON that is nested too deeply, or holds too many values.

    Raises:
        ApiError: ``given`` is nested too deeply, or holds too many values.
    """
    level = [given]
    num_values = 1
    for _ in range(MAX_DEPTH + 1):
        lists = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        num_values += sum(map(len, lists))
        if num_values > MAX_JSON_VALUES:
            refuse(
                f"{param}: {what} may have {MAX_JSON_VALUES} values at most, got {num_values} or more.", param
            )
        level = [inner for each in lists for inner in each]
        if not level:
            return
    refuse(f"{param}: {what} is nested too deeply.", param)


def quoted(text: str) -> str:
    """A text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def pattern_of(text: str) -> str:
    """A regular expression that matches one text, to stand between a Lark grammar's slashes."""
    escaped = re.sub(r"([\\.+*?()|\[\]{}^$#&~/-])", r"\\\1", text)
    return escaped.replace("\n", r"\n")


# ---- the fields


def _response_format(wanted: Any, config: StructuredOutputsConfig) -> AnswerForm | None:
    param = "response_format"
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    if not isinstance(kind, str):
        refuse("response_format must be an object with a type.", param)
    match kind:
        case "text":
            return None
        case "json_object":
            given = wanted.get("schema")
            schema = None if given is None else _schema(given, param)
            more = schema if isinstance(schema, dict) else {}
            return AnswerForm(param, json_body({"type": "object"} | more, config))
        case "json_schema":
            named = wanted.get("json_schema")
            if not isinstance(named, dict) or "schema" not in named:
                refuse("response_format of type json_schema needs json_schema with a schema.", param)
            schema = _schema(named["schema"], param)
            return AnswerForm(param, json_body(schema, config, strict=named.get("strict") is True))
        case "structural_tag":
            return AnswerForm(param, _structural_tag(wanted, param, config))
    refuse(
        f"response_format.type must be text, json_object, json_schema or structural_tag, got {kind[:60]!r}.",
        param,
    )


def _structured_outputs(
    wanted: StructuredOutputs | None, param: str, config: StructuredOutputsConfig
) -> AnswerForm | None:
    if wanted is None:
        return None
    if wanted.json_object is False:
        wanted.json_object = None
    given = [kind for kind in KINDS if getattr(wanted, kind) is not None]
    if not given:
        refuse(f"{param} needs one of {', '.join(KINDS)}.", param)
    if len(given) > 1:
        refuse(f"{param} has {' and '.join(given)}, but an answer has one form.", param)
    if wanted.disable_any_whitespace is not None:
        config = msgspec.structs.replace(config, disable_any_whitespace=wanted.disable_any_whitespace)
    if wanted.disable_additional_properties is not None:
        closed = wanted.disable_additional_properties
        config = msgspec.structs.replace(config, disable_additional_properties=closed)
    return AnswerForm(
        param, _body(given[0], getattr(wanted, given[0]), param, config, wanted.whitespace_pattern)
    )


def _older(request: GenerationRequest, config: StructuredOutputsConfig) -> list[AnswerForm | None]:
    """Forms under the older names of vLLM, and those of SGLang."""
    forms: list[AnswerForm | None] = []
    for param, kind in OTHER_NAMES.items():
        given = getattr(request, param)
        if given is not None:
            body = _body(kind, given, param, config, request.guided_whitespace_pattern)
            forms.append(AnswerForm(param, body))
    return forms


def _body(kind: str, given: Any, param: str, config: StructuredOutputsConfig, whitespace: str | None) -> Body:
    match kind:
        case "json":
            return json_body(_schema(given, param), config, whitespace)
        case "json_object":
            return json_body({"type": "object"}, config, whitespace)
        case "regex":
            return {"lark_grammar": f"start: /{_regex(given, param)}/"}
        case "choice":
            return {"lark_grammar": "start: " + " | ".join(map(quoted, _choices(given, param)))}
        case "grammar":
            return {"lark_grammar": _lark(given, param)}
        case _:
            return _structural_tag(given, param, config, whitespace)


def _schema(given: Any, param: str) -> Any:
    """A schema, which may be JSON text."""
    if isinstance(given, str):
        _limit(given, MAX_JSON_TEXT, param, "the text of the schema")
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError) as error:
            refuse(f"{param}: the schema is not valid JSON: {error}", param)
    if given is False:
        refuse(f"{param}: no answer can follow the schema false.", param)
    if not isinstance(given, dict | bool):
        refuse(f"{param}: a schema must be a JSON object.", param)
    limit_depth(given, param, "the schema")
    _limit(json.dumps(given, ensure_ascii=False), MAX_JSON, param, "the schema")
    return given


def _regex(given: str, param: str) -> str:
    """A regular expression for the whole answer, so anchors add nothing.

    And a slash would end it.
    """
    if not given:
        refuse(f"{param}: the regular expression is empty.", param)
    _limit(given, MAX_GRAMMAR, param, "the regular expression")
    body = given.removeprefix("^")
    stripped = body.removesuffix("$")
    if stripped != body and (len(stripped) - len(stripped.rstrip("\\"))) % 2:
        stripped = body  # the dollar is escaped
    if not stripped:
        refuse(f"{param}: the regular expression matches nothing but an empty answer.", param)
    return re.sub(r"\\.|/|\n", _in_slashes, stripped, flags=re.DOTALL)


def _in_slashes(match: re.Match[str]) -> str:
    return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])


def _choices(given: Sequence[str], param: str) -> list[str]:
    if not given:
        refuse(f"{param}: choice must not be empty.", param)
    if len(given) > MAX_CHOICES:
        refuse(f"{param}: there may be {MAX_CHOICES} choices at most, got {len(given)}.", param)
    _limit("".join(given), MAX_JSON, param, "all choices together")
    if not all(given):
        refuse(f"{param}: a choice must not be empty.", param)
    return list(dict.fromkeys(given))


def _lark(given: str, param: str) -> str:
    """A grammar in Lark's form, or in the (G)BNF that llama.cpp and xgrammar read."""
    from llguidance.gbnf_to_lark import any_to_lark

    _limit(given, MAX_GRAMMAR, param, "the grammar")
    if not given.strip():
        refuse(f"{param}: the grammar is empty.", param)
    try:
        return str(any_to_lark(given))
    except Exception as error:  # noqa: BLE001 (the package raises nothing more special)
        refuse(f"{param}: the grammar cannot be read: {error}", param)


def _structural_tag(
    given: Any, param: str, config: StructuredOutputsConfig, whitespace: str | None = None
) -> Body:
    """``{"structures": [{begin, schema, end}], "triggers": [...]}``: text in which triggers begin forms."""
    if isinstance(given, str):
        _limit(given, MAX_JSON_TEXT, param, "the text of the structural tag")
        try:
            given = msgspec.json.decode(given)
        except (msgspec.DecodeError, RecursionError) as error:
            refuse(f"{param}: the structural tag is not valid JSON: {error}", param)
    structures = given.get("structures") if isinstance(given, dict) else None
    triggers = given.get("triggers") if isinstance(given, dict) else None
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list):
        refuse(f"{param}: a structural tag needs structures and triggers; no other kind is supported.", param)
    limit_depth(given, param, "the structural tag")
    _limit(json.dumps(given, ensure_ascii=False), MAX_JSON, param, "the structural tag")
    rules = []
    for index, structure in enumerate(structures):
        begin = structure.get("begin") if isinstance(structure, dict) else None
        end = structure.get("end", "") if isinstance(structure, dict) else None
        if not isinstance(begin, str) or not isinstance(end, str):
            refuse(f"{param}: structures[{index}] needs begin and end, both strings.", param)
        trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
        if trigger is None:
            refuse(f"{param}: structures[{index}].begin starts with none of the triggers.", param)
        body = json_body(_schema(structure.get("schema", True), param), config, whitespace)
        schema = json.dumps(body["json_schema"], ensure_ascii=False)
        rest = begin[len(trigger) :]
        parts = [quoted(rest) if rest else "", f"%json {schema}", quoted(end) if end else ""]
        rules.append(f"begin_{index}[lazy]: TEXT {quoted(trigger)}")
        rules.append(f"tag_{index}: begin_{index} {' '.join(filter(None, parts))}")
    tags = " | ".join(f"tag_{index}" for index in range(len(structures)))
    return {"lark_grammar": "\n".join([f"start: ({tags})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *rules])}


def _limit(text: str, most: int, param: str, what: str) -> None:
    if len(text) > most:
        refuse(f"{param}: {what} may have {most} characters at most, got {len(text)}.", param)
