"""JSON schemas of the kinds that are in use: configurations, records, forms, messages, function arguments.

At temperature 1 a small model seldom ends a text or a list by itself, so most of them bound both.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = (
    "name", "title", "id", "status", "count", "price", "tags", "owner", "address", "city", "items", "kind",
    "active", "created", "score", "notes", "parent", "children", "options", "level", "email", "quantity",
)  # fmt: skip
WORDS = (
    "red",
    "green",
    "blue",
    "small",
    "large",
    "open",
    "closed",
    "north",
    "south",
    "Mr. Bennet",
    'ü"\\',
    "",
)
PATTERNS = (
    "^[A-Z]{3}-[0-9]{4}$",
    "^[a-z0-9-]{1,20}$",
    "^#[0-9a-fA-F]{6}$",
    r"^\+?[0-9]{7,12}$",
    "^(yes|no)$",
)
FORMATS = ("date", "time", "uuid", "ipv4")


def schema(index: int) -> Schema:
    """The schema of this number, always the same: hand-written ones first, then random ones."""
    if index < len(WRITTEN):
        return WRITTEN[index]
    rng = random.Random(index)
    made = _object(rng, depth=rng.randrange(1, 4))
    if index % 5 == 0:
        made = _with_definitions(rng, made)
    return made


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randrange(1, 6))
    made: Schema = {
        "type": "object",
        "properties": {name: _value(rng, depth - 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }
    if rng.random() < 0.3:
        made["title"], made["description"] = "Record", "What is known of it."
    return made


def _with_definitions(rng: random.Random, made: Schema) -> Schema:
    made["$defs"] = {"part": _object(rng, 1), "code": {"type": "string", "pattern": rng.choice(PATTERNS)}}
    made["properties"] |= {
        "part": {"$ref": "#/$defs/part"},
        "codes": {"type": "array", "items": {"$ref": "#/$defs/code"}, "maxItems": 3},
    }
    made["required"] = [*made["required"], "part"]
    return made


def _value(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random, int], Schema]] = [_string, _number, _enum, _flag, _nullable]
    if depth > 0:
        kinds += [_object, _array, _array, _either, _tuple, _map]
    return rng.choice(kinds)(rng, depth)


def _string(rng: random.Random, depth: int) -> Schema:
    return rng.choice(
        [
            {"type": "string", "maxLength": 80},
            {"type": "string", "maxLength": rng.randrange(1, 40)},
            {"type": "string", "minLength": 2, "maxLength": 10},
            {"type": "string", "pattern": rng.choice(PATTERNS)},
            {"type": "string", "format": rng.choice(FORMATS)},
        ]
    )


def _number(rng: random.Random, depth: int) -> Schema:
    low = rng.randrange(-1000, 1000)
    return rng.choice(
        [
            {"type": "integer"},
            {"type": "number"},
            {"type": "integer", "minimum": low, "maximum": low + rng.randrange(1, 5000)},
            {"type": "number", "minimum": low, "maximum": low + 10.5},
            {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": rng.choice([5, 10, 25])},
        ]
    )


def _enum(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.2:
        return {"const": rng.choice(WORDS)}
    chosen: list[Any] = rng.sample(WORDS, 3)
    return {"enum": [*chosen, *rng.choice([[], [1, 2.5], [None, True]])]}


def _flag(rng: random.Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "boolean", "null"])}


def _nullable(rng: random.Random, depth: int) -> Schema:
    return {"type": [rng.choice(["string", "integer", "boolean"]), "null"], "maxLength": 60}


def _array(rng: random.Random, depth: int) -> Schema:
    made: Schema = {"type": "array", "items": _value(rng, depth - 1)}
    if rng.random() < 0.95:
        made |= {"minItems": rng.randrange(0, 2), "maxItems": rng.randrange(2, 5)}
    return made


def _tuple(rng: random.Random, depth: int) -> Schema:
    items = [_value(rng, depth - 1) for _ in range(2)]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": 2}


def _map(rng: random.Random, depth: int) -> Schema:
    named = {"^[a-z]{1,12}$": _value(rng, 0)}
    return {"type": "object", "patternProperties": named, "additionalProperties": False, "maxProperties": 6}


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_object(rng, depth - 1), _value(rng, 0), {"type": "null"}]}


WRITTEN: list[Schema] = [
    {"type": "object"},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 8},
    {"type": "string", "maxLength": 30},
    {"type": "string"},
    {"type": "number"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"enum": ["a", "b", 3, None, {"x": 1}, [1, 2]]},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 8}]},
    {  # what pydantic writes
        "$defs": {
            "Step": {
                "properties": {
                    "explanation": {"title": "Explanation", "type": "string", "maxLength": 60},
                    "output": {"title": "Output", "type": "string", "maxLength": 20},
                },
                "required": ["explanation", "output"],
                "title": "Step",
                "type": "object",
                "additionalProperties": False,
            }
        },
        "properties": {
            "steps": {"items": {"$ref": "#/$defs/Step"}, "title": "Steps", "type": "array", "maxItems": 4},
            "final_answer": {"anyOf": [{"type": "string", "maxLength": 40}, {"type": "null"}], "default": None},
        },
        "required": ["steps", "final_answer"],
        "title": "MathResponse",
        "type": "object",
        "additionalProperties": False,
    },
    {  # a tree
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer", "minimum": 0, "maximum": 99},
                    "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                    "right": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "left", "right"],
                "additionalProperties": False,
            }
        },
    },
    {  # a list that ends
        "$defs": {"cell": {"type": ["object", "null"], "properties": {"next": {"$ref": "#/$defs/cell"}},
                           "required": ["next"], "additionalProperties": False}},
        "type": "object", "properties": {"head": {"$ref": "#/$defs/cell"}}, "required": ["head"],
        "additionalProperties": False,
    },
    {  # told apart by a constant
        "type": "object",
        "properties": {
            "shape": {
                "anyOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "minimum": 0}},
                        "required": ["kind", "radius"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {
                            "kind": {"const": "square"},
                            "side": {"type": "number", "minimum": 0, "maximum": 100},
                        },
                        "required": ["kind", "side"],
                        "additionalProperties": False,
                    },
                ]
            }
        },
        "required": ["shape"],
        "additionalProperties": False,
    },
    {  # several at once
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "boolean"}}, "required": ["b"], "additionalProperties": True},
        ]
    },
    {  # exactly one
        "oneOf": [
            {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"],
             "additionalProperties": False},
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 5},
        ]
    },
    {  # keys by pattern
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,8}$": {"type": "string", "maxLength": 10}},
        "additionalProperties": False,
    },
    {  # deep
        "type": "object", "required": ["a"], "additionalProperties": False, "properties": {"a": {
            "type": "object", "required": ["b"], "additionalProperties": False, "properties": {"b": {
                "type": "array", "minItems": 1, "maxItems": 2, "items": {
                    "type": "array", "minItems": 1, "maxItems": 2, "items": {
                        "type": "object", "required": ["c"], "additionalProperties": False,
                        "properties": {"c": {"type": "array", "items": {"type": "null"}, "maxItems": 2}},
                    },
                },
            }},
        }},
    },
    {  # all optional
        "type": "object",
        "properties": {name: {"type": "integer", "minimum": 0, "maximum": 9} for name in NAMES},
        "additionalProperties": False,
    },
    {"type": "array", "prefixItems": [{"type": "string", "maxLength": 5}, {"type": "integer"}], "items": False,
     "minItems": 2},
    {"type": "object", "properties": {"when": {"type": "string", "format": "date-time"},
                                      "id": {"type": "string", "format": "uuid"},
                                      "mail": {"type": "string", "format": "email"},
                                      "host": {"type": "string", "format": "ipv4"}},
     "required": ["when", "id", "mail", "host"], "additionalProperties": False},
    {"type": "object", "properties": {"big": {"type": "integer", "minimum": 10**12, "maximum": 10**12 + 7},
                                      "tiny": {"type": "number", "minimum": -0.001, "maximum": 0.001}},
     "required": ["big", "tiny"], "additionalProperties": False},
    {"type": "object", "properties": {"a b": {"type": "integer"}, "ü": {"type": "boolean"}, '"': {"type": "null"}},
     "required": ["a b", "ü", '"'], "additionalProperties": False},
    {"enum": [f"choice number {number}" for number in range(300)]},
]  # fmt: skip
"""Those that a random choice would seldom make."""
