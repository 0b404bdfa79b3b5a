"""Parts of ``make nightly``: which tests and commands each runs, read from ``parts.toml``."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = Path(__file__).with_name("parts.toml")
PLAIN = ["-m", "pytest", "-m", "not mesh", "--numprocesses", "3", "--dist", "worksteal"]
MESH = [
    "-m",
    "tests.second_tries",
    "-m",
    "mesh",
    "--numprocesses",
    "3",
    "--dist",
    "loadfile",
    "--no-loadscope-reorder",
]


@dataclass(frozen=True)
class Part:
    """One named part of the night."""

    name: str
    concerns: Sequence[str]
    """Paths whose later changes make a pass old."""
    plain: Sequence[str] = ()
    """Paths of tests without real processes.

    Paths that another part names more exactly are that part's.
    """
    mesh: Sequence[str] = ()
    """Paths of tests that start real processes, by the same rule."""
    prepare: Sequence[str] = ()
    """Commands that may fail: what they bring, tests skip without."""
    commands: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables; ``$(...)`` stands for what a command prints."""

    @property
    def paths(self) -> list[str]:
        """Paths whose changes make a pass of this part old."""
        return [*self.concerns, *self.plain, *self.mesh]


def read_parts(page: Path = PAGE) -> dict[str, Part]:
    """The parts by name, in their order. Raises ValueError for a name that stands twice."""
    parts: dict[str, Part] = {}
    for each in tomllib.loads(page.read_text())["part"]:
        part = Part(**each)
        if part.name in parts:
            raise ValueError(f"{page}: the part {part.name!r} stands twice")
        parts[part.name] = part
    return parts


def is_inside(path: str, folder: str) -> bool:
    """Whether a path is that folder, or lies in it."""
    return path == folder or path.startswith(folder + "/")


def owner(test: str, claims: Mapping[str, Sequence[str]]) -> str | None:
    """Name of the part that runs a file of tests.

    It is the one that names the longest path above the file.
    """
    found = [(len(path), name) for name, paths in claims.items() for path in paths if is_inside(test, path)]
    return max(found)[1] if found else None


def left_out(paths: Sequence[str], others: Iterable[str]) -> list[str]:
    """Paths of other parts that lie deeper in these ones."""
    return [other for other in others if other not in paths and any(is_inside(other, path) for path in paths)]


def commands_of(part: Part, parts: Mapping[str, Part]) -> list[list[str]]:
    """Command lines that all have to end with status 0, in order."""
    lines: list[list[str]] = []
    for kind, arguments in (("plain", PLAIN), ("mesh", MESH)):
        paths = list(getattr(part, kind))
        if paths:
            others = [path for other in parts.values() for path in getattr(other, kind)]
            ignored = [f"--ignore={path}" for path in left_out(paths, others)]
            lines.append([sys.executable, *arguments, *paths, *ignored])
    return lines + [command_line(each) for each in part.commands]


def command_line(text: str) -> list[str]:
    """Words of a command; ``python`` is the interpreter that runs now."""
    return [sys.executable if word == "python" else word for word in shlex.split(text)]


def value_of(text: str) -> str:
    """Value of a variable: the text, or what the command in ``$(...)`` prints. Raises CalledProcessError."""
    if not (text.startswith("$(") and text.endswith(")")):
        return text
    done = subprocess.run(command_line(text[2:-1]), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()
