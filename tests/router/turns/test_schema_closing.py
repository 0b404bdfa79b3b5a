"""Objects of schemas get no keys but those that are named, where nobody has decided."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from router.turns.grammar_check import checked_grammar
from router.turns.schema_closing import closed
from router.turns.structured import text_of

NAME = {"name": {"type": "string"}}
SHUT = {"additionalProperties": False}


class Leg(BaseModel):
    city: str
    extras: dict[str, Any] = {}


class Trip(BaseModel):
    """As pydantic-ai, instructor and langchain write tools."""

    legs: list[Leg]
    first: Leg | None = None


def opened(schema: Any) -> list[str]:
    """Paths of objects that name keys and may have others."""
    found = []

    def walk(each: Any, path: str) -> None:
        if isinstance(each, dict):
            if isinstance(each.get("properties"), dict) and each.get("additionalProperties") is not False:
                found.append(path)
            for key, value in each.items():
                walk(value, f"{path}.{key}")
        elif isinstance(each, list):
            for index, value in enumerate(each):
                walk(value, f"{path}[{index}]")

    walk(schema, "$")
    return found


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": NAME}, {"properties": NAME, **SHUT}),
        ({"patternProperties": {"^x": {}}}, {"patternProperties": {"^x": {}}, **SHUT}),
        ({"items": [{"properties": NAME}]}, {"items": [{"properties": NAME, **SHUT}]}),
        ({"anyOf": [{"properties": NAME}, {}]}, {"anyOf": [{"properties": NAME, **SHUT}, {}]}),
        ({"allOf": [{"properties": NAME}]}, {"allOf": [{"properties": NAME, **SHUT}]}),
        # a property may have the name of a keyword, and a value its form
        ({"properties": {"properties": {"type": "string"}}}, {"properties": {"properties": {"type": "string"}}, **SHUT}),
        ({"enum": [{"properties": NAME}]}, {"enum": [{"properties": NAME}]}),
    ],
)  # fmt: skip
def test_objects_are_closed(schema: Any, expected: Any) -> None:
    before = json.dumps(schema)
    assert closed(schema) == expected
    assert json.dumps(schema) == before, "what the client sent, and the prompt shows, is not changed"


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {"type": "object"},
        {"type": "object", "properties": NAME, "additionalProperties": True},
        {"type": "object", "properties": NAME, "additionalProperties": {"type": "integer"}},
        {"type": "object", "properties": NAME, "unevaluatedProperties": True},
        {"type": "object", "properties": NAME, "required": ["other"]},
        {"type": "object", "properties": NAME, "required": ["name", []]},
        {"allOf": [{"properties": NAME}, {"properties": {"b": {}}, "required": ["b"]}]},
        {"properties": NAME, "anyOf": [{"required": ["b"], "properties": {"b": {}}}]},
        {
            "allOf": [{"$ref": "#/$defs/a~1b"}, {"properties": {"c": {}}}],
            "$defs": {"a/b": {"$ref": "#/$defs/d"}, "d": {"properties": NAME}},
        },
        {"allOf": [{"$ref": "#"}, {"$ref": "https://elsewhere"}, {"$ref": "#/$defs/no"}]},
    ],
    ids=range(11),
)
def test_objects_stay_open(schema: Any) -> None:
    """Where the client has decided, or another schema names more keys of the same object."""
    assert closed(schema) == schema


def test_a_configuration_may_close_objects_that_name_no_keys() -> None:
    assert closed({"type": "object"}, also_unnamed=True) == {"type": "object", **SHUT}


def test_models_of_pydantic_are_closed_down_to_their_parts() -> None:
    schema = Trip.model_json_schema()
    assert opened(schema) == ["$", "$.$defs.Leg"]
    shut = closed(schema)
    assert opened(shut) == []
    assert shut["$defs"]["Leg"]["properties"]["extras"]["additionalProperties"] is True
    assert checked_grammar(text_of({"tool": {"json_schema": shut}})).problem == ""
