"""String formats in a JSON schema (pure), for :mod:`router.turns.structured`.

To JSON Schema a format that is not known is a remark: pydantic and OpenAPI write ``password``, ``path``,
``binary`` and the like.
"""

from __future__ import annotations

from typing import Any

FORMATS = frozenset(
    {
        "date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri",
        "uuid",
    }
)  # fmt: skip
"""Formats of strings that llguidance knows."""
VALUES = ("const", "default", "enum", "examples")
"""What holds values, not schemas."""
SCHEMAS_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")


def without_unknown_formats(schema: Any) -> Any:
    """The same schema without formats that the library would refuse."""
    if isinstance(schema, list):
        return [without_unknown_formats(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in FORMATS:
            continue
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            kept[key] = {name: without_unknown_formats(each) for name, each in value.items()}
        else:
            kept[key] = value if key in VALUES else without_unknown_formats(value)
    return kept
