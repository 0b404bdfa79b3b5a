"""The enforceable part of a JSON schema, and the rest by its location (pure).

The library reports the first keyword or pattern that it cannot follow, without its location. Here a schema is
rewritten so that it can be followed, and each thing left out is reported by its JSON path.
:mod:`router.turns.grammar_check` asks, only for grammars that the library does not take as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from router.turns.schema_formats import SCHEMAS_BY_NAME, VALUES

MOST_TRIALS = 256
"""Parts of a schema that are tried alone to find the one that is wrong."""
MOST_REPORTED = 32
"""Locations named in one report."""
MAX_LOCATION = 200
"""Characters of a reported location: clients choose the names of properties."""

UNKNOWN = frozenset(
    {
        "$dynamicAnchor", "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "else", "if", "maxContains", "minContains", "not", "propertyNames", "then",
        "unevaluatedItems", "unevaluatedProperties", "uniqueItems",
    }
)  # fmt: skip
"""Keywords of JSON Schema that the library cannot enforce."""
DEPEND_ON = {
    "then": "if", "else": "if", "minContains": "contains", "maxContains": "contains",
    "$dynamicAnchor": "$dynamicRef",
}  # fmt: skip
"""Keywords that mean nothing without another one, which is reported instead of them."""
ONE_OF = "oneOf"
SHARED = ("$defs", "definitions")
"""Keywords of a root that ``$ref`` of its parts point to."""
ABOUT_NAMES = {"$schema", "title", "description", "$comment", "type"}
"""Keywords of ``propertyNames`` that no name of a property contradicts, if the type is string."""
SAYS_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
    "not": (False,),
}
"""Values with which a keyword excludes nothing."""

Trial = Callable[[Any], str]
"""Tries a schema: what is wrong with it, empty if nothing is."""


class Supported(msgspec.Struct, frozen=True):
    """A schema that can be followed, and where the given one demands more."""

    schema: Any
    unenforced: list[str]
    """JSON paths of what was left out, such as ``$.properties.tags.uniqueItems``."""


def supported(schema: Mapping[str, Any], trial: Trial) -> Supported:
    """A schema without what the library cannot enforce."""
    walk = _Walk({key: schema[key] for key in SHARED if key in schema}, trial)
    kept = walk.rewritten(schema, "$")
    return Supported(kept, walk.unenforced)


def where_wrong(schema: Any, trial: Trial) -> str:
    """The JSON path of the innermost part that alone is wrong for the same reason."""
    wanted = trial(schema)
    shared = {key: schema[key] for key in SHARED if isinstance(schema, dict) and key in schema}
    path, trials = "$", 0
    while True:
        for location, part in parts_of(schema, path):
            trials += 1
            if trials > MOST_TRIALS:
                return _shortened(path)
            if trial({**shared, **part} if isinstance(part, dict) else part) == wanted:
                schema, path = part, location
                break
        else:
            return _shortened(path)


def _shortened(location: str) -> str:
    return location if len(location) <= MAX_LOCATION else location[: MAX_LOCATION - 3] + "..."


def _below(path: str, name: str) -> str:
    """The path of a part, as far as :func:`_shortened` shows it.

    A walk holds a path for each level, and each would repeat the names of all above.
    """
    return path if len(path) > MAX_LOCATION else f"{path}.{name[:MAX_LOCATION]}"


def parts_of(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The schemas directly below a schema, with their JSON paths."""
    if not isinstance(schema, dict):
        return
    for key, value in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            yield from ((_below(_below(path, key), name), part) for name, part in value.items())
        elif isinstance(value, list) and key not in VALUES:
            yield from ((f"{_below(path, key)}[{index}]", part) for index, part in enumerate(value))
        elif isinstance(value, dict) and key not in VALUES:
            yield _below(path, key), value


