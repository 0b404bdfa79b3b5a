"""JSON schemas whose objects have no properties but those that are named (pure).

JSON Schema allows an object any further key, and a model that must write JSON may add keys until it is cut.
Who writes ``additionalProperties`` or ``unevaluatedProperties`` has decided, and keeps that. Objects that
several schemas describe together (``allOf``, or ``properties`` beside alternatives) stay open: each schema
would forbid the keys of the others. So do those that require a key which they do not name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.turns.schema_formats import SCHEMAS_BY_NAME, VALUES

NAMED = ("properties", "patternProperties")
"""Keywords that name an object's keys."""
DECIDED = ("additionalProperties", "unevaluatedProperties")
TOGETHER = ("allOf", "anyOf", "oneOf", "$ref", "if", "then", "else", "dependentSchemas")
"""Keywords with further schemas of the same value."""

Schema = dict[str, Any]


def closed(schema: Any, *, also_unnamed: bool = False) -> Any:
    """The same schema with closed objects; ``also_unnamed``: those too that name no keys."""
    shared = _shared_objects(schema)

    def walk(each: Any) -> Any:
        if isinstance(each, list):
            return [walk(item) for item in each]
        if not isinstance(each, dict):
            return each
        found = {
            key: value
            if key in VALUES
            else {name: walk(part) for name, part in value.items()}
            if key in SCHEMAS_BY_NAME and isinstance(value, dict)
            else walk(value)
            for key, value in each.items()
        }
        names = any(key in each for key in NAMED)
        is_object = names or (also_unnamed and each.get("type") == "object")
        is_open = id(each) in shared or _requires_more(each) or any(key in each for key in DECIDED)
        if is_object and not is_open:
            found["additionalProperties"] = False
        return found

    return walk(schema)


def _requires_more(schema: Schema) -> bool:
    """Whether a required key may be none of those that the schema names."""
    required, named = schema.get("required"), schema.get("properties")
    known = named if isinstance(named, dict) else {}
    return isinstance(required, list) and not all(
        isinstance(each, str) and each in known for each in required
    )


def _shared_objects(root: Any) -> set[int]:
    """Identities of the schemas that describe an object together with others."""
    shared: set[int] = set()
    left = [
        part for schema in _schemas(root) if _is_mixture(schema) for part in (schema, *_of_same(schema, root))
    ]
    while left:
        schema = left.pop()
        if id(schema) not in shared:
            shared.add(id(schema))
            left += _of_same(schema, root)
    return shared


def _schemas(given: Any) -> Iterator[Schema]:
    """All objects of a schema: schemas, and those in between."""
    if isinstance(given, dict):
        yield given
    if isinstance(given, dict | list):
        for part in given.values() if isinstance(given, dict) else given:
            yield from _schemas(part)


def _is_mixture(schema: Schema) -> bool:
    parts = schema.get("allOf")
    names = any(isinstance(schema.get(key), dict) for key in NAMED)
    return (isinstance(parts, list) and len(parts) > 1) or (names and any(key in schema for key in TOGETHER))


def _of_same(schema: Schema, root: Any) -> Iterator[Schema]:
    """Schemas that hold for the same value as this one."""
    for key in TOGETHER:
        part = schema.get(key)
        if key == "$ref":
            part = _target(part, root)
        elif key == "dependentSchemas" and isinstance(part, dict):
            part = list(part.values())
        yield from (each for each in (part if isinstance(part, list) else [part]) if isinstance(each, dict))


def _target(reference: Any, root: Any) -> Any:
    """The schema that a local reference names; None for others."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, dict) else None
    return found
