"""Saved answers with capsules, as ``lockstep replay`` and ``lockstep verify`` read them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from coordinator.settings.flags import flag
from router.capsule import Capsule, CapsuleError, CapsuleProblem, found_in, read
from router.errors import one_line

MOST_CHARACTERS = 2000
"""Characters of a printed line: capsules may come from anybody."""

Files = Annotated[
    tuple[str, ...],
    flag(
        positional=True,
        help="Saved answers with a capsule: bodies, streams, JSON lines, or capsules alone; - reads standard "
        "input.",
    ),
]


@dataclass(frozen=True)
class Saved:
    """Capsule with its place in a file."""

    place: str
    """The file, and the line there, to stand before a remark."""
    capsule: Capsule
    text: bytes
    """The capsule as JSON, as it was saved."""


@dataclass(frozen=True)
class Unread:
    """Capsule that cannot be read, in words for its owner."""

    message: str
    problem: CapsuleProblem


def read_files(files: Sequence[str]) -> tuple[list[Saved], list[Unread]]:
    """The capsules of all files, and what is wrong with those that cannot be read."""
    found: list[Saved] = []
    problems: list[Unread] = []
    for file in files:
        shown = "standard input" if file == "-" else file
        try:
            texts = found_in(sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes())
        except OSError as error:
            message = f"{shown} cannot be read: {error.strerror or error}"
            problems.append(Unread(message, CapsuleProblem.UNREADABLE))
            continue
        except CapsuleError as error:
            problems.append(Unread(f"{shown}: {error}", error.problem))
            continue
        for place, text in texts:
            try:
                found.append(Saved(f"{shown}: {place}", read(text), text))
            except CapsuleError as error:
                problems.append(Unread(f"{shown}: {place}{error}", error.problem))
    return found, problems


def line_of(saved: Saved, words: str) -> str:
    """Line to print about a capsule."""
    return saved.place + one_line(f"{saved.capsule.id}: {words}", MOST_CHARACTERS)
