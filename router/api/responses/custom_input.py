"""Free text of a custom tool's call, written as a function's one argument (pure)."""

from __future__ import annotations

import re

import msgspec

INPUT = "input"
"""The name of that argument."""

BEGINNING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
BEGINNING_AT_MOST = 64
"""Characters within which the argument's beginning must come: blanks are few."""
PIECE = re.compile(
    r'[^"\\]+'
    r'|\\["\\/bfnrt]'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"
)
"""A part of a JSON string that stands for whole characters."""
ESCAPE_AT_MOST = 12
"""Characters of the longest escape."""


def custom_arguments(text: str) -> str:
    """A free text as the arguments of a function."""
    return msgspec.json.encode({INPUT: text}).decode()


def custom_input(arguments: str) -> str:
    """The free text of arguments, as :class:`InputReader` reads it."""
    reader = InputReader()
    return reader.feed(arguments) + reader.end()


class InputReader:
    """Reader of arguments that come in pieces, cut anywhere.

    Their beginning decides. JSON with the text first gives the text as far as it goes; anything else is the
    text itself when it is over.
    """

    def __init__(self) -> None:
        self._text = ""
        """Arguments, or what is left of them, that have given nothing yet."""
        self._is_inside = False
        self._is_over = False

    def __repr__(self) -> str:
        return f"<InputReader inside={self._is_inside} over={self._is_over}>"

    def feed(self, arguments: str) -> str:
        """Text that the next arguments add."""
        if self._is_over:
            return ""
        self._text += arguments
        if not self._is_inside:
            begun = BEGINNING.match(self._text[:BEGINNING_AT_MOST])
            if begun is None:
                return ""
            self._is_inside, self._text = True, self._text[begun.end() :]
        return self._read()

    def end(self) -> str:
        """Text that is left when no more arguments come."""
        rest, self._text = self._text, ""
        return rest if self._is_inside or self._is_over else _whole(rest)

    def _read(self) -> str:
        found: list[str] = []
        position = 0
        while position < len(self._text):
            piece = PIECE.match(self._text, position)
            if piece is not None:
                found.append(_unescaped(piece[0]))
                position = piece.end()
            elif self._text[position] == '"':
                self._is_over, position = True, len(self._text)
            elif len(self._text) - position < ESCAPE_AT_MOST:
                break  # an escape whose rest may come
            else:
                found.append(self._text[position])
                position += 1
        self._text = self._text[position:]
        return "".join(found)


def _unescaped(piece: str) -> str:
    return str(msgspec.json.decode(f'"{piece}"')) if piece.startswith("\\") else piece


def _whole(arguments: str) -> str:
    """The text of arguments that are not in the usual form."""
    try:
        found = msgspec.json.decode(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = found.get(INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
