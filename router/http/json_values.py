"""How many values a JSON text holds, before it is decoded (pure).

To make objects of a text keeps the interpreter, and so all clients' streams, from anything else. That takes
long for many values, not for long strings. A few passes at the speed of memory count them.
"""

from __future__ import annotations

import re

MOST_STRINGS = 250_000
"""Strings in one body, keys of objects included."""
MOST_CONTAINERS = 100_000
"""Objects and lists in one body."""
MOST_VALUES = 2_000_000
"""Values of all kinds in one body: prompts may have that many token ids."""

STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A JSON string; an unterminated one extends to the end of the text.

Else the search would start again at each of its quotes.
"""


def too_many(text: bytes) -> str:
    """What a JSON text holds too much of, with the limit; empty if nothing."""
    quotes = text.count(b'"') - text.count(b'\\"')  # at least one for each string, at most two
    if quotes > 2 * MOST_STRINGS:
        return f"{MOST_STRINGS} strings"
    if _brackets(text) > MOST_CONTAINERS or text.count(b",") > MOST_VALUES:  # also those within strings
        bare = STRING.sub(b"", text)
        if _brackets(bare) > MOST_CONTAINERS:
            return f"{MOST_CONTAINERS} objects and lists"
        if bare.count(b",") > MOST_VALUES:
            return f"{MOST_VALUES} values"
    return ""


def _brackets(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")