class _Walk:
    """One pass over a schema."""

    def __init__(self, shared: Mapping[str, Any], trial: Trial) -> None:
        self._shared = shared
        self._trial = trial
        self.unenforced: list[str] = []

    def rewritten(self, schema: Any, path: str) -> Any:
        if isinstance(schema, list):
            return [self.rewritten(part, f"{path}[{index}]") for index, part in enumerate(schema)]
        if not isinstance(schema, dict):
            return schema
        if schema.get("not") in ({}, True) and path != "$":
            return False  # nothing is by this schema: how zod writes "never"
        kept: dict[str, Any] = {}
        for key, value in schema.items():
            location = _below(path, key)
            if key in UNKNOWN:
                self._leave_out(key, value, location, kept, schema)
            elif key == "pattern" and isinstance(value, str) and not self._is_readable(value):
                self._report(location)
            elif key == "patternProperties" and isinstance(value, dict):
                kept[key] = self._readable_names(value, location, kept, schema)
            elif key == ONE_OF and ONE_OF in self._trial({**self._shared, key: _any_of(value)}):
                self._report(f"{location} (as anyOf)")
                kept["anyOf" if "anyOf" not in schema else key] = self.rewritten(value, location)
            elif key in SCHEMAS_BY_NAME and isinstance(value, dict):
                kept[key] = {
                    name: self.rewritten(part, _below(location, name)) for name, part in value.items()
                }
            else:
                kept.setdefault(key, value if key in VALUES else self.rewritten(value, location))
        return kept

    def _leave_out(
        self, key: str, value: Any, location: str, kept: dict[str, Any], schema: Mapping[str, Any]
    ) -> None:
        """Remove a keyword, or replace it by others with the same meaning."""
        if key in DEPEND_ON or any(value == free for free in SAYS_NOTHING.get(key, ())):
            return
        if key == "propertyNames" and _is_any_name(value):
            return
        pattern = _pattern_of_names(value) if key == "propertyNames" else None
        named = "properties" in schema or "patternProperties" in schema
        if pattern is None or named or not self._is_readable(pattern):
            self._report(location)
            return
        values = schema.get("additionalProperties", True)
        below = _below(location, "additionalProperties")
        kept["patternProperties"] = {pattern: self.rewritten(values, below)}
        kept["additionalProperties"] = False

    def _readable_names(
        self, named: Mapping[str, Any], location: str, kept: dict[str, Any], schema: Mapping[str, Any]
    ) -> dict[str, Any]:
        """``patternProperties`` whose patterns the library reads; other names may then be anything."""
        readable = {}
        for pattern, part in named.items():
            if self._is_readable(pattern):
                readable[pattern] = self.rewritten(part, _below(location, pattern))
            else:
                self._report(_below(location, pattern))
                if "additionalProperties" in schema:
                    kept["additionalProperties"] = True
        return readable

    def _is_readable(self, pattern: Any) -> bool:
        return not self._trial({"type": "string", "pattern": pattern})

    def _report(self, location: str) -> None:
        if len(self.unenforced) < MOST_REPORTED:
            self.unenforced.append(_shortened(location))


def _any_of(schema: Any) -> Any:
    """Alternatives without their own alternatives, to try the outermost alone."""
    if isinstance(schema, list):
        return [_any_of(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {("anyOf" if key == ONE_OF else key): _any_of(value) for key, value in schema.items()}


def _is_any_name(names: Any) -> bool:
    """Whether ``propertyNames`` excludes no name."""
    if not isinstance(names, dict):
        return names is True
    return names.keys() <= ABOUT_NAMES and names.get("type", "string") == "string"


def _pattern_of_names(names: Any) -> str | None:
    """The pattern of all names that ``propertyNames`` allows; None if no pattern is equivalent."""
    if not isinstance(names, dict):
        return None
    (key, value), *more = [item for item in names.items() if item[0] not in ABOUT_NAMES] or [("", None)]
    if more:
        return None
    if key == "pattern" and isinstance(value, str):
        return value
    allowed = value if key == "enum" else [value] if key == "const" else None
    if isinstance(allowed, list) and allowed and all(isinstance(name, str) for name in allowed):
        return f"^({'|'.join(map(re.escape, allowed))})$"
    return None
