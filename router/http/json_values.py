"""Count of the values in a JSON text, before it is decoded (pure).

To make objects of a text keeps the interpreter, and so all clients' streams, from anything else. That takes
long for many values, not for long strings. A few passes at the speed of memory count them. With these limits
decoding takes at most about 50 ms.
"""

from __future__ import annotations

MOST_STRINGS = 200_000
"""Strings in one body, keys of objects included."""
MOST_CONTAINERS = 60_000
"""Objects and lists in one body."""
MOST_VALUES = 1_100_000
"""Values of all kinds in one body: prompts may have a million token ids."""


def too_many(text: bytes) -> str:
    """Reason why a JSON text has too many values; empty if it has not."""
    if not _exceeds(text):  # also within strings
        return ""
    text = _without_escapes(text)
    return _of_strings(text) or _exceeds(_outside_strings(text))


def num_values(text: bytes) -> int:
    """Bound on the values of a JSON text; each list and object counts twice."""
    bare = _outside_strings(_without_escapes(text))
    return 1 + bare.count(b",") + _num_containers(bare)


def _exceeds(text: bytes) -> str:
    if strings := _of_strings(text):
        return strings
    if _num_containers(text) > MOST_CONTAINERS:
        return f"{MOST_CONTAINERS} objects and lists"
    return f"{MOST_VALUES} values" if text.count(b",") > MOST_VALUES else ""


def _of_strings(text: bytes) -> str:
    return f"{MOST_STRINGS} strings" if text.count(b'"') > 2 * MOST_STRINGS else ""


def _num_containers(text: bytes) -> int:
    return text.count(b"[") + text.count(b"{")


def _without_escapes(text: bytes) -> bytes:
    """The text, where each quote begins or ends a string."""
    return text.replace(b"\\\\", b"").replace(b'\\"', b"")


def _outside_strings(text: bytes) -> bytes:
    """Text outside of strings; a string without an end extends to the end."""
    return b"".join(text.split(b'"')[::2])
